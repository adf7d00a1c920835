"""A registered stranger, another node with a valid key, joins before a run begins."""

import logging

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attacked_runs import BAD, calls, check_log, gathered, honest
from grids import SITES, grid, hurry
from strangers import add_stranger, after_polls, kept_away, summary_of

from fedstrata.deploy.flower import roster

__all__ = ["grid", "hurry"]  # fixtures

NAMED = tuple(f"site-{number}" for number in range(SITES))
FORGERIES = ("no summary", "deep nesting", "a count: 2^63", "a name: a newline", "a pickle", "a text of 10 MB",
             "no token", "KeyError", "an error of Flower without anything")  # fmt: skip


@pytest.fixture
def info(caplog):
    """The whole log, as the server app shows it."""
    caplog.set_level(logging.INFO, "fedstrata")
    return caplog


@pytest.fixture
def talkative(monkeypatch):
    """The server says at every poll whom it waits for."""
    monkeypatch.setattr(roster, "PROGRESS", 0.0)
    monkeypatch.setattr(roster, "NEWS", 0.0)


@pytest.mark.parametrize("sites", [SITES, NAMED], ids=["by number", "by name"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_stranger_without_a_valid_summary_is_left_out(forgery, sites, grid, info):
    add_stranger(grid, forgery)
    assert gathered(grid, sites) == honest()
    check_log(info)
    assert calls(grid, "stranger", "query") <= 2


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_run_waits_for_its_sites_whatever_a_stranger_sends_at_every_query(forgery, grid, info):
    add_stranger(grid, forgery)
    after_polls(grid, 150, kept_away(grid, BAD))
    assert gathered(grid) == honest()
    assert 1 < calls(grid, "stranger", "query") < 20
    assert [calls(grid, site, "query") <= 2 for site in NAMED] == [True] * SITES
    check_log(info)
    assert sum("is left out: " in line and line.startswith("node") for line in info.messages) <= 1


def test_a_stranger_with_an_unknown_name_is_left_out_if_the_sites_are_named(grid, info):
    node = add_stranger(grid)
    assert gathered(grid, NAMED) == honest()
    why = "has no valid data summary and is left out: 'stranger' is not one of the run's sites"
    assert f"node {node} {why}" in info.messages


def test_a_stranger_beyond_the_number_of_sites_stops_the_beginning_until_it_is_unregistered(grid, info, talkative):
    add_stranger(grid)
    after_polls(grid, 50, lambda: grid.leave("stranger"))
    assert gathered(grid) == honest()
    told = next(line for line in info.messages if "the run waits" in line)
    assert "4 sites are connected, but 3 were expected: site-0, site-1, site-2, stranger; " in told
    assert 'unregister the others, or name the sites in the deployment: sites=("…", "…")' in told


@pytest.mark.parametrize("sites", [SITES, NAMED], ids=["by number", "by name"])
@pytest.mark.parametrize("first", ["the stranger", "the site"])
def test_a_stranger_with_a_sites_name_stops_the_beginning_until_it_is_unregistered(first, sites, grid, info, talkative):
    """Nobody can tell which of the two is right. The name is free again once the stranger has gone."""
    others = [kept_away(grid, BAD), kept_away(grid, "site-2")]
    stranger = grid.enter("stranger", summary_of(BAD, number=1))
    if first == "the site":
        del grid.nodes[stranger]
        others[0]()
        others[0] = lambda: grid.enter("stranger", summary_of(BAD, number=1))
    after_polls(grid, 10, others[0])
    after_polls(grid, 20, others[1])
    after_polls(grid, 60, lambda: grid.leave("stranger"))
    assert gathered(grid, sites) == honest()
    assert "stranger" not in [settings["site"] for _, settings in grid.nodes.values()]
    told = next(line for line in info.messages if line.startswith("the run waits: another site has the name 'site-1'"))
    assert "give it a different name, restore the folder, or unregister the node" in told


def test_a_stranger_with_other_columns_stops_the_beginning_until_it_is_unregistered(grid, info, talkative):
    """It has the name of the site that is missing."""
    back = kept_away(grid, BAD)
    grid.enter("stranger", summary_of(BAD, shapes={"train": {"x": ("float64", [4]), "y": ("float64", [])}}))
    after_polls(grid, 50, lambda: (grid.leave("stranger"), back()))
    assert gathered(grid) == honest()
    assert "the run waits: site-1 has other data than site-0: in split 'train', column 'x' is" in info.text


def test_the_server_says_at_most_once_a_minute_whom_it_waits_for(grid, info, monkeypatch):
    clock = [1000.0]
    moved = lambda seconds: clock.append(clock.pop() + 1.0)  # a sleep that takes no time, and moves the clock
    monkeypatch.setattr(roster, "time", type("time", (), {"monotonic": lambda: clock[0], "sleep": moved}))
    after_polls(grid, 1000, kept_away(grid, BAD))
    add_stranger(grid, "no summary")
    assert gathered(grid, NAMED) == honest()
    lines = [line for line in info.messages if line.startswith("2 of 3 sites are connected: site-0, site-2; node ")]
    minutes = (clock[0] - 1000.0) / 60
    assert minutes > 10
    assert minutes - 2 <= len(lines) <= minutes + 1
