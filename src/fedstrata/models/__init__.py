"""Networks for images and tables, and trained models as files."""

from fedstrata.models.base import Model as Model
from fedstrata.models.cnn import CNN as CNN
from fedstrata.models.densenet import DenseNet121 as DenseNet121
from fedstrata.models.linear import Linear as Linear
from fedstrata.models.mlp import MLP as MLP
from fedstrata.models.mobilenet import MobileNetV3Small as MobileNetV3Small
from fedstrata.models.pretrained import load_pretrained as load_pretrained
from fedstrata.models.raveled import Raveled as Raveled
from fedstrata.models.resnet import ResNet18 as ResNet18
from fedstrata.models.saved import TrainedModel as TrainedModel
from fedstrata.models.saved import load_model as load_model
from fedstrata.models.saved import save_model as save_model
