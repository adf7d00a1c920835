"""Groups of few rows: methods for fairness send means over a group, and the mean over one row is that row."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import jax
from attackers import RUN, VICTIM, Attacker, begin_call, log_of

import fedstrata as fs
from fedstrata.core.placement import part
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.messages import Message, Stage, pack
from fedstrata.deploy.policy import Policy, Refused

ROWS = np.random.default_rng(0).normal(size=(12, 3))
SQUARES = fs.Fair(lambda w, example: 0.5 * (w - example["x"]) @ (w - example["x"]), group="group", groups=2)
WHY = "site-1 has fewer than 5 rows of a group in split '{}', or of one label in it, and a mean over few rows reveals"


def federation(rows, **more):
    """One site's data, the last so many rows in group 1; and further splits."""
    split = lambda of_one, **columns: fs.Federation.from_clients(
        [{"x": ROWS, "group": (np.arange(12) >= 12 - of_one).astype(np.int32), **columns}]
    )["train"]
    columns = {"y": np.zeros(12, np.int32)} if more else {}
    return fs.Federation({"train": split(rows, **columns), **{name: split(n, **columns) for name, n in more.items()}})


def attacker(folder, problem, method, data, **policy):
    Policy(**policy).keep_in(folder)
    options = {} if "valid" in data.splits else {"batch_size": "all"}
    options |= {} if "y" in data["train"].examples else {"params": np.zeros(3)}
    return Attacker.alone(folder, Deployment(problem, method, lambda settings: data, 3, 3, options))


def weights_of_group_one(found):
    """A call with all weight on group 1, at zero."""
    context = found.victim()[0].sites[RUN][1].context
    zeros = {
        p: jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), part(context.template, p))
        for p in context.exchanges[0].receives
    }
    arrays = pack(zeros)[0]
    return Message(
        RUN,
        Stage(0, 0),
        VICTIM,
        {n: np.array([0.0, 1.0]) if a.shape == (2,) else a for n, a in arrays.items()},
        Stage(-1, 0),
    )


def test_a_group_of_one_row_would_be_revealed(tmp_path):
    """The attack itself, at a site whose owner allows it: the test below would notice it."""
    found = attacker(tmp_path, SQUARES, fs.FedMinMax(0.5), federation(1), rows_at_least=1)
    found.sends(begin_call())
    reply = found.sends(weights_of_group_one(found))
    np.testing.assert_allclose(reply.arrays["x.tree"] * 2 * len(ROWS), ROWS[-1], rtol=1e-12)
    found.victim()[0].close()


@pytest.mark.parametrize("method", [fs.FedMinMax(0.5), fs.FedAvg(0.5, 1)])
@pytest.mark.parametrize("rows", [1, 4, 11])
def test_a_site_refuses_a_run_with_a_group_of_few_of_its_rows(tmp_path, worked, rows, method):
    """Whatever the method: evaluations have a loss per group, too."""
    found = attacker(tmp_path, SQUARES, method, federation(rows))
    with pytest.raises(Refused, match=WHY.format("train")):
        found.sends(begin_call())
    assert worked == []
    assert [line["kind"] for line in log_of(tmp_path)][-1] == "refused"
    found.victim()[0].close()


@pytest.mark.filterwarnings("ignore::fedstrata.problems.groups.GroupWarning")
@pytest.mark.parametrize("rows", [0, 5, 12])
def test_a_site_takes_part_with_groups_of_enough_rows_or_none(tmp_path, rows):
    found = attacker(tmp_path, SQUARES, fs.FedMinMax(0.5), federation(rows))
    found.sends(begin_call())
    assert found.sends(weights_of_group_one(found)).arrays
    found.victim()[0].close()


CLASSIFY = fs.Fair(fs.losses.Classification(fs.models.Linear(3)), group="group", groups=2)
LEARNED = CLASSIFY.learn_weights(start={"weight": np.zeros((1, 3)), "bias": np.zeros(1)})
BIO = fs.FedBiOAcc(0.1, 0.15, 3, 0.1, 0.1, delta=1.0)


@pytest.mark.parametrize(("train", "valid", "split"), [(4, 5, "train"), (5, 4, "valid"), (5, 5, None)])
def test_so_does_learning_of_group_weights_with_groups_of_every_split(tmp_path, worked, train, valid, split):
    found = attacker(tmp_path, LEARNED, BIO, federation(train, valid=valid), fields=("*",))
    if split is None:
        found.sends(begin_call())
        assert len(worked) == 1
    else:
        with pytest.raises(Refused, match=WHY.format(split)):
            found.sends(begin_call())
        assert worked == []
    found.victim()[0].close()


def test_a_group_that_a_function_of_an_example_tells_counts_alike(tmp_path, worked):
    problem = fs.Fair(SQUARES.loss, group=lambda example: example["group"], groups=2)
    found = attacker(tmp_path, problem, fs.FedMinMax(0.5), federation(1))
    with pytest.raises(Refused, match=WHY.format("train")):
        found.sends(begin_call())
    found.victim()[0].close()


def two_positives():
    """Two groups of six rows with one positive row each."""
    labels = np.zeros(12, np.int32)
    labels[[2, 8]] = 1
    return fs.Federation.from_clients([{"x": ROWS, "group": (np.arange(12) >= 6).astype(np.int32), "y": labels}])


def test_single_positives_of_groups_would_be_revealed(tmp_path):
    """The attack itself: FCFL sends the gradient of a gap between the means over the positives of two groups."""
    found = attacker(tmp_path, CLASSIFY, fs.FCFL(step_size=0.1), two_positives(), fields=("*",), rows_at_least=1)
    found.sends(begin_call())
    context = found.victim()[0].sites[RUN][1].context
    near_zero = lambda path: jax.tree.map(lambda a: np.full(a.shape, 1e-7, a.dtype), part(context.template, path))
    arrays = pack({path: near_zero(path) for path in context.exchanges[0].receives})[0]
    reply = found.sends(Message(RUN, Stage(0, 0), VICTIM, arrays, Stage(-1, 0)))
    gap = next(a.ravel() for name, a in reply.arrays.items() if name.startswith("du") and a.size == 3)
    gap = gap / np.linalg.norm(gap) * np.sign(gap[0])
    wanted = ROWS[2] - ROWS[8]
    np.testing.assert_allclose(gap, wanted / np.linalg.norm(wanted) * np.sign(wanted[0]), rtol=1e-4)
    found.victim()[0].close()


@pytest.mark.parametrize("method", [fs.FCFL(step_size=0.1), fs.FedAvg(0.5, 1)])
def test_a_site_refuses_a_run_with_few_rows_of_a_label_in_a_group(tmp_path, worked, method):
    """Whatever the method: evaluations have measures over the positives of a group, too."""
    found = attacker(tmp_path, CLASSIFY, method, two_positives(), fields=("*",))
    with pytest.raises(Refused, match=WHY.format("train")):
        found.sends(begin_call())
    assert worked == []
    found.victim()[0].close()
