"""The methods of the experiment, and the objective of each."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm

STEPS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # tried for every method
LOCAL_STEPS = 8
PARTIAL = ("FedX2", "SOX", "TrackedX")  # minimise the partial-AUC objective
SQUARE = ("CODASCA", "CODAPlus")  # min-max forms of the square loss
WORDS = {
    "FedX2": "FedX2 (partial AUC)",
    "FedX1": "FedX1 (AUC)",
    "FedAvg": "FedAvg (cross-entropy)",
    "LocalPair": "LocalPair (own pairs)",
    "CODASCA": "CODASCA (square loss)",
    "SOX": "SOX (all data in one place)",
    "PairSGD": "PairSGD (all data in one place)",
}


def settings(**steps: float) -> dict[str, dict[str, Any]]:
    """A step size for each method, in the order of the table.

    Args:
        **steps: by method.
    """
    return {name: {"step_size": step, "local_steps": LOCAL_STEPS} for name, step in steps.items()}


def pair_loss(algorithm: "Algorithm") -> Any:
    """Squared hinge, or e^{squared hinge} under a logarithm for partial AUC, or the square of CODASCA.

    Args:
        algorithm: the method.
    """
    from fedstrata.problems.pairwise import pair_losses

    names = {cls.__name__ for cls in type(algorithm).__mro__}
    if names & {*SQUARE}:
        return pair_losses.Square()
    return pair_losses.KLOPAUC(1.0) if names & {*PARTIAL} else pair_losses.SquaredHinge()
