"""`fs.run`: what it records, how runs end, and what it refuses before anything runs."""

import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import prepare
from references import least_squares, squared_error
from toys import Growing, OwnStarts, Scores

import fedstrata as fs
from fedstrata.data.sampling import Epochs
from fedstrata.engine.server import weighted_mean
from fedstrata.engine.slots import slots_of
from fedstrata.simulate.driver import Driver
from fedstrata.simulate.evaluate import measure

TASK = least_squares(seed=5)
N = TASK.federation.clients
X = np.zeros(3)
ABOUT_X = fs.Average(lambda w, e: 0.5 * jnp.sum(w**2))


def run(algorithm=None, federation=TASK.federation, problem=TASK.problem, **options):
    settings = {"rounds": 8, "batch_size": "all", "params": X, **options}
    return fs.run(problem, algorithm or fs.FedAvg(0.05, 3), federation, **settings)


def test_the_history_is_exact():
    result = run(evaluate_every=3, rounds=8, batch_size=2, cohort=2)
    np.testing.assert_array_equal(result.history["round"][0], [0, 3, 6, 8])
    full = fs.full_data(TASK.federation)
    w = fs.Vector(jnp.asarray(result.solution()))
    shards = [TASK.federation["train"].shard(i) for i in range(N)]
    by_hand = np.mean([0.5 * np.mean((s["x"] @ w.tree - s["y"]) ** 2) for s in shards])
    gradient = np.mean([TASK.gradient(i, w.tree) for i in range(N)], axis=0)
    np.testing.assert_allclose(result.history.last("objective"), by_hand, rtol=1e-12)
    np.testing.assert_allclose(TASK.problem.gradient(w, full).tree, gradient, rtol=1e-10)
    np.testing.assert_allclose(result.history.last("stationarity"), np.linalg.norm(gradient), rtol=1e-12)
    np.testing.assert_array_equal(result.history["samples"][0], np.array([0, 3, 6, 8]) * 2 * 3 * 2)  # cohort, Q, B
    np.testing.assert_array_equal(result.history["bytes_up"][0], np.array([0, 3, 6, 8]) * 2 * 3 * 8)
    assert np.all(np.diff(result.history["seconds"][0]) > 0)


def test_weights_by_size_change_objective_and_mean():
    counts = TASK.federation["train"].counts
    result = run(fs.FedSGD(0.1), rounds=900, weights="size")
    np.testing.assert_allclose(result.solution(), TASK.optimum(counts / counts.sum()), rtol=1e-8)
    assert result.history.last("stationarity") < 1e-8


def test_large_splits_are_evaluated_in_chunks():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10_000, 3)), rng.normal(size=10_000)
    federation = fs.Federation.from_arrays({"x": x, "y": y}, clients=rng.integers(0, 3, 10_000))
    result = run(federation=federation, rounds=1, batch_size=1)
    counts = federation["train"].counts
    w, data = result.solution(), federation["train"].examples
    weight = np.repeat(1 / (3 * counts), counts)
    residual = data["x"] @ w - data["y"]
    np.testing.assert_allclose(result.history.last("objective"), 0.5 * weight @ residual**2, rtol=1e-12)
    gradient = (weight * residual) @ data["x"]
    np.testing.assert_allclose(result.history.last("stationarity"), np.linalg.norm(gradient), rtol=1e-11)


def test_extra_splits_monitor_and_per_client_metrics():
    federation = TASK.federation.hold_out("test", 0.3, seed=1)
    absolute = fs.Average(lambda w, e: jnp.abs(jnp.dot(w, e["x"]) - e["y"]))
    metric = {"error": lambda w, e: jnp.abs(jnp.dot(w, e["x"]) - e["y"])}
    result = run(federation=federation, problem=fs.Average(squared_error, metric), monitor=absolute, per_client=True)
    history, w = result.history, result.solution()
    np.testing.assert_allclose(history["monitor/objective"], history["error"], rtol=1e-12)
    shards = lambda split: [s for s in map(federation[split].shard, range(N)) if len(s["y"])]
    means = lambda split: [np.abs(s["x"] @ w - s["y"]).mean() for s in shards(split)]
    np.testing.assert_allclose(history.last("test/error")[0], np.mean(means("test")), rtol=1e-12)
    np.testing.assert_allclose(history["client/error"][0, -1], means("train"), rtol=1e-12)


def test_the_best_solution_on_validation_is_kept_and_training_stops_early():
    """On two points of validation data that FedAvg first approaches and then leaves."""
    path = [{"x": np.eye(1), "y": np.array([4.0])}]
    federation = fs.Federation.from_clients(path).with_split("valid", {"x": np.eye(1), "y": np.array([2.0])})
    problem = fs.Average(squared_error)
    options = {"problem": problem, "federation": federation, "params": np.zeros(1), "evaluate_every": 1, "rounds": 100}
    result = run(fs.FedAvg(0.1), select="valid/loss", patience=3, **options)
    iterates = 4 * (1 - 0.9 ** np.arange(101))
    best = int(np.argmin(np.abs(iterates - 2)))
    np.testing.assert_allclose(result.solution(), iterates[best], rtol=1e-12)
    assert result.endings.item() == "stopped early"
    np.testing.assert_array_equal(result.history["round"][0], np.arange(best + 3 + 1))
    np.testing.assert_allclose(run(fs.FedAvg(0.1), **options).solution(), iterates[100], rtol=1e-12)


def test_local_epochs_on_clients_of_different_sizes():
    """E epochs a round: every client takes ⌈E n_i / B⌉ steps; here all at B = 1, so the order is all that is random."""
    rule = Epochs(1, per_round=2)
    counts = TASK.federation["train"].counts
    result = run(fs.FedAvg(0.01, rule.steps(counts)), batch_size=rule, rounds=3)
    assert result.history.last("samples") == 3 * 2 * counts.sum()
    with pytest.raises(ValueError, match="without replacement is larger than the shard of client"):
        run(batch_size=int(counts.max()) + 1, sampling="epochs")


def test_idle_steps_change_nothing_even_with_a_pull():
    """A FedProx step without data would still move: clients that are done must stand still."""
    small = fs.Federation.from_clients([{"x": np.eye(1), "y": np.ones(1)}, {"x": np.ones((6, 1)), "y": np.zeros(6)}])
    prox = fs.FedProx(0.1, 6, mu=1.0)
    result = fs.run(TASK.problem, prox, small, rounds=1, params=np.zeros(1), batch_size=Epochs(1, per_round=1))
    # Client 0 takes one step to 0.1 and stops; client 1 has target 0 and stays at 0.
    np.testing.assert_allclose(result.solution(), 0.05, rtol=1e-12)


def test_divergence_stops_names_round_and_field_and_keeps_the_last_good_state():
    poisoned = fs.Average(lambda w, e: 0 * jnp.sqrt(2.5 - jnp.sum(w)) - jnp.sum(w))  # gradient −1, then NaN
    words = "diverged in round 4: not finite: 'x'; the state of round 3 was kept"
    with pytest.warns(fs.DivergenceWarning, match=words):
        result = run(fs.FedAvg(1.0), problem=poisoned, params=np.zeros(1), evaluate_every=2)
    np.testing.assert_array_equal(result.solution(), [3.0])
    assert result.endings.item() == "diverged"
    assert result.diverged
    np.testing.assert_array_equal(result.history["round"][0], [0, 2, 4])
    np.testing.assert_array_equal(np.isnan(result.history["objective"][0]), [False, False, True])


def test_an_exploding_objective_goes_back_to_the_last_good_evaluation():
    bowl = fs.Average(lambda w, e: 0.5 * jnp.sum(w**2))
    with pytest.warns(fs.DivergenceWarning, match="exploded or was not finite at round 12"):
        result = run(fs.FedAvg(3.0), problem=bowl, params=np.ones(1), rounds=40, evaluate_every=4, explosion=2.0**20)
    # x_r = (−2)^r, f = 4^r / 2: over 2^20 first at round 12 (of the evaluated ones), so round 8 is the last good one.
    np.testing.assert_allclose(result.solution(), [2.0**8], rtol=1e-12)
    assert result.endings.item() == "exploded"


def test_going_back_to_the_beginning_includes_per_client_starts(monkeypatch):
    """A state too big to be kept is found again by running from round 0, whose clients start from their own values."""
    options = {"rounds": 30, "evaluate_every": 2, "params": np.ones(3), "explosion": 1e9}
    with pytest.warns(fs.DivergenceWarning):
        kept = run(Growing(), **options)
    monkeypatch.setattr("fedstrata.simulate.driver.SNAPSHOT_BYTES", 0)
    with pytest.warns(fs.DivergenceWarning):
        again = run(Growing(), **options)
    np.testing.assert_array_equal(kept.solution(), again.solution())
    np.testing.assert_array_equal(kept.local["first"], again.local["first"])
    good = int(kept.history.last("round")[0]) - 2
    with pytest.warns(fs.DivergenceWarning, match="got worse"):
        alone = run(Growing(), **{**options, "rounds": good})
    np.testing.assert_allclose(again.solution(), alone.solution(), rtol=1e-12)


def test_what_an_empty_slot_computes_does_not_count():
    """Client 0 overflows within four steps, but is never in a cohort: an empty slot must not bring it in."""
    shards = [{"x": np.full((1, 1), 1e100), "y": np.ones(1)}, {"x": np.eye(1), "y": np.ones(1)}]
    wild, options = fs.Federation.from_clients(shards), {"rounds": 4, "params": np.zeros(1), "explosion": 1e300}
    once = lambda ids: fs.run(TASK.problem, fs.SCAFFOLD(0.5, 4), wild, batch_size="all", cohort=ids, **options)
    with pytest.warns(fs.DivergenceWarning):
        once(fs.participation.Given([[0]]))
    with pytest.warns(fs.DivergenceWarning, match="got worse"):  # at client 0, which counts in the objective
        result, alone = once(fs.participation.Given([[1, -1]])), once(fs.participation.Given([[1]]))
    assert not result.diverged
    np.testing.assert_allclose(result.solution(), alone.solution(), rtol=1e-12)


def test_one_diverging_run_does_not_disturb_the_others():
    values = [0.05, 1e200]
    with pytest.warns(fs.DivergenceWarning, match=r"step_size=1e\+200, seed=0"):
        result = run(sweep={"step_size": values}, seeds=2)
    assert result.endings.tolist() == [["finished"] * 2, ["diverged"] * 2]
    np.testing.assert_allclose(result.solution(step_size=0.05, seed=1), run().solution(), rtol=1e-12)


def test_start_values_may_depend_on_the_seed():
    import jax

    result = run(params=lambda key: jax.random.normal(key, (3,)), seeds=3, rounds=1)
    assert len(np.unique(result.history["objective"][:, 0])) == 3


def test_narrow_parameters_are_averaged_and_judged_in_float32():
    """300 equal clients: a sum in bfloat16 would stop growing at 256, and weights of 1/300 would be off by 0.3 %."""
    one = {"x": np.eye(1, dtype=np.float32), "y": np.ones(1, np.float32)}
    crowd = fs.Federation.from_clients([one] * 300)
    loss = fs.Average(lambda w, e: 0.5 * jnp.sum((w - e["y"].astype(w.dtype)) ** 2))
    result = fs.run(loss, fs.FedAvg(0.5), crowd, rounds=1, params=jnp.zeros(1, jnp.bfloat16), batch_size="all")
    assert result.solution().dtype == jnp.bfloat16
    assert float(result.solution()[0]) == 0.5
    np.testing.assert_allclose(result.history["objective"][0], [0.5, 0.125], rtol=1e-6)


def test_callbacks_see_every_recorded_round():
    seen = []
    result = run(callbacks=[lambda round, row: seen.append((round, float(row["objective"][0])))], evaluate_every=3)
    rounds, values = result.history["round"][0, 1:], result.history["objective"][0, 1:]
    assert seen == [(int(r), float(v)) for r, v in zip(rounds, values, strict=True)]


def test_the_simulator_refuses_before_anything_runs():
    two = fs.Average(lambda w, e: e["x"] * w)
    for words, make in {
        r"must return one real number for one example, not shape \(3,\)": lambda: run(problem=two),
        "cohort of 0 clients": lambda: run(cohort=0),
        "cohort of 9 clients cannot be drawn from 4": lambda: run(cohort=9),
        "rounds=0 must be a whole number >= 1": lambda: run(rounds=0),
        "batch_size=0 must be": lambda: run(batch_size=0),
        "unknown sampling 'epoch'; did you mean epochs": lambda: run(batch_size=2, sampling="epoch"),
        "unknown weights 'sizes'": lambda: run(weights="sizes"),
        "unknown column to select by 'valid/los'": lambda: run(select="valid/los"),
        "unknown option of fs.run 'bath_size'; did you mean batch_size": lambda: run(bath_size=3),
        "patience needs select": lambda: run(patience=3),
        "unknown hyper-parameter of FedAvg 'stepsize'; did you mean step_size": lambda: run(sweep={"stepsize": [1.0]}),
        "'local_steps' cannot be swept in one program": lambda: run(sweep={"local_steps": [1, 2]}),
        "step_size = .* is out of range": lambda: run(sweep={"step_size": [0.1, -0.1]}),
        "seeds=0 must be": lambda: run(seeds=0),
        r"seeds=\[-1\] must be a number >= 1, or different whole numbers from 0": lambda: run(seeds=[-1]),
        r"seeds=\[18446744073709551616\] must be": lambda: run(seeds=[2**64]),
        r"seeds=\[0.5\] must be": lambda: run(seeds=[0.5]),
        "params is not finite": lambda: run(params=np.array([0, 0, np.nan])),
        "has no model to start from; give params=": lambda: run(params=None),
        'execution=.threads. must be "vmap"': lambda: run(execution="threads"),
        "rounds=None must be": lambda: run(rounds=None),
        "seeds='3' must be": lambda: run(seeds="3"),
        "seeds=2.5 must be": lambda: run(seeds=2.5),
        r"seeds=\[0.5, 1\] must be": lambda: run(seeds=[0.5, 1]),
        "explosion=-1 must be": lambda: run(explosion=-1),
        "checkpoint_every='x' must be": lambda: run(checkpoint="nowhere", checkpoint_every="x"),
        "sweep: 'step_size' has the value 0.1 twice": lambda: run(sweep={"step_size": [0.1, 0.1]}),
        "sweep: 'step_size' has no values": lambda: run(sweep={"step_size": []}),
        "sweep: 'step_size' must have numbers only": lambda: run(sweep={"step_size": ["0.1"]}),
        r"loss\(params, example\) fails: TypeError.*params: float64\[4\], one example": lambda: run(params=np.zeros(4)),
        "a list is a tree of its entries: numpy.array": lambda: run(params=[0.0, 0.0, 0.0]),
    }.items():
        with pytest.raises(ValueError, match=words):
            make()
    for words, make in {
        "params has dtype int64; parameters must be floating-point": lambda: run(params=np.zeros(3, int)),
        "is not an Algorithm; create one": lambda: run(fs.FedAvg),
        "federation is a dict, not a Federation; .*from_clients": lambda: run(federation={"train": []}),
        "sweep: 'step_size' must have a list of values, not 0.1": lambda: run(sweep={"step_size": 0.1}),
        "sweep is a list; give a dictionary": lambda: run(sweep=[0.1]),
        "evaluate='test' must be a list of splits": lambda: run(evaluate="test"),
        "monitor='objective' is not a Problem": lambda: run(monitor="objective"),
        "select=3 must name a column": lambda: run(select=3),
        "callbacks=.* must be a list of functions": lambda: run(callbacks=print),
        "checkpoint=3 must be a folder": lambda: run(checkpoint=3),
        "params.'a'. is a str; parameters must be": lambda: run(params={"a": "zeros"}),
        "params=Linear.* is an architecture": lambda: run(params=fs.models.Linear(3)),
        r"params\(key\) raised TypeError": lambda: run(params=lambda: X),
    }.items():
        with pytest.raises(TypeError, match=words):
            make()


def test_swept_values_must_differ_in_the_dtype_of_the_parameters():
    """0.1 and 0.1 + 1e-12 are two step sizes in float64 and one in float32."""
    near = {"step_size": [0.1, 0.1 + 1e-12]}
    assert run(sweep=near, rounds=1).history.axes["step_size"] == near["step_size"]
    with pytest.raises(ValueError, match=r"has 0.1 and 0.1000.*one number in the parameters' dtype \(float32\)"):
        fs.run(ABOUT_X, fs.FedAvg(0.05), TASK.federation, rounds=1, params=X.astype(np.float32), sweep=near)


def test_parameters_must_be_those_of_the_model():
    problem = fs.Average(fs.losses.Regression(fs.models.Linear(3)))
    right = fs.models.Linear(3).init()
    assert np.isfinite(run(problem=problem, params=right).history.last("objective")).all()
    for wrong in (np.zeros(3), {**right, "weight": np.zeros((3, 1))}, {"w": np.zeros((1, 3))}):
        with pytest.raises(ValueError, match=r"params do not fit Linear\(features=3\): it has .*'weight'.*\(1, 3\)"):
            run(problem=problem, params=wrong)


@pytest.mark.parametrize("loss", [fs.losses.Regression(fs.models.Linear(3)), squared_error])
def test_examples_that_are_tuples_are_named(loss):
    shards = [TASK.federation["train"].shard(i) for i in range(N)]
    tuples = fs.Federation.from_clients([(s["x"], s["y"]) for s in shards])
    params = None if hasattr(loss, "model") else X
    with pytest.raises(ValueError, match=r"loss\(params, example\) fails: .*tuple.*data given as .\"x\": X, \"y\": y"):
        run(problem=fs.Average(loss), federation=tuples, params=params)
    own = fs.Average(lambda w, example: squared_error(w, {"x": example[0], "y": example[1]}))
    np.testing.assert_array_equal(run(problem=own, federation=tuples).solution(), run().solution())


class Scorer(eqx.Module):
    """Parameters that are callable: an equinox module."""

    w: jax.Array
    name: str = eqx.field(default="w", static=True)

    def __call__(self, x):
        return jnp.dot(self.w, x)


@pytest.mark.parametrize(
    "start", [Scorer(jnp.zeros(3)), lambda key: Scorer(jnp.zeros(3)), fs.Vector(Scorer(jnp.zeros(3)))]
)
def test_parameters_may_be_a_module(start):
    problem = fs.Average(lambda model, e: 0.5 * (model(e["x"]) - e["y"]) ** 2)
    found = run(problem=problem, params=start, seeds=2).solution()
    assert isinstance(found, Scorer)
    np.testing.assert_allclose(found.w, run().solution(), rtol=1e-12)


def test_a_module_with_functions_inside_is_refused_with_a_remedy():
    network = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"params.*activation is a .*equinox.partition"):
        run(problem=fs.Average(lambda model, e: model(e["x"])[0]), params=network)


@pytest.mark.slow
@pytest.mark.parametrize("execution", [1, 3, "map", "vmap"])
def test_a_leaf_without_elements_changes_nothing(execution):
    problem = fs.Average(lambda w, e: squared_error(w["a"], e))
    start = {"a": X, "none": np.zeros((0, 2))}
    found = run(fs.SCAFFOLD(0.05, 3), problem=problem, params=start, execution=execution, cohort=3)
    plain = run(fs.SCAFFOLD(0.05, 3), execution=execution, cohort=3)
    np.testing.assert_allclose(found.solution()["a"], plain.solution(), rtol=1e-12)
    assert found.solution()["none"].shape == (0, 2)


def test_seeds_of_more_than_32_bits_are_different_runs_without_64_bit_numbers():
    seeds = [1, 2**32 + 1, 2**33 + 1]
    with jax.enable_x64(False):
        data = jax.tree.map(lambda a: np.asarray(a, np.float32), TASK.federation["train"].examples)
        federation = fs.Federation.from_offsets(data, TASK.federation["train"].offsets)
        draw = lambda key: jax.random.normal(key, (3,), jnp.float32)
        started = run(federation=federation, seeds=seeds, batch_size=1, rounds=1, params=draw)
        drawn = run(federation=federation, seeds=seeds, batch_size=1, rounds=1, params=X.astype("float32"))
    assert started.history.seeds == seeds
    for result, at in ((started, "start"), (drawn, "end")):
        values = result.history["objective"][:, 0 if at == "start" else -1]
        assert len(set(values.tolist())) == 3, at


def test_an_algorithm_for_another_problem_is_refused():
    class Other(fs.Oracle):
        pass

    class Strange(fs.Average):
        Oracle = Other

    with pytest.raises(TypeError, match="FedAvg does not solve Strange problems: it needs a SmoothOracle"):
        run(problem=Strange(squared_error))


BOWL = fs.Average(lambda w, e: 0.5 * jnp.sum(w**2))  # FedAvg(3.0) goes through (−2)^r, where it is 4^r / 2


def test_a_run_that_ends_far_above_its_start_is_reported():
    given = {"problem": BOWL, "params": np.ones(1)}
    assert run(fs.FedAvg(3.0), **given, rounds=2).endings.item() == "finished"  # 8, and the limit is 0.5 + 10
    with pytest.warns(fs.DivergenceWarning, match=r"FedAvg \(seed=0\) got worse: its objective was 0.5 .* and is 32 "):
        result = run(fs.FedAvg(3.0), **given, rounds=3)
    assert result.endings.item() == "worsened"
    assert "1 worsened" in repr(result)
    assert not result.diverged
    np.testing.assert_allclose(result.solution(), [-8.0])  # nothing is taken back
    with pytest.warns(fs.DivergenceWarning, match="step_size=3.0") as caught:
        both = run(sweep={"step_size": [0.1, 3.0]}, **given, rounds=3)
    assert both.endings.tolist() == [["finished"], ["worsened"]]
    assert "step_size=0.1" not in str(caught[0].message)


@pytest.mark.parametrize("start", [-0.5, -99.5, 0.0, 1e6])
def test_what_counts_as_far_goes_with_the_size_of_the_start(start):
    """An objective that climbs from any start is reported once it rose by more than 10 max(|start|, 1)."""
    climbing = fs.Average(lambda w, e: jnp.sum(w) + start)
    far = 10 * max(abs(start), 1)
    options = {"problem": climbing, "params": np.zeros(1), "stationarity": False}
    climb = lambda height: run(Climb(height), rounds=1, **options).endings.item()
    assert climb(0.99 * far) == "finished"
    with pytest.warns(fs.DivergenceWarning, match="got worse"):
        assert climb(1.01 * far) == "worsened"


class Climb(fs.Algorithm):
    height: float = fs.real(above=0)
    local_steps: int = 1

    class State(NamedTuple):
        x: fs.Averaged[fs.Vector]

    def init_server(self, problem, x0):
        return self.State(x=x0)

    def local_step(self, oracle, start, state):
        return self.State(x=state.x + self.height)

    def solution(self, problem, state):
        return state.x


def test_an_algorithm_that_sends_nothing_up_is_reported():
    class Silent(Climb):
        class State(NamedTuple):
            x: fs.Broadcast[fs.Vector]
            steps: fs.Local[fs.Vector]

        def init_server(self, problem, x0):
            return self.State(x=x0, steps=x0)

        def local_step(self, oracle, start, state):
            return state._replace(x=state.x - self.height * oracle.grad(state.x))

    words = "Silent sends nothing up.*Averaged, Reported, Gathered or Pooled"
    with pytest.warns(fs.SetupWarning, match=words):
        result = run(Silent(0.1))
    np.testing.assert_array_equal(result.solution(), X)
    run(fs.CentralSGD(0.1))  # has no clients


@pytest.mark.slow
def test_a_batch_far_larger_than_a_shard_is_reported():
    """More than 20 times its rows, where rows are drawn with replacement."""
    rng = np.random.default_rng(0)
    shards = [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=n)} for n in (40, 5, 7)]
    sites = fs.Federation.from_clients(shards, names=["north", "east", "south"])
    words = "batch_size=141 is more than 20 times the 5 rows of 'east' in 'train', the smallest of 2 such clients"
    with pytest.warns(fs.SetupWarning, match=words):
        run(federation=sites, batch_size=141, rounds=1)
    for batch in (100, "all", Epochs(200, per_round=1)):
        run(federation=sites, batch_size=batch, rounds=1)
    run(fs.CentralSGD(0.1), federation=sites, batch_size=400, rounds=1)  # draws from all rows


def test_a_clean_run_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not run().diverged


def test_a_state_too_big_to_copy_is_updated_in_place_with_the_same_result(monkeypatch):
    small = run(fs.SCAFFOLD(0.05, 3), cohort=2, rounds=9)
    monkeypatch.setattr("fedstrata.simulate.driver.SNAPSHOT_BYTES", 0)
    big = run(fs.SCAFFOLD(0.05, 3), cohort=2, rounds=9)
    np.testing.assert_array_equal(small.solution(), big.solution())
    assert small.history == big.history
    monkeypatch.setattr("fedstrata.simulate.driver.MOST_ROWS", 1)  # and every round is a separate segment
    np.testing.assert_array_equal(small.solution(), run(fs.SCAFFOLD(0.05, 3), cohort=2, rounds=9).solution())
    assert small.history == run(fs.SCAFFOLD(0.05, 3), cohort=2, rounds=9).history
    test_an_exploding_objective_goes_back_to_the_last_good_evaluation()


def test_a_problem_may_measure_stationarity_in_its_own_way():
    class Sevenfold(fs.Average):
        def stationarity(self, x, full, gradient=None):
            return 7 * super().stationarity(x, full, gradient)

    task = least_squares()
    options = {"rounds": 2, "params": np.zeros(3), "evaluate_every": 1}
    plain, seven = (
        fs.run(problem, fs.FedSGD(0.1), task.federation, **options).history["stationarity"]
        for problem in (task.problem, Sevenfold(task.problem.loss))
    )
    np.testing.assert_allclose(seven, 7 * plain, rtol=1e-12)


def test_means_over_clients_and_evaluations_use_full_precision():
    """A GPU's default would round the weights, so that they no longer sum to one."""
    task = least_squares()
    job = prepare(task.problem, fs.FedAvg(0.1), task.federation, rounds=1, params=np.zeros(3), batch_size="all")
    context = job.runs.first_context()
    slots = slots_of(context, context.cohort(job.runs.keys[0], jnp.array(0)))
    mean = jax.make_jaxpr(lambda a: weighted_mean(a, slots))(jnp.zeros((4, 3), jnp.float32))
    carry = jax.tree.map(lambda a: a[0], job.begin()[0])
    found = jax.make_jaxpr(lambda c: measure(job.inputs, job.runs.options, context, c.shared, c.local))(carry)
    for program in (mean, found):
        wanted = [line for line in str(program).splitlines() if "precision" in line]
        assert wanted
        assert all("HIGHEST" in line for line in wanted)


def test_clients_may_run_one_by_one():
    alone, together = (run(fs.SCAFFOLD(0.1, 3), execution=execution, cohort=3) for execution in ("map", "vmap"))
    np.testing.assert_allclose(alone.solution(), together.solution(), rtol=1e-12)
    np.testing.assert_allclose(alone.local["c_i"].tree, together.local["c_i"].tree, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "algorithm", [OwnStarts(), Scores(history=2), fs.FedAvg(0.05, 2)], ids=lambda a: type(a).__name__
)
def test_nothing_is_compiled_while_the_rounds_are_timed(algorithm, stream):
    """First rounds that start client by client, or from the pools of all, are separate programs."""
    options = {"rounds": 5, "params": np.zeros(3), "batch_size": 2, "cohort": 3, "evaluate_every": 2, "stream": stream}
    fs.run(TASK.problem, fs.FedAvg(0.05, 3), TASK.federation, **options)  # what is common to all programs
    state = Driver.start(prepare(TASK.problem, algorithm, TASK.federation, **options))
    state.compile()
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        while not state.finished():
            state.segment()
        assert state.round == 5
        assert not [name for name in events if "backend_compile" in name]
        jax.jit(lambda x: x + 1)(jnp.zeros(()))  # the count does see a program that is new
        assert [name for name in events if "backend_compile" in name]
    finally:
        jax.monitoring.clear_event_listeners()
