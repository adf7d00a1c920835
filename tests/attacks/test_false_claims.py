"""What a registered site or a stranger claims of itself: rows, names, identities."""

import dataclasses
import json
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attacked_runs import forging, honest
from cases import CASES, START, task_of
from deployments import simulated
from grids import NAME, TASK, deployment, solution
from strangers import after_polls, summary_of

from fedstrata.base.text import LONGEST_NAME, check_plain_name
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.evaluation.summary import Summary
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.flower.sites_file import FILE
from fedstrata.deploy.server import QuorumError


@pytest.mark.parametrize("name", ["FedX1", "FedX2", "TrackedX"])
def test_rows_that_would_fill_the_servers_memory_are_refused_before_it_is_reserved(name):
    """The pool of such a method has as many rows as the largest site claims, if a batch is all of them."""
    algorithm = CASES[name].algorithm
    if hasattr(algorithm, "pool_size"):
        algorithm = dataclasses.replace(algorithm, pool_size=None)
    task = task_of(algorithm)
    made = Deployment(task.problem, algorithm, lambda settings: None, 1, 3, {"params": START, "batch_size": "all"})
    own = [DataSummary.of(f"site-{i}", task.federation.select([i])) for i in range(3)]
    claim = own[1]._replace(counts={**own[1].counts, "train": 2**31 - 2**17})
    server_app._check_memory(server_app.agree_on(made, "", own), own)
    with pytest.raises(ValueError, match=r"would take [\d,.]+ GB of memory here.*site-1 reports 2,147,352,576 rows"):
        server_app._check_memory(server_app.agree_on(made, "", [claim]), [claim])


def test_a_node_whose_claim_would_fill_the_memory_is_left_out_before_anything_is_written(grid, tmp_path, monkeypatch):
    """The run waits for the site as it really is, and no later start finds the claim in a file."""
    check, claims = server_app._check_memory, []

    def small(agreement, summaries):
        if max(s.counts["train"] for s in summaries) > 10**6:
            claims.append(len(summaries))
            assert not (tmp_path / "out" / FILE).exists()
            raise ValueError("as if it were too much")
        check(agreement, summaries)

    monkeypatch.setattr(server_app, "_check_memory", small)
    claim = lambda about, body: {**about, "survey": json.dumps(_claiming(about["survey"], 10**7))}
    forging(grid, lambda about, body: server_record(claim(about, body), body), "query.survey", times=2)
    server_app.serve(deployment(rounds=1), grid, "first", tmp_path / "out")
    assert claims == [1, 1]
    rows = json.loads((tmp_path / "out" / FILE).read_text())["surveys"]
    assert max(row[1]["train"] for row in rows) < 100


def test_a_claim_that_every_site_refuses_can_be_corrected_and_the_run_started_again(grid, tmp_path):
    """Its summary would otherwise be that of the run, and the true one a change. The sites have prepared nothing."""
    claim = lambda about, body: {**about, "survey": json.dumps(_claiming(about["survey"], 2 * 10**7))}
    forging(grid, lambda about, body: server_record(claim(about, body), body), "query.survey", times=1)
    out = tmp_path / "out"
    with pytest.raises(QuorumError, match=r"cannot begin: 0 of 3 sites .*site-1 reports 20,000,000"):
        server_app.serve(deployment(rounds=1), grid, "first", out)
    assert not (out / FILE).exists()
    server_app.serve(deployment(rounds=1), grid, "first", out)
    np.testing.assert_allclose(solution(out), simulated(NAME, 1).solution(), rtol=1e-12)


def test_another_order_of_splits_is_a_change():
    """An evaluation names splits by their place: a site would measure on other rows than the server reports."""
    rows, shapes = {"train": 5, "test": 4}, {"train": {}, "test": {}}
    then = DataSummary("site-1", rows, shapes, "data", "key")
    now = then._replace(counts=dict(reversed(rows.items())))
    assert now == then
    assert now.difference(then) == "the order of its splits: test, train then, train, test now"


def server_record(about, body):
    from fedstrata.deploy.flower.client_app import record

    return record(about, body)


def _claiming(survey, rows):
    found = json.loads(survey)
    found[1] = dict.fromkeys(found[1], rows)
    return found


def test_a_node_that_changes_its_name_is_one_site(grid, monkeypatch):
    """It takes the place of a site that restarts under one name, and then that of another."""
    grid.nodes.clear()
    grid.enter("north", summary_of("north", mark="n" * 32, number=0))
    south = grid.enter("south", summary_of("south", mark="s" * 32, number=1))
    count, bad = [0], {"train": {"x": ("float64", [9]), "y": ("float64", [])}}

    def evil(request):
        count[0] += 1
        if south in grid.nodes:  # columns that fit nobody's, so that everybody is asked again
            return summary_of("x", mark="e" * 32, number=2, shapes=bad)(request)
        return summary_of("xy"[count[0] % 2], mark="e" * 32, number=2)(request)

    grid.enter("evil", evil)
    after_polls(grid, 60, lambda: grid.nodes.pop(south))
    after_polls(grid, 400, lambda: grid.nodes.clear())  # nobody is left: the test ends
    grid.until = time.monotonic() + 20
    with pytest.raises(AssertionError, match="waits for ever"):
        server_app._connected(deployment(sites=3), grid, None, "first")
    assert count[0] > 2  # it was taken for "x" and asked again


@pytest.mark.parametrize("same", ["key", "mark"])
def test_two_nodes_with_one_identity_do_not_begin_a_run(same, grid, caplog):
    grid.nodes.clear()
    for number, name in enumerate(("north", "south", "west")):
        mark, key = (name * 8)[:32], f"key of {name}"
        if name != "north":
            mark, key = ("e" * 32 if same == "mark" else mark), ("one key" if same == "key" else key)
        grid.enter(name, summary_of(name, mark=mark, number=number, key=key))
    caplog.set_level("INFO", "fedstrata")
    after_polls(grid, 30, lambda: grid.leave("west"))
    grid.until = time.monotonic() + 3
    with pytest.raises(AssertionError, match="waits for ever"):
        server_app._connected(deployment(sites=3), grid, None, "first")
    assert f"the run waits: south and west have the same {same}: unregister one of them" in caplog.text


def test_the_terms_are_checked_with_the_largest_numbers_that_they_may_have(grid, monkeypatch):
    """Otherwise summaries could be just short enough to begin, and too long for every later start of the server."""
    seen = []
    encode = server_app.Terms.encode
    monkeypatch.setattr(server_app.Terms, "encode", lambda terms: seen.append(terms) or encode(terms))
    server_app._connected(deployment(), grid, None, "first", "a" * 64)
    assert {(t.program, t.rounds, t.evaluations) for t in seen} == {("a" * 64, 2**31 - 1, 2**31 - 1)}


@pytest.mark.parametrize(
    "name",
    ["site-1\ufe0f", "site-1\u3164", "site-1\u034f", "site-1 ", " site-1", "site  1", "site-1\n", "site-\uff11",
     "site-1; site-0: quarantined", "site-1:", "site-0,site-1", "", "a" * (LONGEST_NAME + 1), "site-\u200b1",
     "\ufb01n"],
)  # fmt: skip
def test_names_that_look_like_others_or_like_two_are_refused(name):
    row = json.loads(json.dumps(DataSummary.of("site-1", TASK.federation.select([1]))))
    with pytest.raises(ValueError, match=r"name of a site|site must be"):
        DataSummary.checked([name, *row[1:]])


@pytest.mark.parametrize("name", ["site-1", "Krankenhaus Köln-Nord (2)", "北京协和医院", "Ulm/2", "St. Mary's & Co."])
def test_names_that_people_have_are_accepted(name):
    check_plain_name("site", name)


def test_a_site_with_the_name_of_a_line_of_the_table_hides_nothing():
    by_site = {"mean over sites": {"train/auc": 9e9}, "north": {"train/auc": 1.0}}
    rows = {site: {"train": 5} for site in by_site}
    found = Summary(1, by_site, rows, {"train/auc": 5.0}, None, {}, {}, {})
    assert [line.split() for line in str(found).splitlines()[2:]] == [
        ["mean", "over", "sites", "9e+09"], ["north", "1"], ["mean", "over", "sites", "5"]
    ]  # fmt: skip


def test_the_shape_of_an_example_with_zeros_is_no_larger_than_without():
    row = json.loads(json.dumps(DataSummary.of("site-1", TASK.federation.select([1]))))
    for shape in ([2**31, 0, 2], [2**31, 2**31, 0]):
        row[2] = {"train": {"x": ["float64", shape]}}
        row[1] = {"train": 5}
        with pytest.raises(ValueError, match="larger than"):
            DataSummary.checked(row)


def test_honest_sites_still_begin(grid):
    found = server_app._connected(deployment(), grid, None, "first")[1]
    assert [summary[:3] for summary in found] == honest()
