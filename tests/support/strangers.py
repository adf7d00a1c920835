"""Registered strangers on the grid of `grids`: nodes with a valid key that belong to no site."""

import json

from forgeries import CONTENTS, EXCUSES, LOST, SUMMARIES, UNREADABLE
from grids import TASK

from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower.client_app import opened

FORGERIES = {**SUMMARIES, **CONTENTS, **EXCUSES, **LOST, **UNREADABLE}


def summary_of(name, mark="0" * 32, number=3, **changes):
    """What a stranger sends that knows the run's program: a valid summary."""
    found = DataSummary.of(name, TASK.federation.select([number]), key=f"key of {name}")._replace(**changes)
    return lambda request: {"survey": json.dumps(found), "mark": mark}


def add_stranger(grid, forgery=None, name="stranger"):
    """A stranger whose summary is valid, or forged at every query."""
    node, before = grid.enter(name, summary_of(name)), grid.forge
    if forgery is not None:
        forged = lambda content: FORGERIES[forgery](*opened(content))
        grid.forge = lambda kind, site, content: forged(content) if site == name else before(kind, site, content)
    return node


def after_polls(grid, polls, action):
    """Let something happen after the server has looked for nodes this often, counted from now."""
    real, count = grid.get_node_ids, iter(range(10**6))

    def listed():
        if next(count) == polls:
            action()
        return real()

    grid.get_node_ids = listed


def kept_away(grid, site):
    """Take a site's node from the grid; returns what brings it back."""
    number = next(number for number, (_, settings) in grid.nodes.items() if settings["site"] == site)
    node = grid.nodes.pop(number)
    return lambda: grid.nodes.update({number: node})
