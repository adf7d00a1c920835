"""Runs over the grid of `grids` in which somebody forges messages, and what must be true of their files and logs."""

import collections
import contextlib
import json
import math
import os
import pickle

import numpy as np
import pytest
from flwr.app import Array
from forgeries import FORGED
from grids import SITES, TASK, Grid, deployment, in_a_hurry

from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.client_app import opened, record

BAD, RUN = "site-1", "first"
LONGEST_LINE = 4000  # characters of a line about three sites


def forging(grid, forgery, kinds, times=math.inf, site=BAD):
    """Let a site forge its first replies of each of these kinds."""
    done = collections.Counter()

    def forge(kind, name, content):
        if name != site or not kind.startswith(kinds) or done[kind] >= times:
            return content
        done[kind] += 1
        return forgery(*opened(content))

    grid.forge = forge
    return done


def on_bytes(forgery):
    """A forgery of a reply's bytes as one of its content."""
    return lambda about, body: record(about, forgery(body))


@contextlib.contextmanager
def no_parser():
    """Nothing that sites send may reach a parser of array files or pickles."""

    seen = []

    def never(*given, **more):
        seen.append(given)
        raise AssertionError("a parser has seen what a site sent")  # which a server may take for a malformed reply

    with pytest.MonkeyPatch.context() as patch:
        for holder, name in ((np, "load"), (np.lib.format, "read_array"), (pickle, "loads"), (Array, "numpy")):
            patch.setattr(holder, name, never)
        yield
    assert seen == []


def served(grid, folder, **changes):
    """The parameters of a run."""
    with no_parser():
        server_app.serve(deployment(**changes), grid, RUN, folder)
    return solution(folder)


def joined(folder, **changes):
    """A grid of three honest sites, with other settings than the usual ones."""
    found = Grid()
    for number in range(SITES):
        found.join(folder / f"site-{number}", number, made=deployment(**changes))
    return found


def result_without_it(folder, rounds):
    """The parameters of a run in which the bad site takes part in the start, and in no round."""
    with pytest.MonkeyPatch.context() as patch:
        in_a_hurry(patch)
        grid = joined(folder)
        grid.on_message = lambda kind, site, answer: None if (kind[:5], site) == ("train", BAD) else answer()
        return served(grid, folder / "out", rounds=rounds, quorum=0.6, deadline=0.2)


def gathered(grid, sites=SITES):
    """The names, sizes and columns of a run's sites, once they are connected."""
    with no_parser():
        found = server_app._connected(deployment(sites=sites), grid, None, RUN)[1]
    return [summary[:3] for summary in found]


def honest(*numbers):
    """What `gathered` returns if only these sites are connected, and honest."""
    return [DataSummary.of(f"site-{i}", TASK.federation.select([i]))[:3] for i in numbers or range(SITES)]


def solution(folder):
    """The parameters that a run has written, which must be finite."""
    found = np.load(folder / "solution.npz")["params"]
    assert np.all(np.isfinite(found))
    return found


def reasons(folder, site=BAD):
    """Why a site was missing, exchange by exchange."""
    rows = [json.loads(line) for line in (folder / "reports.jsonl").read_text().splitlines()]
    return [row["missing"][site] for row in rows if site in row["missing"]]


def check_lines(folder, caplog):
    """Whatever sites sent: files and logs have short lines of printable characters, and nobody has forged one."""
    status = json.loads((folder / "status.json").read_text())
    told = [entry["why_missing"] or "" for entry in status["sites"].values()]
    told += [why for line in (folder / "reports.jsonl").read_text().splitlines() for why in texts(json.loads(line))]
    assert [line for line in told if not line.isprintable()] == []
    for name in ("reports.jsonl", "status.json", "evaluations.jsonl"):
        assert max(map(len, (folder / name).read_text().splitlines())) < LONGEST_LINE
    check_log(caplog)


def check_log(caplog):
    """Lines of the log are short and printable, and nobody has forged one."""
    told = [line for message in caplog.messages for line in message.split("\n")]
    assert [line for line in told if not line.isprintable() or len(line) > LONGEST_LINE] == []
    assert [line for line in told if line.startswith(FORGED)] == []
    assert not os.path.exists("unpickled")


def texts(value):
    """All texts inside JSON values."""
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in texts(one)]
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


def calls(grid, site=BAD, kinds=("query.begin", "train", "evaluate")):
    """How often a site was called."""
    return sum(name == site and kind.startswith(kinds) for kind, name in grid.asked)
