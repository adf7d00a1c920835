"""The server app: it finds the sites, runs the rounds of a deployment over Flower's grid, and keeps what they give."""

import json
import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstrata.files import replacing
from fedstrata.runtime.checkpoint import Checkpoints
from fedstrata.runtime.conductor import Conductor, Progress, QuorumError, Report
from fedstrata.runtime.flower.deployment import Deployment, resolve
from fedstrata.runtime.flower.haste import short_pulls
from fedstrata.runtime.flower.roster import Roster, over_grid
from fedstrata.runtime.outcome import keep_model
from fedstrata.runtime.survey import Survey, terms_of

UPLOAD = 15.0  # seconds after which a reply counts as lost of which parts are missing,
SLOWEST = 1e5  # and as many more as its bytes take at so many a second
ATTEMPTS = 3  # at a round for which too few sites answer, before the server gives up

log = logging.getLogger("fedstrata")


def server_app(where: str) -> ServerApp:
    """The server app of the deployment at "package.module:name"."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings, deployment = context.run_config, resolve(where)
        for name in ("sites", "rounds"):
            if asked := int(settings.get(name, 0)):
                deployment = deployment._replace(**{name: asked})
        _speak()
        serve(deployment, grid, str(settings["run"]), Path(str(settings["folder"])) / str(settings["run"]))

    return app


def serve(deployment: Deployment, grid: Grid, run: str, folder: Path) -> Progress:
    """All rounds of a run, from its last checkpoint on. Its state, reports, evaluations and model are in the folder."""
    store = Checkpoints(folder / "checkpoints")
    store.prepare(0)
    roster, surveys = _assembled(deployment, grid, folder / "sites.json")
    terms = terms_of(run, deployment.problem, deployment.algorithm, surveys, **deployment.options)
    names = tuple(s.site for s in surveys)
    short_pulls(UPLOAD + sum(a.nbytes for a in jax.tree.leaves(terms.x0)) / SLOWEST)
    link = over_grid(roster, names, deployment.deadline, json.dumps(surveys))
    with (folder / "reports.jsonl").open("a") as reports:
        conductor = Conductor(terms, names, link, deployment.quorum, _writer(reports, deployment.rounds))
        now = conductor.load(store)
        _spent(conductor)  # what it needs is found missing now, and not after the last round
        if now is None:
            now = _tried(conductor.begin)
            conductor.save(store, now)
        every = deployment.evaluate_every or deployment.rounds
        while now.round < deployment.rounds:
            now = _tried(partial(conductor.round, now))
            conductor.save(store, now)
            if now.round % every == 0 and now.round < deployment.rounds:
                _evaluate(deployment, conductor, now, folder)
        _evaluate(deployment, conductor, now, folder)
    about = {"run": run, "algorithm": type(deployment.algorithm).__name__, "rounds": now.round, **_spent(conductor)}
    keep_model(folder, deployment.problem, conductor.solution(now), about)
    return now


def _evaluate(deployment: Deployment, conductor: Conductor, now: Progress, folder: Path) -> None:
    found = conductor.evaluate(now, scores=deployment.scores)
    log.info("%s", found)
    with (folder / "evaluations.jsonl").open("a") as file:
        print(json.dumps(found.as_json() | _spent(conductor)), file=file)


def _spent(conductor: Conductor) -> dict[str, Any]:
    """What the run has cost its sites' privacy so far, for its files; nothing where it is not private."""
    if (spent := conductor.privacy()) is None:
        return {}
    log.info("%s", spent)
    epsilon = spent.epsilon if math.isfinite(spent.epsilon) else None
    return {"privacy": {"epsilon": epsilon, "delta": spent.delta, "exchanges": spent.exchanges}}


def _assembled(deployment: Deployment, grid: Grid, kept: Path) -> tuple[Roster, list[Survey]]:
    """The sites of the run, once they are here. Who they are, and their numbers, stays for the whole run."""
    if kept.exists():
        known = json.loads(kept.read_text())
        surveys = [Survey(*row) for row in known["surveys"]]
        roster = Roster(grid, known["marks"])
        roster.await_these([s.site for s in surveys], deployment.deadline)
        return roster, surveys
    roster = Roster(grid)
    surveys = roster.gather(deployment.sites)
    with replacing(kept) as path:
        path.write_text(json.dumps({"surveys": surveys, "marks": roster.marks}))
    return roster, surveys


def _tried(attempt: Callable[[], Progress]) -> Progress:
    for left in reversed(range(ATTEMPTS)):
        try:
            return attempt()
        except QuorumError as error:
            if not left:
                raise
            log.warning("%s; it is tried again", error)
    raise AssertionError


def _writer(file: Any, rounds: int) -> Callable[[Report], None]:
    def write(report: Report) -> None:
        log.info("%s", report)
        row = {"stage": list(report.stage), "of": rounds, "received": list(report.received), "missing": report.missing}
        print(json.dumps(row), file=file, flush=True)

    return write


def _speak() -> None:
    """What the run says goes where Flower's log goes, which `flwr run --stream` shows."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
