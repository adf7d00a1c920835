"""Tasks for meta-learning, one per client: sinusoids, and five characters of Omniglot."""

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstrata.experiments.base import Setup

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation

TASKS = ("sinusoids", "omniglot")
WAYS, COMPONENTS = 5, 20


def build(
    task: str = "sinusoids", clients: int = 10, steps: int = 1, hidden: int = 0, adaptation: float = 0.0, seed: int = 0
) -> Setup:
    """Each client is a task, with data to adapt on ("train") and data for the loss ("query").

    Args:
        task: "sinusoids" (synthetic: needs no files) or "omniglot".
        clients: how many.
        steps: of adaptation, K − 1.
        hidden: units (0: 8 in each of two layers for sinusoids, where finn2017 has 40; 5 in one layer for Omniglot).
            Methods that keep Jacobians need the square of the number of parameters.
        adaptation: its step size (0: 0.1 for sinusoids, 10 for Omniglot).
        seed: of everything random in the data.
    """
    from fedstrata.base.errors import unknown

    if task not in TASKS:
        raise unknown("task of maml", task, TASKS)
    make = sinusoids if task == "sinusoids" else omniglot
    return make(clients, steps, hidden, adaptation, np.random.default_rng(seed))


def sinusoids(clients: int, steps: int, hidden: int, adaptation: float, rng: Any) -> Setup:
    """y = a sin(x − b), a in [0.1, 5], b in [0, π], x in [−5, 5] (finn2017), and a network that adapts all parameters.

    A client has 100 points to adapt on and 100 queries. A new task has ten points to adapt on.
    """
    from fedstrata.models import MLP
    from fedstrata.problems.compositions import Adapt
    from fedstrata.problems.losses import Regression

    from .problems import MetaLearning

    def task(rows: int) -> list[dict[str, Any]]:
        amplitude, phase = rng.uniform(0.1, 5.0), rng.uniform(0.0, np.pi)
        x = rng.uniform(-5.0, 5.0, (rows + 100, 1)).astype(np.float32)
        whole = {"x": x, "y": (amplitude * np.sin(x - phase)).astype(np.float32)}
        return [{key: values[part] for key, values in whole.items()} for part in (slice(rows), slice(rows, None))]

    hidden = hidden or 8
    loss = Regression(MLP((1, hidden, hidden, 1), activation="tanh"))
    known, new = ([task(rows) for _ in range(clients)] for rows in (100, 10))
    return Setup(MetaLearning.of(loss, [Adapt(loss, adaptation or 0.1)] * steps), federated(known, new))


def omniglot(clients: int, steps: int, hidden: int, adaptation: float, rng: Any) -> Setup:
    """5-way 1-shot: five characters of the background alphabets per client; new tasks are of the other alphabets.

    An example is five drawings by one person, one of each character: adapting on one example is one shot. Ten of the 20
    people are for adaptation, ten for queries; a new task has one and ten. The network sees 20 principal components of
    the background drawings, whitened, and has one hidden layer. Adaptation makes a last layer from zero, since any
    numbering of labels will do, and the first layer passes unchanged; only FedAvg uses the last layer of x.
    """
    from fedstrata.data import load
    from fedstrata.models import MLP
    from fedstrata.problems.losses import Classification

    from .problems import AdaptHead, Episode, MetaLearning

    data = load("omniglot", flat=True)
    assert data.test is not None
    mean = data.train["x"].mean(axis=0)
    centred = data.train["x"] - mean
    variances, directions = np.linalg.eigh(centred.T @ centred / len(centred))
    scaled = directions[:, -COMPONENTS:] / np.sqrt(variances[-COMPONENTS:])

    def task(drawings: dict[str, Any], shots: int) -> list[dict[str, Any]]:
        labels = rng.choice(np.unique(drawings["y"]), WAYS, replace=False)
        pictures = np.stack([drawings["x"][drawings["y"] == label] for label in labels], axis=1)  # drawer, character
        x = ((pictures - mean) @ scaled).astype(np.float32)
        y = np.broadcast_to(np.arange(WAYS, dtype=np.int32), x.shape[:2])
        order = rng.permutation(len(x))
        return [{"x": x[rows], "y": y[rows]} for rows in (order[:shots], order[10:])]

    loss = Episode(Classification(MLP((COMPONENTS, hidden or 5, WAYS), activation="tanh")))
    known = [task(data.train, 10) for _ in range(clients)]
    new = [task(data.test, 1) for _ in range(clients)]
    adapt = [AdaptHead(loss, adaptation or 10.0, fresh=step == 0) for step in range(steps)]
    return Setup(MetaLearning.of(loss, adapt), federated(known, new))


def federated(known: list[Any], new: list[Any]) -> "Federation":
    """Pairs of data to adapt on and queries, as splits; new tasks are numbered like the clients."""
    from fedstrata.data import Federation

    together = lambda parts: {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    owners = lambda parts: np.repeat(np.arange(len(parts)), [len(part["x"]) for part in parts])
    federation = Federation.from_clients([adapt for adapt, _ in known])
    rest = {"query": [q for _, q in known], "new": [a for a, _ in new], "new_query": [q for _, q in new]}
    for name, parts in rest.items():
        federation = federation.with_split(name, together(parts), owners(parts))
    return federation
