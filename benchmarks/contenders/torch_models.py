"""Common parts of the PyTorch contenders: the two networks, the device, the number of threads, evaluation."""

# pyright: reportMissingImports=false
import child
import torch
from torch import nn

EVALUATION = 1000  # rows at a time


def device():
    """The GPU if there is one, in TF32, as is JAX's default there."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(kind, start):
    """The network of a job with its start values."""
    if kind == "mlp":
        layers = [nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)]
    else:
        layers = [Turned(), nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(torch.from_numpy(value))
    return model


class Turned(nn.Module):
    """Images with their channels first."""

    def forward(self, x):
        return x.permute(0, 3, 1, 2)


def threads(trial):
    """Set the faster number of threads: one, or one per core."""

    def with_threads(number):
        torch.set_num_threads(number)
        trial()

    number = child.fastest(dict.fromkeys([1, child.CORES]), with_threads)
    torch.set_num_threads(number)
    return number


def test(data, device):
    return torch.from_numpy(data.test_x).to(device), torch.from_numpy(data.test_y).long().to(device)


@torch.no_grad()
def evaluate(model, rows):
    """Loss and accuracy on rows for evaluation."""
    loss, right = 0.0, 0.0
    for x, y in zip(*(a.split(EVALUATION) for a in rows), strict=True):
        z = model(x)
        loss += nn.functional.cross_entropy(z, y, reduction="sum").item()
        right += (z.argmax(1) == y).sum().item()
    return {"loss": loss / len(rows[1]), "accuracy": right / len(rows[1])}


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
