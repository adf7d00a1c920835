"""Federations that stay on the host: the same numbers, with one cohort on the device at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, START, TASK, assert_same, task_of
from layouts import prepare

import fedstrata as fs
from fedstrata.problems.rows import Rows
from fedstrata.problems.stored import Stored
from fedstrata.problems.weighting import full_data
from fedstrata.simulate import inputs as preparing
from fedstrata.simulate.out_of_core import executable as streaming
from fedstrata.simulate.out_of_core.executable import OutOfCoreExecutable
from fedstrata.simulate.out_of_core.host import HostLocal, HostSplit

PLAIN = {"rounds": 5, "evaluate_every": 2, "batch_size": 3, "params": START, "stationarity": False, "execution": "vmap"}
# Nothing by client; vectors and starts by client, levels in turn; pools and memory by example; starts that wait for a
# merge; gathered rows.
KINDS = [
    "FedAvg",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("TrackedSCGD", "FedX2", "TrackedMFCGD", "FCFL")),
]


def run(name, **options):
    task = task_of(CASES[name].algorithm)
    return fs.run(task.problem, CASES[name].algorithm, task.federation, **{**PLAIN, **options})


@pytest.mark.parametrize("name", KINDS)
def test_a_streamed_run_is_the_run(name):
    options = {"cohort": 3, "seeds": 2, "stationarity": name == "FedAvg"}
    assert_same(run(name, stream=True, **options), run(name, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "size", "batch_size": "all"},
        {"cohort": fs.participation.Given([[0, 2, -1], [2, 1, 0], [-1, -1, 3]]), "sampling": "epochs"},
        {"cohort": 1, "per_client": True, "sweep": {"step_size": [0.1, 0.05]}},
    ],
    ids=["everybody", "empty slots", "one at a time"],
)
def test_any_participation_rule(options):
    assert_same(run("SCAFFOLD", stream=True, **options), run("SCAFFOLD", **options))


def test_clients_begin_some_at_a_time(monkeypatch):
    """Three at a time of four clients with memory by example, the last of whom has most rows."""
    monkeypatch.setattr(streaming, "BEGIN", 3)
    task = task_of(CASES["FedX2"].algorithm)
    sizes = np.asarray(task.federation[task.problem.first].counts)
    order = [*np.argsort(sizes)]
    options = {**PLAIN, "rounds": 1}
    streamed, plain = (
        prepare(task.problem, CASES["FedX2"].algorithm, task.federation.select(order), stream=stream, **options)
        for stream in (True, False)
    )
    jax.tree.map(np.testing.assert_allclose, streamed.begin()[0].local, plain.begin()[0].local)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedX2", "AdaMFCGD", "FedMinMax"])
def test_the_starts_of_all_are_merged_some_at_a_time(name, monkeypatch):
    """With cohorts of two: means are summed in two parts, pools are laid side by side."""
    monkeypatch.setattr(streaming, "BEGIN", 3)
    for weights in ("uniform",) if name == "FedX2" else ("uniform", "size"):
        options = {"cohort": 2, "weights": weights, "rounds": 3}
        streamed, plain = run(name, stream=True, **options), run(name, **options)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), streamed.solutions.tree, plain.solutions.tree
        )


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_run_resumes_streamed_or_not(tmp_path):
    def kill(round, row):
        if round == 2:
            raise Killed

    options = {"cohort": 2, "seeds": 2, "checkpoint_every": 0.0}
    whole = run("LocalPair", stream=True, cohort=2, seeds=2)  # which remembers by example
    for first, then in ((True, True), (False, True)):
        folder = tmp_path / f"{first} {then}"
        with pytest.raises(Killed):
            run("LocalPair", stream=first, checkpoint=folder, callbacks=[kill], **options)
        again = run("LocalPair", stream=then, checkpoint=folder, resume=True, **options)
        assert_same(again, whole)
        if first and then:
            jax.tree.map(np.testing.assert_array_equal, (again.state, again.local), (whole.state, whole.local))


def test_an_explosion_goes_back_to_the_last_good_state():
    steps = {"sweep": {"step_size": [0.05, 40.0]}, "explosion": 10.0, "evaluate_every": 1, "cohort": 3}
    with pytest.warns(fs.DivergenceWarning):
        streamed = run("SCAFFOLD", stream=True, **steps)
    with pytest.warns(fs.DivergenceWarning):
        plain = run("SCAFFOLD", **steps)
    assert streamed.endings.tolist() == plain.endings.tolist()
    assert_same(streamed, plain)


@pytest.mark.slow
def test_files_are_mapped_and_only_a_cohort_is_on_the_device(tmp_path):
    clients, rows = 50, 20
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(clients * rows, 30)).astype(np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    y = np.asarray(x[:, 0] > 0, np.int32)
    federation = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(clients + 1) * rows)
    problem = fs.Average(fs.losses.Classification(fs.models.Linear(30, 2)))
    options = {"rounds": 4, "cohort": 2, "batch_size": 5, "evaluate_every": 2}
    job = prepare(problem, fs.SCAFFOLD(0.1, 3), federation, stream=True, **options)
    assert isinstance(job, OutOfCoreExecutable)
    arrays = [a for a in jax.tree.leaves((job.context.data, job.inputs.full)) if isinstance(a, jax.Array)]
    assert sum(a.nbytes for a in arrays) < x.nbytes / 8  # weights and owners of rows, not the rows
    carry = job.begin()[0]
    assert all(isinstance(a, np.ndarray) for a in jax.tree.leaves(carry.local))
    fetched = next(iter(job._feeds(HostLocal(carry.local, job.splits), 0, 1, [])))[2]
    assert fetched.data["train"].examples["x"].shape == (1, 2 * rows, 30)
    streamed = fs.run(problem, fs.SCAFFOLD(0.1, 3), federation, stream=True, **options)
    assert_same(streamed, fs.run(problem, fs.SCAFFOLD(0.1, 3), federation, stream=False, **options), rtol=1e-5)


def test_a_federation_that_would_fill_the_device_is_streamed(monkeypatch):
    job = lambda algorithm, **more: prepare(TASK.problem, algorithm, TASK.federation, **{**PLAIN, **more})
    algorithm = CASES["FedAvg"].algorithm
    assert not isinstance(job(algorithm), OutOfCoreExecutable)
    monkeypatch.setattr(preparing, "device_memory", lambda: 100.0)
    assert isinstance(job(algorithm), OutOfCoreExecutable)
    assert not isinstance(job(algorithm, stream=False), OutOfCoreExecutable)
    assert not isinstance(job(fs.CentralSGD(0.1)), OutOfCoreExecutable)


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match="CentralSGD is centralised"):
        prepare(TASK.problem, fs.CentralSGD(0.1), TASK.federation, stream=True, **PLAIN)
    with pytest.raises(ValueError, match="a mesh spreads data"):
        run("FedAvg", stream=True, mesh=2)
    with pytest.raises(ValueError, match="stream='yes' must be True, False"):
        run("FedAvg", stream="yes")


def test_rows_on_the_host_give_what_rows_on_the_device_give():
    """Sums, gradients, means by client, columns and choices, in chunks that do not come out even."""
    rows = full_data(TASK.federation)["train"]
    fields = {"start": rows.start, "capacity": rows.capacity}
    for chunk in (7, 1000):
        device, host = (
            Rows(examples, rows.weight, rows.client, rows.clients, chunk, **fields)
            for examples in (rows.examples, Stored(TASK.federation["train"].examples))
        )
        w = jnp.asarray(START)
        loss = lambda w, e: (w @ e["x"] - e["y"]) ** 2
        values = jnp.stack([w * (i + 1) for i in range(rows.clients)])

        @jax.jit
        def found(rows, w, values, loss=loss):
            one = jax.value_and_grad(lambda w: rows.mean(lambda e: loss(w, e)))(w)
            some = rows.pick(np.array([3, 1])).examples["x"]
            scores = jax.grad(lambda w: jnp.sum(rows.map(lambda e: w @ e["x"]) ** 2))(w)
            return one, rows.client_means(loss, values), rows.mean_by_client(lambda e: loss(w, e)), some, scores

        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
            jax.jit(lambda w, v, rows=device: found.__wrapped__(rows, w, v))(w, values),
            jax.jit(lambda w, v, rows=host: found.__wrapped__(rows, w, v))(w, values),
        )
        np.testing.assert_array_equal(jax.jit(lambda rows=host: rows.column("y"))(), device.column("y"))


def test_a_cohort_of_small_clients_needs_no_more_room_than_the_largest_would():
    federation = fs.Federation.from_clients([{"x": np.full(n, i, float)} for i, n in enumerate((5, 1, 2, 3))])
    split = HostSplit(federation["train"], slots=2)
    assert split.rows == 8
    flat = split.of(np.array([2, -1]))
    assert flat.examples["x"].tolist() == [2, 2, 0, 0, 0, 0, 0, 0]
    assert flat.count.tolist() == [2, 1]  # an empty slot has some row, which does not count
