"""FedAvg and its relatives: identities between them, closed forms, and what partial participation does."""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from references import least_squares, local_sgd

import fedstrata as fs
from fedstrata.algorithms import known
from fedstrata.base.plugins import from_path

TASK = least_squares(clients=5, dimension=4, seed=3)
START = np.array([0.5, -1.0, 0.0, 2.0])
N = TASK.federation.clients


def run(algorithm, rounds=12, batch_size=3, **options):
    settings = {"params": START, "evaluate_every": rounds, "stationarity": False, **options}
    return fs.run(TASK.problem, algorithm, TASK.federation, rounds=rounds, batch_size=batch_size, **settings)


def same(left, right, **options):
    a, b = run(left, **options).solution(), run(right, **options).solution()
    np.testing.assert_allclose(a, b, rtol=1e-11)
    assert not np.allclose(a, START)


@pytest.mark.parametrize("options", [{}, {"cohort": 3}, {"weights": "size"}])
def test_fedprox_without_pull_is_fedavg(options):
    same(fs.FedProx(0.05, 4, mu=0.0), fs.FedAvg(0.05, 4), **options)


def test_fedopt_with_unit_sgd_is_fedavg():
    same(fs.FedOpt(0.05, 4, 1.0, optax.sgd), fs.FedAvg(0.05, 4), cohort=3)


def test_fedavg_with_one_step_is_fedsgd():
    same(fs.FedAvg(0.05, 1), fs.FedSGD(0.05), weights="size")


def test_centralised_sgd_with_full_batches_is_fedsgd():
    for weights in ("uniform", "size"):  # clients of different sizes: the pooled method must weigh them alike
        same(fs.CentralSGD(0.05, 1), fs.FedSGD(0.05), batch_size="all", weights=weights)


def test_centralised_sgd_draws_clients_by_weight():
    """The mean of many one-step runs is the full gradient step; a plain pooled draw would weigh by size."""
    shards = [{"x": np.ones((1, 1)), "y": np.ones(1)}, {"x": np.ones((9, 1)), "y": np.zeros(9)}]
    uneven = fs.Federation.from_clients(shards)
    run = fs.run(TASK.problem, fs.CentralSGD(1.0), uneven, rounds=1, params=np.zeros(1), batch_size=50, seeds=200)
    # ∇f(0) = −1/2 with uniform weights; one run has deviation 1/2 / √50.
    assert abs(run.solutions.tree.mean() - 0.5) < 4 * 0.5 / np.sqrt(50 * 200)


def test_fedavg_follows_its_listing():
    x = START
    for _ in range(12):
        x = np.mean([local_sgd(lambda w, i=i: TASK.gradient(i, w), x, 0.05, 4) for i in range(N)], axis=0)
    np.testing.assert_allclose(run(fs.FedAvg(0.05, 4), batch_size="all").solution(), x, rtol=1e-12)


def test_fedavg_stalls_at_its_known_fixed_point():
    """Q steps on a quadratic are x ← P_i x + (I − P_i) x*_i with P_i = (I − ηH_i)^Q; the mean has one fixed point."""
    powers = np.stack([np.linalg.matrix_power(np.eye(4) - 0.05 * h, 4) for h in TASK.hessians])
    own = np.stack([np.linalg.solve(h, b) for h, b in zip(TASK.hessians, TASK.centres, strict=True)])
    pull = np.eye(4) - powers
    fixed = np.linalg.solve(pull.sum(0), np.einsum("nij,nj->i", pull, own))
    result = run(fs.FedAvg(0.05, 4), rounds=2000, batch_size="all")
    np.testing.assert_allclose(result.solution(), fixed, rtol=1e-9)
    assert np.linalg.norm(fixed - TASK.optimum()) > 1e-3


def test_scaffold_follows_its_listing_under_partial_participation():
    schedule, eta, steps, server = [[0, 3], [1, 2, 4], [3, 1], [2]], 0.05, 4, 0.8
    x, c, own = START.copy(), np.zeros(4), np.zeros((N, 4))
    for members in schedule * 3:
        moved, changed = [], []
        for i in members:
            y = local_sgd(lambda w, i=i: TASK.gradient(i, w), x, eta, steps, c - own[i])
            new = own[i] - c + (x - y) / (eta * steps)
            moved.append(y - x)
            changed.append(new - own[i])
            own[i] = new
        x, c = x + server * np.mean(moved, axis=0), c + len(members) / N * np.mean(changed, axis=0)
        np.testing.assert_allclose(c, own.mean(0), atol=1e-12)  # the invariant that the docstring promises
    result = run(fs.SCAFFOLD(eta, steps, server), batch_size="all", cohort=fs.participation.Given(schedule))
    np.testing.assert_allclose(result.solution(), x, rtol=1e-11)
    np.testing.assert_allclose(result.local["c_i"].tree[0], own, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.state.c.tree[0], own.mean(0), atol=1e-12)


def test_scaffold_reaches_the_optimum_where_fedavg_does_not():
    far = lambda algorithm: np.linalg.norm(run(algorithm, rounds=1500, batch_size="all").solution() - TASK.optimum())
    assert far(fs.SCAFFOLD(0.05, 5)) < 1e-10
    assert far(fs.FedAvg(0.05, 5)) > 1e-3


def test_the_drift_of_fedavg_is_proportional_to_the_step():
    steps = np.array([0.02, 0.01, 0.005])
    result = run(fs.FedAvg(0.02, 5), rounds=20_000, batch_size="all", sweep={"step_size": steps})
    far = [np.linalg.norm(result.solution(step_size=s) - TASK.optimum()) for s in steps]
    slope = np.polyfit(np.log(steps), np.log(far), 1)[0]
    assert abs(slope - 1) < 0.1


def test_fedadam_and_fedyogi_follow_their_listing():
    eta, server, b1, b2, tau = 0.05, 0.1, 0.8, 0.95, 1e-2
    for kind, moment in [
        (fs.FedAdam, lambda v, s: b2 * v + (1 - b2) * s),
        (fs.FedYogi, lambda v, s: v - (1 - b2) * s * np.sign(v - s)),
    ]:
        x, m, v = START, np.zeros(4), np.full(4, tau**2)
        for _ in range(12):
            local = [local_sgd(lambda w, i=i: TASK.gradient(i, w), x, eta, 3) for i in range(N)]
            delta = np.mean(local, axis=0) - x
            m, v = b1 * m + (1 - b1) * delta, moment(v, delta**2)
            x = x + server * m / (np.sqrt(v) + tau)
        algorithm = kind(eta, 3, server, beta1=b1, beta2=b2, adaptivity=tau)
        np.testing.assert_allclose(run(algorithm, batch_size="all").solution(), x, rtol=1e-10)


def test_fedopt_takes_optax_optimizers_with_memory():
    with jax.numpy_dtype_promotion("standard"):  # optax's own bias correction raises a float to an integer power
        optimizer = optax.adam(0.1)
        x, memory = jnp.asarray(START), optimizer.init(jnp.asarray(START))
        for _ in range(12):
            local = [local_sgd(lambda w, i=i: TASK.gradient(i, w), np.asarray(x), 0.05, 3) for i in range(N)]
            change, memory = optimizer.update(x - np.mean(local, axis=0), memory, x)
            x = x + change
        result = run(fs.FedOpt(0.05, 3, 0.1, optax.adam), batch_size="all")
    np.testing.assert_allclose(result.solution(), x, rtol=1e-10)


def test_a_schedule_is_read_at_the_step_or_at_the_round():
    halving = lambda count: 0.1 * 0.5 ** count.astype(float)
    x_step = x_round = START
    for r in range(3):
        gradient = lambda w: np.mean([TASK.gradient(i, w) for i in range(N)], axis=0)
        x_round = x_round - 0.1 * 0.5**r * gradient(x_round)
        locals_ = []
        for i in range(N):
            w = x_step
            for q in range(2):
                w = w - 0.1 * 0.5 ** (2 * r + q) * TASK.gradient(i, w)
            locals_.append(w)
        x_step = np.mean(locals_, axis=0)
    by_step = run(fs.FedAvg(halving, 2), rounds=3, batch_size="all").solution()
    by_round = run(fs.FedSGD(fs.per_round(halving)), rounds=3, batch_size="all").solution()
    np.testing.assert_allclose(by_step, x_step, rtol=1e-12)
    np.testing.assert_allclose(by_round, x_round, rtol=1e-12)


@pytest.mark.slow
def test_noise_averages_out_over_clients():
    """With one step a round and equal clients, the variance of x after one round falls like 1 / N."""
    spread = []
    for clients in (4, 16):
        rng = np.random.default_rng(0)
        y = rng.normal(size=40)
        same = fs.Federation.from_clients([{"x": np.ones((40, 1)), "y": y}] * clients)
        result = fs.run(TASK.problem, fs.FedAvg(1.0), same, rounds=1, params=np.zeros(1), batch_size=1, seeds=400)
        spread.append(result.solutions.tree.var())
    assert spread[0] / spread[1] == pytest.approx(4, rel=0.35)


def test_hyper_parameters_out_of_range_are_refused():
    for make, words in [
        (lambda: fs.FedAvg(step_size=-0.1), "FedAvg: step_size = -0.1 is out of range; it must be > 0"),
        (lambda: fs.FedAvg(step_size=float("nan")), "step_size = nan"),
        (lambda: fs.FedProx(step_size=0.1, mu=-1.0), "mu = -1.0 is out of range; it must be >= 0"),
        (lambda: fs.FedAdam(step_size=0.1, beta1=1.0), "beta1 = 1.0 is out of range; it must be >= 0 and < 1"),
        (lambda: fs.FedAvg(step_size=0.1, local_steps=0), "local_steps = 0 must be a whole number >= 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(TypeError, match="step_size = 'fast' must be a number"):
        fs.FedAvg(step_size="fast")
    assert dataclasses.replace(fs.FedProx(0.1), mu=0.0).mu == 0.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fs.FedAvg(stepsize=0.1), r"FedAvg has no hyper-parameter 'stepsize'; did you mean step_size\?"),
        (lambda: fs.FedProx(0.1, my=0.1), r"FedProx has no hyper-parameter 'my'; did you mean mu\?"),
        (lambda: fs.FedAvg(0.1, zzz=1), r"FedAvg has no hyper-parameter 'zzz'; It has: step_size, local_steps\."),
        (lambda: fs.FedAdam(0.1, optimizer=optax.sgd), r"FedAdam has no hyper-parameter 'optimizer'.*beta1"),
        (lambda: fs.FedAvg(), r"FedAvg needs step_size: give FedAvg\(step_size=\.\.\.\)"),
        (lambda: fs.FedAvg(local_steps=5), "FedAvg needs step_size"),
        (lambda: fs.FedAvg(0.1, 5, 0.9), "FedAvg takes 2 hyper-parameters, not 3: step_size, local_steps"),
    ],
)
def test_wrong_arguments_are_answered_with_the_right_ones(make, words):
    with pytest.raises(TypeError, match=words):
        make()


@pytest.mark.parametrize("steps", [0, -1, 1.0, True, "3", None])
def test_local_steps_are_a_whole_number_of_at_least_one(steps):
    for kind in (fs.FedAvg, fs.FedAdam, fs.SCAFFOLD, fs.CentralSGD):
        with pytest.raises(ValueError, match=f"{kind.__name__}: local_steps = .* must be a whole number >= 1"):
            kind(step_size=0.1, local_steps=steps)


def test_an_optimizer_is_a_function_of_its_learning_rate():
    with pytest.raises(TypeError, match="FedOpt: optimizer = 'adam' must be a function"):
        fs.FedOpt(0.1, optimizer="adam")


GUIDE = Path(__file__).parents[2] / "docs"


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder on the path that holds the guide's package `mylab`, and what an installer would write about it."""
    guide = (GUIDE / "add_an_algorithm.md").read_text()
    pages = dict(re.findall(r"`(mylab/[\w.]+)`:?\n+```python\n(.*?)```", guide, re.S))
    assert list(pages) == ["mylab/momentum.py"]
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "__init__.py").touch()
    for path, text in pages.items():
        (tmp_path / path).write_text(text)
    (entry,) = re.findall(r'entry-points\."(fedstrata\.\w+)"\]\n(\w+) = "(.*?)"', guide)
    about = tmp_path / "mylab-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*entry))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylab"]:
        del sys.modules[name]


def test_the_guides_algorithm_in_an_outside_file_runs(outside):
    """Both ways to it give the same class: its path, and the entry point of an installed package."""
    words = re.search(r"--algorithm (\S+:\S+)", (GUIDE / "add_an_algorithm.md").read_text())
    assert words
    kind = from_path(words[1])
    assert known()[kind.__name__] is kind
    assert getattr(fs.algorithms, kind.__name__) is kind
    same(kind(0.05, 4, momentum=0.0), fs.FedAvg(0.05, 4), cohort=3)
    # With one client and one step it is the heavy ball: v ← βv − η∇f(x), x ← x + v.
    x, v = START, np.zeros(4)
    for _ in range(5):
        v = 0.9 * v - 0.05 * TASK.gradient(1, x)
        x = x + v
    alone = TASK.federation.select([1])
    found = fs.run(TASK.problem, kind(0.05), alone, rounds=5, params=START, batch_size="all", stationarity=False)
    np.testing.assert_allclose(found.solution(), x, rtol=1e-12)
