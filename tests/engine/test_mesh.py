"""Clients over a device mesh: the same numbers, with every client's data and state on its own device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, START, assert_same, task_of
from jax.sharding import Mesh
from layouts import prepare

import fedstrata as fs
from fedstrata.engine.mesh import mesh_of
from fedstrata.problems.rows import Rows
from fedstrata.problems.weighting import full_data
from fedstrata.simulate.autotune import choose

PLAIN = {"rounds": 4, "evaluate_every": 2, "batch_size": 3, "params": START}


def run(name, **options):
    task = task_of(CASES[name].algorithm)
    return fs.run(task.problem, CASES[name].algorithm, task.federation, **{**PLAIN, **options})


SLOW = pytest.mark.slow  # of several cases of one kind, `make test` runs the first


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"execution": 2}, id="chunks", marks=SLOW),
        pytest.param({"batch_size": "all", "weights": "size"}, id="sizes", marks=SLOW),
    ],
)
def test_everybody_on_two_and_on_three_devices(options):
    alone = run("SCAFFOLD", **options)
    for devices in (2, 3):
        assert_same(run("SCAFFOLD", mesh=devices, **options), alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SCAFFOLD", "FCFL"])  # seeds are a `vmap` around what every algorithm is checked for
def test_seeds_and_values_in_one_program(name):
    options = {
        "seeds": 2,
        "sweep": {"step_size": [0.1, 0.05]} if name == "SCAFFOLD" else None,
        "per_client": True,
        "stationarity": False,
    }
    assert_same(run(name, mesh="all", **options), run(name, **options))


@pytest.mark.parametrize("execution", ["vmap", pytest.param("map", marks=SLOW), pytest.param(2, marks=SLOW)])
def test_a_schedule_with_empty_slots(execution):
    schedule = fs.participation.Given([[3, 2, 1], [0, -1, 3], [1, 0, 2], [2]])
    assert_same(run("SCAFFOLD", cohort=schedule, mesh=2, execution=execution), run("SCAFFOLD", cohort=schedule))


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("SCAFFOLD", 4, None),
        pytest.param("SCAFFOLD", None, 4, marks=SLOW),
        pytest.param("FedX2", 4, 3, marks=SLOW),
    ],
)
def test_a_run_resumes_with_another_number_of_devices(name, before, after, tmp_path):
    def kill(round, row):
        if round == 4:
            raise Killed

    options = {"cohort": 3, "execution": "vmap", "stationarity": False}
    kept = {"checkpoint": tmp_path, "checkpoint_every": 0.0}
    with pytest.raises(Killed):
        run(
            name,
            mesh=before,
            **options,
            **kept,
            callbacks=[kill],
        )
    resumed = run(name, mesh=after, resume=True, **options, **kept)
    assert_same(resumed, run(name, **options))


def test_data_and_state_lie_with_their_clients():
    task = task_of(CASES["FedX2"].algorithm)
    job = prepare(task.problem, CASES["FedX2"].algorithm, task.federation, **PLAIN, mesh=2)
    local = job.begin()[0].local
    for split, flat in job.context.data.items():
        ends = np.asarray(task.federation[split].offsets)[[0, 2, 4]]
        for leaf in jax.tree.leaves(flat.examples):
            assert len({shard.device for shard in leaf.addressable_shards}) == 2
            assert leaf.addressable_shards[0].data.shape[0] == np.diff(ends).max()  # its own clients' rows, no more
    for leaf in jax.tree.leaves(local):
        assert leaf.addressable_shards[0].data.shape[1] * 2 == leaf.shape[1]  # after the axis of runs


def test_no_device_collects_the_data_of_others():
    """What devices exchange is as large as a model and never as large as the data."""
    x, y = np.ones((800, 7), np.float32), np.zeros(800, np.int32)
    federation = fs.Federation.from_offsets({"x": x, "y": y}, np.arange(9) * 100, classes=2)
    problem = fs.Average(fs.losses.Classification(fs.models.Linear(7)))
    job = prepare(problem, fs.SCAFFOLD(0.1, 2), federation, rounds=4, batch_size=5, mesh=4)
    (text,) = job.programs(job.begin()[0])
    found = re.findall(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)
    assert found  # they do exchange something
    size = lambda shape: np.prod([int(n) for n in shape.split(",") if n])
    largest = max(size(shape) for line in found for shape in re.findall(r"\[([\d,]*)\]", line))
    assert largest < 200 * 7  # the rows of one device


def test_nothing_is_tried_out_where_processes_could_disagree():
    task, algorithm = task_of(CASES["FedAvg"].algorithm), CASES["FedAvg"].algorithm
    job = prepare(task.problem, algorithm, task.federation, **{**PLAIN, "rounds": 10**8}, mesh=2)
    assert choose(job) == ("vmap", "clients are spread over devices, whose processes must all choose alike")


# Whole splits.


def spread_rows(blocks, order, count) -> tuple[Rows, Rows]:
    """The same rows in order, and lying in blocks with places between them."""
    rng = np.random.default_rng(0)
    x, weight, client = rng.normal(size=(count, 2)), rng.random(count), rng.integers(0, 3, count)
    plain = Rows({"x": jnp.asarray(x)}, jnp.asarray(weight), jnp.asarray(client, jnp.int32), 3, chunk=4)
    lying = np.full((blocks * -(-(max(order) + 1) // blocks), 2), 7.0)
    lying[order] = x
    stored = {"x": jnp.asarray(lying)}
    return plain, dataclasses.replace(plain, examples=stored, order=jnp.asarray(order, jnp.int32), blocks=blocks)


ORDERS = {
    "one chunk": (2, [0, 1, 2, 4, 5], 5),
    "several": (2, [*range(9), *range(11, 18)], 16),
    "three": (3, [8, 0, 4], 3),
}


@pytest.mark.parametrize("name", ORDERS)
def test_rows_in_blocks_give_the_same_values_as_rows_in_order(name):
    plain, lying = spread_rows(*ORDERS[name])
    square = lambda example: jnp.sum(example["x"] ** 2)
    values = jnp.asarray([0.5, 1.5, 2.5])
    for ask in (
        lambda rows: rows.mean(square),
        lambda rows: rows.map(square),
        lambda rows: rows.column("x"),
        lambda rows: rows.mean_by_client(square),
        lambda rows: rows.client_means(lambda v, e: v * square(e), values),
        lambda rows: rows.pick(np.array([2, 0])).examples["x"],
        lambda rows: jax.grad(lambda t: rows.mean(lambda e: jnp.sin(t * square(e))))(0.3),
    ):
        np.testing.assert_allclose(ask(lying), ask(plain), rtol=1e-13)


def test_evaluations_over_devices_equal_those_on_one():
    task = task_of(CASES["FedAvg"].algorithm)
    job = prepare(task.problem, CASES["FedAvg"].algorithm, task.federation, **PLAIN, mesh=3)
    x = fs.Vector(jnp.asarray(START))
    found = jax.jit(lambda x: task.problem.smooth(x, job.inputs.full))(x)
    wanted = task.problem.smooth(x, full_data(task.federation))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, wanted)


# What is refused.


def test_meshes_that_cannot_be():
    with pytest.raises(ValueError, match="there are 4 devices"):
        run("FedAvg", mesh=5)
    for bad in (0, True, "some", 2.0):
        with pytest.raises(ValueError, match="must be"):
            mesh_of(bad)
    with pytest.raises(ValueError, match="one axis"):
        mesh_of(Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b")))
    assert mesh_of(Mesh(np.array(jax.devices()[:2]), ("sites",))).shape == {"clients": 2}
