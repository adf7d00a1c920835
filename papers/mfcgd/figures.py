"""The comparisons that MFCGD's paper announces and does not contain, and one that it does not cover."""

from fedstrata.data.sources import missing
from fedstrata.experiments.reproduction import Claim, Desk, Outcome
from fedstrata.experiments.reproduction.drawing import draw
from fedstrata.experiments.reproduction.statistics import interval

from .comparison import (
    Task,
    cheaper,
    compared,
    efficient,
    judged,
    methods,
    panels,
    ratios,
    table,
    tracked,
    words,
)
from .maml_tasks import build as maml
from .robust import build as robust

ROUNDS = {"small": 0.2, "full": 1.0}  # of the length; figure 1 is cheap at its small scale and has a separate length
ROBUST = "experiments demonstrate the efficiency of the algorithms on robust federated learning"
META = "experiments demonstrate the efficiency of the algorithms on task-distributed meta-learning (here: {})"


def figure_1(desk: Desk) -> Outcome:
    """Robust federated learning: objective, and accuracy of the worst client and of the mean."""
    shown = {"test/worst_accuracy": "test accuracy, worst client", "test/accuracy": "test accuracy, mean of clients"}
    source = "digits" if desk.scale == "small" else "mnist"
    # At the start a client's gradient is 15 times that of its loss, so FedAvg's steps are larger.
    task = Task(f"robust_{source}", robust, {"source": source}, 100, 20, shown, 2e-3, 3, plain=10.0)
    found = compared(desk, task, methods())
    path = draw(panels(task, found), f"Robust learning, {source}, 10 clients", desk.folder / "figure_1.png")
    worst = {name: f.history.last("test/worst_accuracy") for name, f in found.items()}
    gains = {name: interval(values - worst["FedAvg"]) for name, values in worst.items() if name != "FedAvg"}
    fair = Claim(
        1,
        "robust federated learning tackles the heterogeneity of the data (Section 1)",
        f"worst client's test accuracy less FedAvg's (95 %): {words(gains)}",
        judged([low > 0 for _, low, _ in gains.values()]),
    )
    claims = [efficient(1, ROBUST, found), cheaper(1, found), fair, tracked(1, found)]
    return Outcome(claims, [path, table(task, found, desk)])


def figure_2(desk: Desk) -> Outcome:
    """Sinusoids: the loss after one step of adaptation, on the clients' tasks and on new ones."""
    shown = {"new/loss": "loss on new tasks, adapted on ten points"}
    task = Task("sinusoids", maml, {"task": "sinusoids"}, _rounds(desk, 150), 10, shown, 0.02, 3)
    return _meta(desk, 2, task, "Meta-learning, sinusoids, one task at each of 10 clients")


def figure_3(desk: Desk) -> Outcome:
    """Omniglot, 5-way 1-shot: the loss after adaptation of the last layer, and the accuracy on new characters."""
    if missing("omniglot"):
        return Outcome([Claim(3, META.format("omniglot"), "the files of omniglot are not here", "not tested")], [])
    shown = {"accuracy": "accuracy on the clients' tasks", "new/accuracy": "accuracy on new tasks, one shot"}
    task = Task("omniglot", maml, {"task": "omniglot"}, _rounds(desk, 60), 2, shown, 0.02, 3)
    return _meta(desk, 3, task, "Meta-learning, Omniglot, five characters at each of 10 clients")


def figure_4(desk: Desk) -> Outcome:
    """Sinusoids with two steps of adaptation, three levels: only ComFedL and FedAvg can be run."""
    shown = {"new/loss": "loss on new tasks, adapted on ten points"}
    task = Task("sinusoids_two_steps", maml, {"task": "sinusoids", "steps": 2}, _rounds(desk, 150), 10, shown, 0.02, 3)
    able = {name: method for name, method in methods().items() if name in ("FedAvg", "ComFedL")}
    found = compared(desk, task, able)
    title = "Two steps of adaptation (K = 3), sinusoids"
    path = draw(panels(task, found), title, desk.folder / "figure_4.png", columns=2)
    text = words(ratios(found, "ComFedL", ["FedAvg"]))
    claims = [
        Claim(
            4,
            "after taking several gradient descent steps (MAML, Section 1)",
            "MFCGD, AdaMFCGD, LocalMOML and LocalSCGDM are for two levels, which is one step of adaptation; of all "
            f"methods here only ComFedL takes more. Final objective over ComFedL's (95 %): {text}",
            "not tested",
        )
    ]
    return Outcome(claims, [path, table(task, found, desk)])


def _meta(desk: Desk, number: int, task: Task, title: str) -> Outcome:
    found = compared(desk, task, methods())
    path = draw(panels(task, found), title, desk.folder / f"figure_{number}.png")
    claims = [efficient(number, META.format(task.name), found), cheaper(number, found), tracked(number, found)]
    return Outcome(claims, [path, table(task, found, desk)])


def _rounds(desk: Desk, full: int) -> int:
    return round(ROUNDS[desk.scale] * full)
