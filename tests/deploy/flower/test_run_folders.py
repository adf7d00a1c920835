"""Two runs whose names are alike keep their state at a site in different folders."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import Attacker, begin_call, call_of
from grids import deployment

from fedstrata.deploy.site_store import run_folder

ROUNDS = 3


def calls_of(run, x):
    """The calls of a run, whose points start at x."""
    begun = [call_of(0, x, after=(-1, 0), run=run)]
    return [begin_call(run), *begun, *(call_of(n, x + n, after=(n - 1, 0), run=run) for n in range(1, ROUNDS))]


def replies_of(folder, runs):
    """By run, the replies of a new site to the calls of several runs, in turn; its worker restarts after each turn."""
    folder.mkdir()
    found = {run: [] for run in runs}
    for turn in range(ROUNDS + 1):
        attacker = Attacker.alone(folder, deployment())
        for run, x in runs.items():
            reply = attacker.sends(calls_of(run, x)[turn], terms=attacker.terms._replace(run=run))
            found[run].append(reply.arrays)
        attacker.victim()[0].close()
    return found


@pytest.mark.parametrize(("one", "other"), [("a.b", "a_b"), ("Run.1", "run_1")])
def test_two_runs_with_names_that_are_alike_do_not_share_state(tmp_path, one, other):
    """Each has the replies that it has at a site without the other. The method has local fields."""
    runs = {one: 0.0, other: 1.0}
    together = replies_of(tmp_path / "together", runs)
    alone = {run: replies_of(tmp_path / f"alone-{n}", {run: x})[run] for n, (run, x) in enumerate(runs.items())}
    for run in runs:
        for found, expected in zip(together[run], alone[run], strict=True):
            assert found.keys() == expected.keys()
            for name in found:
                np.testing.assert_array_equal(found[name], expected[name])
    differ = [np.any(together[one][-1][name] != together[other][-1][name]) for name in together[one][-1]]
    assert any(differ)  # so that a shared folder would have changed the replies
    folders = {path.name for path in (tmp_path / "together" / "runs").iterdir()}
    assert folders == {run_folder(one), run_folder(other)}
    assert len({name.casefold() for name in folders}) == 2
