"""Evaluation at the sites: per-site metrics, what follows from them for all sites, and what does not leave a site."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BILEVEL, CASES, COMPOSITE, FAIR, NESTED, START, TASK
from references import squared_error
from sklearn.metrics import roc_auc_score

import fedstrata as fs
from fedstrata.deploy.in_process import advance, in_process_run
from fedstrata.deploy.messages import EVALUATE, Message, Stage
from fedstrata.deploy.server import Server

ROUNDS = 2
HELD_OUT = TASK.federation.hold_out("test", 0.3, stratify=False)  # every task of `cases` has these clients
MEANS = [
    (TASK.problem, "FedAvg", "uniform"),
    (COMPOSITE.problem, "FedNMap", "size"),
    (NESTED["client"].problem, "ComFedL", "uniform"),
    (FAIR.problem.weighted([0.5, 2.0]), "FedReg", "size"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "name", "weights"), MEANS)
def test_per_site_metrics_equal_the_simulated_ones(problem, name, weights):
    options = {"params": START, "batch_size": 2, "weights": weights}
    server, _, _ = in_process_run(problem, CASES[name].algorithm, HELD_OUT, **options)
    found = server.evaluate(advance(server, ROUNDS))
    options |= {"rounds": ROUNDS, "evaluate_every": ROUNDS, "stationarity": False, "per_client": True}
    history = fs.run(problem, CASES[name].algorithm, HELD_OUT, progress=False, **options).history
    assert found.round == ROUNDS
    assert list(found.by_site) == [str(n) for n in HELD_OUT.names]
    own = [found.by_site[str(name)]["train/objective"] for name in HELD_OUT.names]
    np.testing.assert_allclose(own, history.per_client["client/objective"][0, -1], rtol=1e-12)
    assert found.objective == pytest.approx(float(history.last("objective")[0]), rel=1e-12)
    assert found.means["test/loss"] == pytest.approx(float(history.last("test/loss")[0]), rel=1e-12)
    assert [found.rows[str(n)]["test"] for n in HELD_OUT.names] == HELD_OUT["test"].counts.tolist()
    assert not found.missing
    assert not found.unavailable


class Worst(fs.Average):
    """The largest of the clients' losses, which is not a mean of them."""

    def objective(self, x, full):
        return jnp.max(self.evaluate_clients(x, full["train"])["objective"])

    def from_clients(self, x, values, weights):
        return None


@pytest.mark.parametrize(
    ("problem", "name"),
    [(NESTED["global"].problem, "FedDRSCGD"), (BILEVEL["client"].problem, "FedBiO"), (Worst(squared_error), "FedAvg")],
)
def test_an_objective_that_is_not_a_mean_is_unavailable(problem, name):
    server, _, _ = in_process_run(problem, CASES[name].algorithm, TASK.federation, params=START, batch_size=2)
    found = server.evaluate(server.begin())
    assert found.objective is None
    assert type(problem).__name__ in found.unavailable["objective"]


def clinics(label=1):
    """Four sites with 0/1 labels; the last one's test rows are all of one class."""
    rng, sites = np.random.default_rng(0), []
    for n in (12, 7, 9, 8):
        x = rng.normal(size=(2 * n, 3))
        sites.append({"x": x, "y": (x[:, 0] + rng.normal(size=2 * n) > 0).astype(np.int32)})
    half = lambda part: [{k: v[part(len(v) // 2)] for k, v in site.items()} for site in sites]
    train, test = half(lambda n: slice(None, n)), half(lambda n: slice(n, None))
    test[3]["y"][:] = label
    return fs.Federation.from_clients(train, test=test)


LINEAR = fs.models.Linear(3)
LOGISTIC = fs.Average(fs.losses.Classification(LINEAR))
PAIRS = fs.Pairwise(LINEAR, fs.pair_losses.Logistic(), metrics=("auc", "pauc_0.3"))


def deployed(problem=LOGISTIC, algorithm=None, federation=None, open_to=(0, 1, 2, 3), **options):
    federation = clinics() if federation is None else federation
    server, sites, _ = in_process_run(problem, algorithm or fs.FedAvg(0.5), federation, batch_size=2, **options)
    for i in open_to:
        sites[i].tells = "scores"
    return server, sites, federation


def scores_of(x, federation):
    rows = federation["test"].examples
    return np.asarray(rows["x"] @ x.tree["weight"][0] + x.tree["bias"][0]), rows["y"]


def test_the_auc_of_all_scores_is_that_of_pooled_data():
    server, _, federation = deployed()
    now = advance(server, ROUNDS)
    found = server.evaluate(now, scores=("test",))
    scores, labels = scores_of(server.solution(now), federation)
    assert found.pooled == {"test/auc": pytest.approx(roc_auc_score(labels, scores), rel=1e-12)}
    guessed = np.split(((scores > 0) == labels), federation["test"].offsets[1:-1])
    own = [values["test/accuracy"] for values in found.by_site.values()]
    np.testing.assert_allclose(own, [g.mean() for g in guessed], rtol=1e-12)
    assert found.means["test/accuracy"] == pytest.approx(np.mean(own), rel=1e-12)


def test_a_pairwise_problem_adds_its_metrics_of_pooled_scores():
    params = {"weight": jnp.array([[0.7, -0.4, 0.1]]), "bias": jnp.zeros(1)}
    federation = clinics().by_label()
    server, _, _ = deployed(PAIRS, fs.FedX1(0.1), federation, params=params)
    now = server.begin()
    found = server.evaluate(now, scores=("test",))
    scores, labels = scores_of(server.solution(now), federation)
    assert found.pooled["test/auc"] == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)
    assert found.pooled["test/pauc_0.3"] == pytest.approx(roc_auc_score(labels, scores, max_fpr=0.3), rel=1e-12)
    bounds = federation["test"].offsets[1:-1]
    parts = list(zip(np.split(labels, bounds), np.split(scores, bounds), strict=True))
    own = [values["test/auc"] for values in found.by_site.values()]
    np.testing.assert_allclose(own[:3], [roc_auc_score(*part) for part in parts[:3]], rtol=1e-12)
    assert np.isnan(own[3])  # one class only
    assert found.means["test/auc"] == pytest.approx(np.mean(own[:3]), rel=1e-12)
    assert found.objective is None
    assert not any(name.startswith(("positives", "negatives")) for name in found.means)


def test_a_site_that_withholds_its_scores_is_named_and_nothing_is_pooled_without_it():
    server, sites, _ = deployed(open_to=(0, 1, 3))
    sent = {}
    link = server.caller.link
    server.caller.link = lambda calls: sent.update(link(calls)) or sent
    found = server.evaluate(server.begin(), scores=("test",))
    assert found.pooled == {}
    assert sites[2].name in found.unavailable["test/auc"]
    assert sites[1].name not in found.unavailable["test/auc"]
    assert np.isfinite(found.by_site[sites[2].name]["test/accuracy"])
    assert found.objective is not None
    sizes = {i: sum(a.size for a in reply.arrays.values()) for i, reply in sent.items()}
    assert max(a.size for a in sent[2].arrays.values()) == 1  # not one row left the site
    assert sizes[1] - sizes[2] == 2 * found.rows[sites[1].name]["test"]


def test_no_scores_are_sent_without_a_request():
    server, _, _ = deployed()
    sent = {}
    link = server.caller.link
    server.caller.link = lambda calls: sent.update(link(calls)) or sent
    assert server.evaluate(server.begin(), splits=("test",)).unavailable.keys() == {"objective"}
    assert all(array.size == 1 for reply in sent.values() for array in reply.arrays.values())


def faulty(server, fault):
    """The same run over a link that replaces the third site's evaluations by fault(reply)."""

    def link(calls):
        return {
            i: fault(reply) if i == 2 and calls[i].stage.exchange == EVALUATE else reply
            for i, reply in server.caller.link(calls).items()
        }

    return Server(server.agreement, server.names, link)


def changed(name, value):
    return lambda reply: reply._replace(arrays={**reply.arrays, name: value})


FAULTS = {
    "gone fishing": lambda reply: "gone fishing",
    "the reply is for": lambda reply: reply._replace(stage=Stage(reply.stage.round, 0)),
    "missing": lambda reply: reply._replace(arrays={}),
    "unexpected": changed("said.values['test/charm']", np.zeros(())),
    "not finite": changed("said.values['test/loss']", np.array(np.inf)),
    "float32": changed("said.values['test/loss']", np.zeros((), np.float32)),
    "has -1 rows, and 9 by the agreement": changed("said.counts['test']", np.array(-1)),
    "has 4294967301 rows, and 9 by the agreement": changed("said.counts['test']", np.array(2**32 + 5)),
    "expected float64": changed("said.scores['test']", np.zeros(3)),
    "not all finite": lambda reply: changed(
        "said.scores['test']", np.full_like(reply.arrays["said.scores['test']"], np.nan)
    )(reply),
    "unexpected [\"said.scores": changed("said.withheld", np.array(True)),  # declared as withheld, and sent
}  # fmt: skip


@pytest.mark.parametrize("why", FAULTS)
def test_a_missing_or_invalid_reply_is_named_and_nothing_is_computed_over_all_sites(why):
    plain, sites, _ = deployed()
    found = faulty(plain, FAULTS[why]).evaluate(plain.begin(), scores=("test",))
    lost = sites[2].name
    assert why in found.missing[lost]
    assert lost not in found.by_site
    assert len(found.by_site) == 3
    assert found.objective is None
    assert found.pooled == {}
    assert lost in found.unavailable["objective"]
    assert lost in found.unavailable["test/auc"]


def test_measures_leave_a_private_run_only_if_a_site_allows_it():
    private = {"privacy": fs.Privacy(clip=1.0, noise=1.0), "noise_key": jax.random.key(0)}
    server, (first, *_), _ = in_process_run(LOGISTIC, fs.FedAvg(0.5), clinics(), batch_size=2, **private)
    now = server.begin()
    with pytest.raises(ValueError, match=r'client 0 sends no measures.*tells="measures"'):
        server.evaluate(now)
    calls = {}
    server.caller.link = lambda asked: calls.update(asked) or {}
    assert server.evaluate(now).missing.keys() == set(server.names)
    first.tells = "measures"
    assert "said.values['test/loss']" in first.answer(calls[0]).arrays
    first.tells = "lies"
    with pytest.raises(ValueError, match="unknown setting tells of client 0 'lies'"):
        first.answer(calls[0])


def test_an_evaluation_between_rounds_changes_no_bit():
    plain, looked = (deployed(algorithm=fs.SCAFFOLD(0.5, 2)) for _ in range(2))
    now = advance(looked[0], 1)
    before = [dict(site.store.stored) for site in looked[1]]
    first = looked[0].evaluate(now, scores=("test",))
    assert [site.store.stored for site in looked[1]] == before
    again = looked[0].evaluate(now, scores=("test",))
    np.testing.assert_equal(first.as_json(), again.as_json())
    ends = [advance(plain[0], 3).shared, advance(looked[0], 3, now).shared]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_an_impossible_evaluation_is_refused_before_any_call():
    def no_call(calls):
        raise AssertionError(calls)

    three = fs.Average(fs.losses.Classification(fs.models.Linear(3, 3)))
    vectors = fs.Pairwise(lambda w, e: w * e["x"], lambda a, b: jnp.sum(a - b), metrics=())
    squares = fs.Average(fs.losses.Regression(LINEAR))
    for problem, algorithm, why in [
        (three, fs.FedAvg(0.5), r"one score for every example, and this model's have shape \(3,\)"),
        (vectors, fs.FedX1(0.1), "one score for every example"),
        (squares, fs.FedAvg(0.5), "Average problem has no scores to pool"),
    ]:
        params = {"params": np.ones(3)} if problem is vectors else {}
        server, _, _ = in_process_run(problem, algorithm, clinics().by_label(), batch_size=2, **params)
        now, server.caller.link = server.begin(), no_call
        with pytest.raises(ValueError, match=why):
            server.evaluate(now, scores=("test",))
        with pytest.raises(ValueError, match="unknown split of the sites 'valid'"):
            server.evaluate(now, splits=("valid",))


def test_a_site_refuses_a_malformed_request_and_one_without_data():
    _, (site, *_), _ = deployed()
    stage = Stage(0, EVALUATE)
    with pytest.raises(ValueError, match="places among the splits"):
        site.answer(Message("in process", stage, site.name, {"splits": np.array([7], np.int32)}))
    many = {"splits": np.zeros((10**6,), np.int32)}
    with pytest.raises(ValueError, match=r"places among the splits .*, and is int32\(1000000,\)$"):
        site.answer(Message("in process", stage, site.name, many))
    site.data = None
    with pytest.raises(ValueError, match=f"{site.name}: this site has no data to evaluate on"):
        site.answer(Message("in process", stage, site.name, {}))


def test_a_site_without_rows_of_a_split_has_no_weight_in_it():
    whole = clinics()
    shards = [{k: v[a:b] for k, v in whole["test"].examples.items()} for a, b in ((0, 12), (12, 19), (19, 28), (0, 0))]
    train = [whole["train"].shard(i) for i in range(4)]
    server, sites, _ = deployed(federation=fs.Federation.from_clients(train, test=shards))
    found = server.evaluate(server.begin(), scores=("test",))
    assert not found.missing
    own = [found.by_site[site.name]["test/accuracy"] for site in sites]
    assert np.isnan(own[3])
    assert found.means["test/accuracy"] == pytest.approx(np.mean(own[:3]), rel=1e-12)
    assert found.pooled == {"test/auc": 0.5}  # the start is zero, where all scores are equal


def test_a_summary_prints_as_a_table_and_travels_as_json():
    plain, sites, _ = deployed(PAIRS, fs.FedX1(0.1), clinics().by_label())
    found = faulty(plain, FAULTS["gone fishing"]).evaluate(plain.begin(), scores=("test",))
    text = str(found)
    for part in (*plain.names, "mean over sites", "test/auc", "gone fishing", "objective is not available"):
        assert part in text
    again = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert again["by_site"][sites[3].name]["test/auc"] is None
    assert again["missing"] == found.missing
    table, *notes = found.rich().renderables
    assert table.row_count == len(found.by_site) + 1
    assert [str(note) for note in notes] == found._notes()
