"""The portfolio experiment: its data, its optimum, its units, and what the figures' claims rest on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedstrata_papers.fed_dr_scgd import EXPERIMENT, REPRODUCTION, fair, figures, returns, runs
from fedstrata_papers.fed_dr_scgd.optimum import Moments, on_simplex, onto_simplex, unconstrained
from fedstrata_papers.fed_dr_scgd.tasks import build, divided
from scipy.optimize import minimize

import fedstrata as fs
from fedstrata.algorithms.nested import FedDRSCGD, SeparateDRSCGD
from fedstrata.algorithms.nested.nlasg import NLASG
from fedstrata.algorithms.nested.scsc import SCSC
from fedstrata.algorithms.nested.smvr import SMVR
from fedstrata.data.sources import store
from fedstrata.experiments.reproduction import Desk
from fedstrata.problems.compositions import risk_averse
from fedstrata.report import History
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare

GUARDS = [(0.04, 0.0), (0.0, 0.09), (0.01, 0.01), (0.01, 0.3)]


def moments(seed: int = 0, assets: int = 4) -> Moments:
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(assets, assets)) + 2 * np.eye(assets)
    return Moments(0.3 * rng.normal(size=assets), root @ root.T)


@pytest.fixture
def no_files(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path))


@pytest.mark.parametrize(("eps", "floor"), GUARDS)
@pytest.mark.parametrize("risk_aversion", [1.0, 2.5])
def test_no_point_is_below_the_closed_form(eps, floor, risk_aversion):
    data = moments()
    assert data.kappa < risk_aversion**2
    best = unconstrained(data, risk_aversion, eps, floor)
    value = lambda x: data.value(x, risk_aversion, eps, floor)
    assert value(best.x) == pytest.approx(best.value, abs=1e-13)
    rng = np.random.default_rng(1)
    assert min(value(best.x + 10**e * rng.normal(size=4)) for e in (-4, -3, -2, -1, 0) for _ in range(200)) > best.value


def test_without_a_guard_the_best_is_to_buy_nothing():
    best = unconstrained(moments(), 1.0, eps=0.0, floor=0.0)
    assert best.value == 0
    np.testing.assert_array_equal(best.x, 0)


def test_a_tempting_market_has_no_minimum():
    with pytest.raises(ValueError, match="no minimum"):
        unconstrained(moments(), 0.01, eps=0.1, floor=0.0)
    with pytest.raises(ValueError, match="inf is not below"):  # fewer days than assets: a portfolio without risk
        build(data="synthetic", days=80)


def test_the_best_budget_agrees_with_another_solver():
    data = moments(3, 6)
    best = on_simplex(data, 1.0, eps=0.01, floor=0.01)
    sum_to_one = {"type": "eq", "fun": lambda x: x.sum() - 1}
    start = np.full(6, 1 / 6)
    value = lambda x: data.value(x, 1.0, 0.01, 0.0)
    other = minimize(value, start, bounds=[(0, 1)] * 6, constraints=[sum_to_one], method="SLSQP", tol=1e-13)
    assert best.value == pytest.approx(other.fun, abs=1e-8)
    assert best.value <= other.fun + 1e-12
    spread = np.sqrt(best.x @ data.covariance @ best.x + 0.01)
    slope = data.covariance @ best.x / spread - data.mean  # equal where something is bought, larger elsewhere
    bought = best.x > 1e-9
    np.testing.assert_allclose(slope[bought], slope[bought].mean(), atol=1e-9)
    assert slope[~bought].min(initial=np.inf) > slope[bought].mean()
    with pytest.raises(ValueError, match="floor"):
        on_simplex(data, 1.0, eps=0.0, floor=1e3)


def test_the_projection_is_the_nearest_point():
    z = np.random.default_rng(0).normal(size=5)
    x = onto_simplex(z)
    others = np.random.default_rng(1).dirichlet(np.ones(5), 300)
    assert x.sum() == pytest.approx(1)
    assert np.linalg.norm(x - z) <= np.linalg.norm(others - z, axis=1).min()


@pytest.mark.parametrize("constraint", ["none", "simplex"])
def test_the_gap_is_zero_and_stationary_at_the_optimum(constraint):
    setup = build(data="synthetic", clients=3, constraint=constraint, days=3000)
    data = Moments.of(setup.federation)
    solve = on_simplex if constraint == "simplex" else unconstrained
    x = fs.Vector(jnp.asarray(solve(data, 1.0, 0.01, 0.01).x))
    full = fs.full_data(setup.federation, dtype=np.float64)
    problem = setup.problem.bind(x, setup.federation)
    found = jax.jit(lambda x: problem.evaluate(x, full, problem.smooth(x, full)))(x)
    assert abs(found["gap"]) < 1e-9
    assert found["stationarity"] < 1e-7
    r = np.asarray(setup.federation["train"].examples["r"]) @ np.asarray(x.tree)
    assert found["printed"] == pytest.approx(r.std() - r.mean(), abs=1e-12)


def test_shards_are_equal_periods_or_shuffled_days():
    r = np.arange(22.0)[:, None]
    parts = divided(r, 4, "time", 0)
    np.testing.assert_array_equal(np.concatenate(parts)[:, 0], np.arange(20))  # two days do not go round
    mixed = np.concatenate(divided(r, 4, "iid", 0))[:, 0]
    assert len(set(mixed)) == 20
    assert not np.array_equal(mixed, np.sort(mixed))
    with pytest.raises(ValueError, match="cannot share"):
        divided(r, 23, "time", 0)


def test_made_up_returns_have_factors_fat_tails_and_periods():
    r = returns.synthetic(6000, 20, seed=1)
    spread = np.linalg.eigvalsh(np.cov(r.T))
    assert spread[-1] > 0.4 * spread.sum()  # a market
    assert spread[0] > 0
    market = r.mean(axis=1)
    assert ((market - market.mean()) ** 4).mean() / market.var() ** 2 > 4  # of a Gaussian: 3
    by_period = market.reshape(8, -1).std(axis=1)
    assert by_period.max() > 1.3 * by_period.min()
    assert 0 < Moments(r.mean(axis=0), np.cov(r.T)).kappa < 1


def test_absent_files_are_replaced_and_it_is_said(no_files):
    with pytest.warns(returns.SyntheticReturns, match="synthetic returns of the same shape"):
        ((name, r),) = returns.returns("us_100_size_op_daily")
    assert (name, r.shape) == ("us_100_size_op_daily", (13_781, 100))
    with pytest.warns(returns.SyntheticReturns):
        federation = build(data="developed", days=500).federation
    assert federation.clients == 6
    assert federation.name(4) == "Japan"
    assert not returns.present("developed")
    with pytest.raises(ValueError, match="did you mean developed"):
        returns.returns("develloped")


def test_the_missing_code_is_treated_as_asked(monkeypatch):
    import io

    hundredths = np.array([[100, -9999], [300, 50], [-200, 150]], np.int16)
    stored = io.BytesIO()
    np.savez(stored, returns_x100=hundredths, dates=np.arange(3), columns=np.array(["a", "b"]))
    monkeypatch.setattr(store, "read", lambda source, file: stored.getvalue())
    cell = lambda missing: returns.returns("us_100_size_op_daily", missing)[0][1]
    assert [cell(m)[0, 1] for m in ("zero", "mean", "code")] == pytest.approx([0.0, 1.0, -99.99])
    np.testing.assert_allclose(cell("drop"), [[3.0, 0.5], [-2.0, 1.5]])


def test_percent_and_decimals_are_one_path_with_steps_a_hundred_times_apart():
    """Both guards have the square of the unit; then only the step depends on it."""
    ends = []
    for unit, scale in (("percent", 1.0), ("decimal", 0.01)):
        setup = build("synthetic", 2, eps=0.01 * scale**2, floor=0.01 * scale**2, unit=unit, days=3000)
        method = FedDRSCGD(step_size=1e-4 / scale, momentum=0.5, local_steps=2)
        options = {"rounds": 3, "batch_size": 1, "execution": "vmap", "stationarity": False}
        run = fs.run(setup.problem, method, setup.federation, **options)
        ends.append(run.history["gap"][0] / scale)
    assert ends[0][-1] < ends[0][0]
    np.testing.assert_allclose(*ends, rtol=1e-6)


def test_what_an_upload_holds_and_what_of_it_varies():
    """406 numbers against 10,507, of whose 10,304 Jacobian entries all but 202 are the same for every day and point."""
    setup = build(data="synthetic", clients=2, days=20, constraint="simplex")
    job = lambda kind: prepare(setup.problem, kind(1e-5, 0.9), setup.federation, RunOptions(rounds=1, execution="vmap"))
    numbers = {kind: job(kind).ledger.up / 8 for kind in (FedDRSCGD, SMVR, SCSC, NLASG)}
    assert numbers == {FedDRSCGD: 406, SMVR: 10_507, SCSC: 10_507, NLASG: 10_507}
    rng = np.random.default_rng(0)
    samples = []
    first, second, third = setup.problem.levels

    @jax.jit
    def jacobians(x, day, other):
        day, other = {"r": day}, {"r": other}  # levels draw their own days; on one day the second slope would be zero
        points = [x, first(x, day)]
        points.append(second(points[1], other))
        return jax.jacrev(first)(x, day), jax.jacrev(second)(points[1], other), jax.jacrev(third)(points[2])

    for _ in range(4):
        entries = jacobians(*(jnp.asarray(rng.normal(size=100)) for _ in range(3)))
        samples.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(entries)]))
    assert samples[0].size == 10_304
    assert np.sum(np.ptp(samples, axis=0) > 0) == 202


def history(values: list[list[float]]) -> History:
    rounds = np.arange(len(values[0]))
    return History({"seed": list(range(len(values)))}, {"round": [rounds] * len(values), "gap": np.array(values)})


def test_ends_and_first_times():
    found = history([[4.0, 2.0, 1.0, 1.0, 3.0], [4.0, np.nan, np.nan, np.nan, np.nan]])
    assert runs.end(found).tolist() == [3.0, np.inf]  # the last fifth of the records
    across = np.array([0.0, 10.0, 20.0, 30.0, 40.0])
    assert runs.first_below(found, "gap", 2.0, across).tolist() == [10.0, np.inf]


def test_an_epoch_is_one_pass_of_all_clients_over_all_days():
    found = history([[1.0, 1.0]])  # one round of four steps, one day each
    across = lambda data: runs.epochs_of(found, data, 4)[1]
    assert across({"data": "us_100_size_op_daily", "clients": 16}) == pytest.approx(16 * 4 / 13_781)
    assert across({"data": "developed"}) == pytest.approx(4 / 7_240)


def test_the_time_model_adds_steps_latency_and_messages():
    columns = {"round": [[0, 10]], "bytes_up": [[0, 1e9]], "bytes_down": [[0, 0.25e9]]}
    found = figures.seconds(History({"seed": [0]}, columns), local_steps=4)
    np.testing.assert_allclose(found, [0.0, 10 * 4 * 1e-4 + 10 * 1e-3 + 1.0])


def test_the_default_methods_come_nearer_to_the_optimum():
    setup = build(data="synthetic", days=3000)
    result = EXPERIMENT.run("FedDRSCGD", setup, rounds=60, seeds=2, evaluate_every=20)
    gap = result.history["gap"]
    assert np.all(gap[:, -1] < 0.5 * gap[:, 0])
    assert {*EXPERIMENT.panels} <= {*result.history.columns}


def test_a_tuned_comparison_picks_the_better_step_and_sees_no_difference_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(fair, "METHODS", dict.fromkeys(("FedDRSCGD", "SMVR"), ("FedDRSCGD", {})))
    monkeypatch.setattr(fair, "BALL", "FedDRSCGD")
    monkeypatch.setattr(fair, "BASELINES", ("SMVR",))
    monkeypatch.setitem(fair.STEPS, "none", [1e-8, 1e-4])
    monkeypatch.setitem(runs.SIZES, "small", runs.Size(0.01, 0.01, 4, 1, 4, 1, ()))
    monkeypatch.setitem(fair.NAMES, "synthetic", "made up")
    desk = Desk(tmp_path, quiet=True)
    data = {"data": "synthetic", "clients": 8, "days": 3000}
    outcome = fair._compare(desk, 4, "printed objective", "title", data)
    assert outcome.files[0].stat().st_size > 10_000
    assert [claim.figure for claim in outcome.claims] == [4, 4]
    for claim in outcome.claims:
        assert claim.ours.count("η = 1e-4 (edge)") == 2
        assert "ratio 1 (1 to 1)" in claim.ours
        assert claim.verdict == "does not hold"
    assert {*REPRODUCTION.figures} >= {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(("kind", "expected"), [(FedDRSCGD, 1 - 4.5 / 1.1), (SeparateDRSCGD, 1.0)])
def test_on_fat_tails_one_sample_for_value_and_slope_turns_the_direction_around(kind, expected):
    """With small a the error is E[2 u r (u² − z)] times the slope of λ / (2 √(z + ε)), for u = rᵀx of variance z.

    That is −(k − 1)/2 · z/(z + ε) times the gradient of the root, where k is the kurtosis. For Gaussian returns, k = 3,
    nothing is left of the direction; here returns are ±1 on one day of twenty each, k = 10, and it points uphill.
    """
    r = np.concatenate([np.zeros(18), [1.0, -1.0]])[:, None]
    federation = fs.Federation.from_clients([{"r": r}])
    problem = risk_averse(eps=0.01, floor=0.01)
    step, rounds = 1e-9, 3000
    options = {"rounds": rounds, "batch_size": 1, "seeds": 16, "evaluate_every": rounds, "execution": "vmap"}
    options["stationarity"] = False
    result = fs.run(problem, kind(step, 0.005, init_batch_size=1000), federation, params=np.ones(1), **options)
    direction = (1 - np.asarray(result.solutions.tree)[:, 0]) / (step * rounds)
    gradient = 0.1 / np.sqrt(0.11)
    assert direction.mean() / gradient == pytest.approx(expected, abs=0.6)
