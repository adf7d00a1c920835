"""A server that has approved code and attacks a site; and a run in the middle of which it does."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import simulated
from grids import NAME, ROUNDS, SITES, Grid, deployment, in_a_hurry, missing, solution

import fedstrata as fs
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.flower.worker import Worker
from fedstrata.deploy.messages import EVALUATE, PROOF, Message, Stage, proof
from fedstrata.deploy.policy import Policy
from fedstrata.deploy.site import Site
from fedstrata.deploy.site_log import broken
from fedstrata.deploy.terms import Terms

RUN, VICTIM = "first", "site-1"


class Begun:
    """A run over three sites after one round, in a folder: the sites, the grid, and the honest server."""

    def __init__(self, folder, **changes):
        self.folder, self.changes, self.grid = Path(folder), changes, Grid()
        for number in range(SITES):
            self.start(number)

    def start(self, number=1, made=None, **settings):
        """Start the worker of a site, or start it again."""
        folder = self.folder / f"site-{number}"
        self.grid.leave(folder.name)
        node = self.grid.join(folder, number, made=made or deployment(**self.changes))
        self.grid.nodes[node][1].update(settings)

    def restart(self):
        """Start all workers again."""
        for number in range(SITES):
            self.start(number)

    def serve(self, rounds=ROUNDS, run=RUN, **given):
        """The honest server runs until there are so many rounds; returns the solution."""
        made = deployment(rounds=rounds, **self.changes)
        server_app.serve(made, self.grid, run, self.folder / "out" / run, **given)
        return solution(self.folder / "out" / run)

    def finishes(self, expected):
        """Whether the honest run continues to the simulated result, with all sites."""
        np.testing.assert_allclose(self.serve(), expected, rtol=1e-12)
        assert missing(self.folder / "out" / RUN) == {}
        assert broken(self.victim / "log.jsonl") == ""
        return True

    @property
    def victim(self):
        """The state folder of the site that is attacked."""
        return self.folder / VICTIM

    def close(self):
        for worker in self.grid.workers.values():
            worker.close()


class Attacker:
    """A server that sends what it likes to one site. It knows everything that the honest server knows."""

    def __init__(self, terms, victim, mark):
        self.terms, self.victim, self.mark = terms, victim, mark
        self.own = terms.sites[terms.number(VICTIM)]

    @classmethod
    def of(cls, begun):
        """The attacker of a run that has begun."""
        kept = json.loads((begun.folder / "out" / RUN / "sites.json").read_text())
        terms = Terms(RUN, tuple(DataSummary.checked(row) for row in kept["surveys"]), "1", ROUNDS, 2, kept["origin"])
        victim = lambda: next(found for found in begun.grid.nodes.values() if found[1]["site"] == VICTIM)
        return cls(terms, victim, kept["marks"][VICTIM])

    @classmethod
    def alone(cls, folder, made, **settings):
        """The attacker of one site, in a run whose other sites it has made up."""
        worker, settings = Worker(made, Path(folder), "1"), {"site": VICTIM, "number": 1, **settings}
        about, _ = worker.answer({"kind": "query.survey", "settings": settings, "about": {}}, b"")
        own = DataSummary.decode(about["survey"])
        made_up = [own._replace(site=f"made up {i}", key=str(i), data="") for i in range(2)]
        terms = Terms(RUN, (own, *made_up), "1", made.rounds, made.evaluations)
        return cls(terms, lambda: (worker, settings), about["mark"])

    def sends(self, call, **about):
        """The site's reply to a call with a proof; `about` has the terms or their digest, by default the right ones."""
        worker, settings = self.victim()
        about = about or {"terms": self.terms}
        about = {name: value.encode() if isinstance(value, Terms) else value for name, value in about.items()}
        body = call if isinstance(call, bytes) else call.encode()
        about = {PROOF: proof(self.mark, about, body), **about}
        request = {"kind": "train.phase0", "code": "1", "settings": settings, "about": about}
        return Message.decode(worker.answer(request, body)[1])

    def evaluates(self, x=0.0, round=1, scores=(), **about):
        """The site's reply to an evaluation at a point."""
        places = np.array(scores, np.int32)
        arrays = {"x.tree": np.full(3, float(x)), "splits": np.zeros(1, np.int32), "scores": places}
        return self.sends(Message(RUN, Stage(round, EVALUATE), VICTIM, arrays), **about)

    def with_site(self, name, **changes):
        """The terms with some entries of one site replaced."""
        change = lambda site: site._replace(**changes) if site.site == name else site
        return self.terms._replace(sites=tuple(map(change, self.terms.sites)))


def averaging(rows=((1.0, 2.0, 3.0), (4.0, 5.0, 7.0)) * 3, **options):
    """A deployment that sends means: FedAvg with one step of size 1/2 on (w - row)²/2 goes half the way to the mean."""
    problem = fs.Average(lambda w, example: 0.5 * (w - example["x"]) @ (w - example["x"]))
    data = fs.Federation.from_clients([{"x": np.array(rows)}], names=[VICTIM])
    options = {"params": np.zeros(3), "batch_size": "all", **options}
    return Deployment(problem, fs.FedAvg(0.5, 1), lambda settings: data, 3, 3, options)


def call_of(round=1, x=0.0, stage=None, after=(0, 0), run=RUN, site=VICTIM, **arrays):
    """A call for a round of SCAFFOLD at some point."""
    arrays = {
        f"{name}.tree": value
        for name, value in {"x": x * np.ones(3) if np.ndim(x) == 0 else x, "c": np.zeros(3), **arrays}.items()
    }
    return Message(run, stage or Stage(round, 0), site, arrays, Stage(*after) if after else None)


def begin_call(run=RUN):
    """The first call of a run."""
    return Message(run, Stage(-1, 0), VICTIM, {})


def files_in(folder):
    """By path, a hash of every file in a folder but its log."""
    paths = (path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name != "log.jsonl")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def log_of(folder):
    """The lines of a site's log."""
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def worked(monkeypatch):
    """The calls on which sites have worked, as (site, stage)."""
    found = []

    def noted(work):
        return lambda site, call: (found.append((site.name, call.stage)), work(site, call))[1]

    for name in ("_begin", "_work", "_evaluate"):
        monkeypatch.setattr(Site, name, noted(getattr(Site, name)))
    return found


class Stopped(Exception):
    """The server ends in the middle of a run."""


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory):
    """A folder with a run whose server ended after one round, which tests copy."""
    folder, patch, seen = tmp_path_factory.mktemp("begun"), pytest.MonkeyPatch(), []
    in_a_hurry(patch)
    made = Begun(folder)

    def stop(kind, site, answer):
        seen.append(kind)
        if seen.count("train.phase0") > SITES:
            raise Stopped
        return answer()

    made.grid.on_message = stop
    with pytest.raises(Stopped):
        made.serve()
    made.close()
    patch.undo()
    return folder


@pytest.fixture
def begun(begun_once, tmp_path, hurry):
    """A run after one round, whose workers have just been started again."""
    shutil.copytree(begun_once, tmp_path, dirs_exist_ok=True)
    made = Begun(tmp_path)
    yield made
    made.close()


@pytest.fixture
def attacker(begun):
    return Attacker.of(begun)


@pytest.fixture(scope="module")
def expected():
    """What the simulated run comes to."""
    return simulated(NAME, ROUNDS).solution()


@pytest.fixture
def refuses(begun, worked):
    """A function that lets the attacker send something, and checks that the site refuses it and does nothing else."""

    def check(send, why, finds=None):
        before, lines = files_in(begun.victim), len(log_of(begun.victim))
        with pytest.raises(Exception, match=why) as error:
            send()
        text = str(error.value)
        assert "\n" not in text
        assert len(text) < 700
        assert type(error.value).__module__.startswith(("fedstrata", "builtins"))
        assert isinstance(error.value, ValueError | RuntimeError), type(error.value)
        assert worked == []
        assert files_in(begun.victim) == before
        new = log_of(begun.victim)[lines:]
        assert [line["verdict"] for line in new if "verdict" in line] == ["refused"]
        assert new[-1]["why"][:200] == text[:200]
        return error.value

    return check


def limit(begun, **entries):
    """The owner of the site writes a policy."""
    Policy(**entries).keep_in(begun.victim)
