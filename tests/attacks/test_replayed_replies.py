"""Old and foreign replies and data summaries, given to a server: it takes none, and the run goes on."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import RUN, VICTIM
from grids import deployment, missing

from fedstrata.deploy.flower.client_app import opened, record
from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.server import QuorumError


def stale_content(begun, forge_once, kinds=("train.phase0",)):
    """Replace one reply of the site in a later round by `forge_once(old content, new content)`."""
    seen, used = [], []

    def forge(kind, site, content):
        if site != VICTIM or kind not in kinds:
            return content
        seen.append(content)
        if len(seen) > 1 and not used:
            used.append(kind)
            return forge_once(seen[0], content)
        return content

    begun.grid.forge = forge
    return used


def with_token(old, new):
    """The old message with the token of the new call: only the site itself can do that."""
    return record({"call": opened(new)[0]["call"]}, opened(old)[1])


REPLIES = {
    "an old reply, with its token": (lambda old, new: old, None),
    "an old reply, with the new token": (with_token, "the reply is for"),
    "a reply of another run": (
        lambda old, new: relabelled(new, run="another"), "the reply is for",
    ),
    "a reply of another site": (lambda old, new: relabelled(new, site="site-2"), "the reply is for"),
    "a reply of another stage": (lambda old, new: relabelled(new, stage=Stage(2, 0, 0, 1)), "the reply is for"),
}  # fmt: skip


def relabelled(content, **changes):
    about, body = opened(content)
    return record(about, Message.decode(body)._replace(**changes).encode())


@pytest.mark.parametrize("reply", REPLIES)
def test_a_server_takes_no_old_or_foreign_reply(begun, expected, reply):
    forge, why = REPLIES[reply]
    used = stale_content(begun, forge)
    np.testing.assert_allclose(begun.serve(), expected, rtol=1e-12)
    assert used == ["train.phase0"]
    found = missing(begun.folder / "out" / RUN)
    assert found == {} if why is None else (list(found) == [(2, VICTIM)] and why in found[2, VICTIM])


def test_a_replayed_data_summary_does_not_make_another_node_the_site(begun, expected, tmp_path):
    """A stranger sends what a site once sent; the run waits for the site."""
    heard, called = [], []

    def forge(kind, site, content):
        if kind == "query.survey" and site == VICTIM:
            heard.append(content)
        return heard[0] if site == "stranger" and heard else content

    begun.grid.forge = forge
    begun.serve(rounds=2)
    assert heard
    begun.grid.leave(VICTIM)
    begun.grid.join(tmp_path / "stranger", 1, "stranger")

    def note(kind, site, answer):
        called.extend([kind] * (site == "stranger"))
        return answer()

    begun.grid.on_message = note
    begun.changes = {"deadline": 0.3}
    with pytest.raises(QuorumError):
        begun.serve()
    assert called
    assert set(called) == {"query.survey"}
    begun.grid.leave("stranger")
    begun.start()
    begun.changes = {}
    np.testing.assert_allclose(begun.serve(), expected, rtol=1e-12)


def test_a_copy_of_a_sites_name_without_its_mark_is_refused(begun, expected, tmp_path):
    begun.serve(rounds=2)
    begun.grid.leave(VICTIM)
    begun.grid.join(tmp_path / "copy", 1, VICTIM, deployment())
    begun.changes = {"deadline": 0.3}
    with pytest.raises(QuorumError):
        begun.serve()
    assert "another site has the name 'site-1'" in missing(begun.folder / "out" / RUN)[2, VICTIM]
    begun.grid.leave(VICTIM)
    begun.start()
    begun.changes = {}
    np.testing.assert_allclose(begun.serve(), expected, rtol=1e-12)


def test_no_site_learns_the_mark_of_another(begun):
    """Whoever has it could send that site's summary. The terms, which all sites receive, have a hash of it."""
    marks = [(begun.folder / f"site-{i}" / "mark").read_text() for i in range(3)]
    for number in range(3):
        kept = (begun.folder / f"site-{number}" / "runs" / RUN / "terms.json").read_text()
        assert not any(mark in kept for mark in marks)
        assert (begun.folder / f"site-{number}" / "secret").read_text() not in kept
