"""The checks that every algorithm passes. Algorithms are found by subclass; their cases are in `cases.py`."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, START, TASK, task_of
from layouts import prepare

import fedstrata as fs
from fedstrata.algorithms import known
from fedstrata.base.directions import column
from fedstrata.core.hyperparameters import reals
from fedstrata.core.placement import field_of, part, placements
from fedstrata.deploy.in_process import advance, in_process_run
from fedstrata.engine.codec import message, payload_bytes
from fedstrata.engine.exchange import exchanges
from fedstrata.simulate.evaluate import modes_of
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.records import OWN
from fedstrata.simulate.run import recorded

ROUNDS = 6
BIB = Path(__file__).parents[1] / "docs" / "papers.bib"


# A module's parameter, so that all checks of an algorithm follow each other and share its compiled programs.
@pytest.fixture(params=sorted(known()), scope="module")
def case(request, forget):
    if request.param not in CASES:
        pytest.fail(
            f"{request.param} has no entry in tests/support/cases.py: give it hyper-parameters and what theory says"
        )
    yield CASES[request.param]
    forget()


# Without the exact gradient, which is half of the compilation; tests that need it switch it on.
PLAIN = {
    "rounds": ROUNDS,
    "evaluate_every": 1,
    "batch_size": 3,
    "params": START,
    "stationarity": False,
    "execution": "vmap",
}


def job(algorithm, **options) -> Executable:
    task = task_of(algorithm)
    return prepare(task.problem, algorithm, task.federation, **{**PLAIN, **options})


def run(algorithm, clients=None, **options):
    task = task_of(algorithm)
    federation = task.federation if clients is None else task.federation.select(clients)
    return fs.run(task.problem, algorithm, federation, **{**PLAIN, **options})


def assert_equal(a, b):
    """Every leaf the same to the bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, rtol=1e-11):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-13), a, b)


def of_clients(value, ids):
    """What these clients (None: all) have in a Local field, stacked over runs; of per-example memory, their rows."""
    offsets = TASK.federation["train"].offsets
    rows = None if ids is None else [row for i in ids for row in range(offsets[i], offsets[i + 1])]
    pick = lambda a, which: np.asarray(a) if which is None else np.asarray(a)[:, which]
    is_memory = lambda node: isinstance(node, fs.PerExample)
    of = lambda node: jax.tree.map(lambda a: pick(a, rows), node.rows) if is_memory(node) else pick(node, ids)
    return jax.tree.map(of, value, is_leaf=is_memory)


def one_local_step(algorithm):
    fields = {f.name for f in dataclasses.fields(algorithm)}
    return dataclasses.replace(algorithm, local_steps=1) if "local_steps" in fields else algorithm


@pytest.fixture(scope="module")
def swept(case):
    """Two seeds and two values of a hyper-parameter as one program, with clients in chunks: options and result.

    Chunks of one client, because a last chunk of another size would be compiled as a second copy of the work.
    """
    name = next(iter(reals(case.algorithm)))
    sweep = {name: [getattr(case.algorithm, name), 0.05]}
    options = {"cohort": 3, "seeds": [3, 5], "sweep": sweep, "execution": 1}
    return options, run(case.algorithm, **options)


def test_one_client_and_one_step_is_the_centralised_method(case):
    result = run(one_local_step(case.algorithm), [1], rounds=1, batch_size="all")
    gradient = partial(task_of(case.algorithm).gradient, 1)
    np.testing.assert_allclose(result.solution(), case.one_step(START, gradient), rtol=1e-12)


@pytest.mark.slow
def test_the_order_of_clients_changes_nothing(case):
    order = [2, 0, 3, 1]
    plain = run(case.algorithm, batch_size="all", stationarity=True)
    mixed = run(case.algorithm, order, batch_size="all", stationarity=True)
    assert_close(plain.solution(), mixed.solution())
    for field, value in plain.local.items():
        assert_close(of_clients(value, order), of_clients(mixed.local[field], None))


def test_every_recorded_column_declares_its_direction(case):
    laid_out = job(case.algorithm, stationarity=True, per_client=True)
    modes = modes_of(task_of(case.algorithm).problem, case.algorithm)
    assert [name for name in (*OWN, *recorded(laid_out)) if column(name, modes) is None] == []


def pool_rounds(algorithm):
    """How many rounds the pool of all clients lasts."""
    return getattr(algorithm, "history", 0)


@pytest.mark.slow
def test_the_ledger_counts_the_encoded_messages(case, swept):
    (options, result), algorithm = swept, case.algorithm
    cohort = options["cohort"]
    if algorithm.centralised:
        assert result.ledger.up == result.ledger.down == 0
        return
    problem = task_of(algorithm).problem
    state = algorithm.init_server(problem, fs.Vector(jnp.asarray(START)))
    up = down = 0
    for exchange in exchanges(algorithm, problem):
        up += exchange.repeat * payload_bytes(message({f: part(state, f) for f in exchange.sends}))
        union = {f: [part(state, f)] * (cohort if place == "Pooled" else 1) for f, place in _placed(state, exchange)}
        down += exchange.repeat * sum(payload_bytes(message({f: v})) for f, vs in union.items() for v in vs)
    assert (result.ledger.up, result.ledger.down) == (up, down)
    assert np.all(result.history.last("bytes_up") == up * cohort * ROUNDS)
    each, more = result.ledger.total("down", rejoining=True), result.ledger.more_at_first * pool_rounds(algorithm)
    assert np.all(result.history.last("bytes_down") == (each * ROUNDS + more) * cohort)


def _placed(state, exchange):
    places = placements(type(state))
    return [(f, places[field_of(f)].name) for f in exchange.receives]


@pytest.mark.slow
def test_later_rounds_and_other_values_do_not_recompile(case, swept):
    options, events = swept[0], []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        compiled = lambda: sum("backend_compile" in name for name in events)
        first = job(case.algorithm, **options)
        carry = first.advance(first.begin()[0], 0, 1)[0]
        ((name, values),) = options["sweep"].items()
        other = job(case.algorithm, **{**options, "sweep": {name: values[::-1]}})
        before = compiled()
        carry = first.advance(carry, 1, 2)[0]
        carry = first.advance(carry, 2, 5)[0]
        other.advance(carry, 0, 1)
        assert compiled() == before
        jax.jit(lambda x: x + 1)(jnp.zeros(()))  # the count does see a program that is new
        assert compiled() > before
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.slow
def test_how_a_run_is_cut_into_segments_changes_no_bit(case, swept):
    whole, parts = job(case.algorithm, **swept[0]), job(case.algorithm, **swept[0])
    carry = whole.begin()[0]
    once = whole.advance(carry, 0, ROUNDS)[0]
    for first, last in [(0, 1), (1, 2), (2, 5), (5, ROUNDS)]:
        carry = parts.advance(carry, first, last)[0]
    assert_equal(once, carry)


@pytest.mark.slow
def test_absent_clients_are_untouched(case, swept):
    this = job(case.algorithm, **swept[0])
    start = this.begin()[0]
    here = this.runs.first_context().cohort(this.runs.keys[0], jnp.array(0)).ids
    gone = [i for i in range(TASK.federation.clients) if i not in np.asarray(here)]
    if this.context.clients == 1:
        return  # everything is in one place
    assert len(gone) == 1
    absent = lambda local: {
        field: of_clients(jax.tree.map(lambda a: a[:1], value), gone) for field, value in local.items()
    }
    assert_equal(absent(this.advance(start, 0, 1)[0].local), absent(start.local))


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_to_the_bit(case, swept, tmp_path):
    def kill(round, row):
        if round == 3:
            raise Killed

    runs, whole = swept
    options = {**runs, "checkpoint": tmp_path, "checkpoint_every": 0.0}
    with pytest.raises(Killed):
        run(case.algorithm, callbacks=[kill], **options)
    resumed = run(case.algorithm, resume=True, **options)
    assert_equal((whole.solutions, whole.state, whole.local), (resumed.solutions, resumed.state, resumed.local))
    assert whole.history == resumed.history


@pytest.mark.slow
def test_seeds_values_and_chunks_in_one_program_equal_single_runs_over_devices(case, swept):
    # Four clients on three devices: one place stays empty, and a cohort is never shared out evenly.
    options, together = swept
    ((name, values),) = options["sweep"].items()
    for number, value in enumerate(values):
        alone = run(dataclasses.replace(case.algorithm, **{name: value}), seeds=[5], cohort=3, mesh=3)
        assert_close(together.solution(**{name: value}, seed=5), alone.solution(seed=5))
        found = together.history.select(**{name: value}, seed=5)["objective"]
        np.testing.assert_allclose(found, alone.history["objective"], rtol=1e-11)
        ends = jax.tree.map(lambda a, at=number: a[at, 1], (together.local, together.state))
        assert_close(ends, jax.tree.map(lambda a: a[0], (alone.local, alone.state)))


@pytest.mark.slow
def test_sites_that_only_exchange_messages_follow_the_simulation(case, swept):
    if case.algorithm.centralised:
        return
    task, rounds, (options, _) = task_of(case.algorithm), 3, swept
    simulated = run(case.algorithm, **{**options, "rounds": rounds})
    given = {"params": START, "batch_size": 3, "cohort": 3}
    server, sites, traffic = in_process_run(task.problem, case.algorithm, task.federation, seed=5, **given)
    now = advance(server, rounds)
    ((name, values),) = options["sweep"].items()
    assert_close(server.solution(now).tree, simulated.solution(**{name: values[0]}, seed=5), rtol=1e-12)
    for site in sites:
        held = site.fields(now.after[site.number])
        for field, value in simulated.local.items():
            theirs = of_clients(jax.tree.map(lambda a: a[0, 1:], value), [site.number])
            rows = isinstance(value, fs.PerExample)
            # A site's window of per-example memory may be wider than its data.
            mine = jax.tree.map(lambda a, b: a[: b.shape[1]], held[field].rows, theirs) if rows else held[field]
            assert_close(mine, jax.tree.map(lambda a, row=rows: a[0] if row else a[0, 0], theirs), rtol=1e-12)
    assert traffic.up == simulated.ledger.up * 3 * rounds
    each, first = (
        simulated.ledger.total("down", rejoining=True),
        simulated.ledger.more_at_first * pool_rounds(case.algorithm),
    )
    assert traffic.down == each * 3 * rounds + first * 3
    assert (simulated.history.last("bytes_down") == traffic.down).all()


# One of each kind of state: chunks are cut below what an algorithm can see.
@pytest.mark.slow
@pytest.mark.parametrize("case", ["SCAFFOLD", "TrackedX"], indirect=True)
def test_chunks_that_do_not_come_out_even_equal_clients_at_once(case):
    chunks, at_once = (run(case.algorithm, cohort=3, execution=execution) for execution in (2, "vmap"))
    assert_close((chunks.solution(), chunks.local), (at_once.solution(), at_once.local))


@pytest.mark.slow
def test_it_reaches_the_optimum_where_theory_states_so(case):
    result = run(case.algorithm, rounds=600, batch_size="all", evaluate_every=600, stationarity=True)
    distance = np.linalg.norm(result.solution() - task_of(case.algorithm).optimum())
    if case.exact:
        assert distance < 1e-10
        assert result.history.last("stationarity") < 1e-10
    else:
        assert 1e-4 < distance < 0.5  # near, but off by the drift that its docstring admits


def test_the_docstring_teaches(case):
    kind = type(case.algorithm)
    text = kind.__doc__ or ""
    assert kind.__doc__ is not kind.__mro__[1].__doc__
    assert re.search(r"\$\$.+\$\$", text, re.S), "the update in LaTeX"
    assert "Converges" in text, "what it converges to, and what not"
    assert ">>>" in text, "an example"
    key = re.search(r"Reference: (\w+)", text)
    assert key, "a reference"
    assert f"{{{key[1]}," in BIB.read_text(), f"{key[1]} is not in docs/papers.bib"
    for field in dataclasses.fields(case.algorithm):
        inherited = any(
            field.name in (base.__annotations__ if hasattr(base, "__annotations__") else {})
            for base in kind.__mro__[1:]
        )
        assert field.name in text or inherited, f"hyper-parameter {field.name} is not explained"
