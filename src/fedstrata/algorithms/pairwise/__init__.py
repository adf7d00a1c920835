"""Methods for pairwise problems: AUC, partial AUC, average precision."""

from fedstrata.algorithms.pairwise.codasca import CODASCA as CODASCA
from fedstrata.algorithms.pairwise.codasca import CODAPlus as CODAPlus
from fedstrata.algorithms.pairwise.fedx1 import FedX1 as FedX1
from fedstrata.algorithms.pairwise.fedx2 import FedX2 as FedX2
from fedstrata.algorithms.pairwise.local_pair import SOX as SOX
from fedstrata.algorithms.pairwise.local_pair import LocalPair as LocalPair
from fedstrata.algorithms.pairwise.local_pair import PairSGD as PairSGD
from fedstrata.algorithms.pairwise.tracked_x import TrackedX as TrackedX
