"""The server app: it finds the sites, runs a deployment over Flower's grid, and writes the results to a folder."""

import json
import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedstrata.base.files import replacing
from fedstrata.deploy.agreement import DataSummary, agree
from fedstrata.deploy.flower.deployment import Deployment, resolve
from fedstrata.deploy.flower.grid_link import grid_link
from fedstrata.deploy.flower.patches import short_pulls
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.link import Report
from fedstrata.deploy.server import QuorumError, Server, ServerState
from fedstrata.engine.checkpoint import Checkpoints
from fedstrata.engine.saving import keep_model

UPLOAD = 15.0  # seconds after which a reply with missing parts counts as lost,
SLOWEST = 1e5  # plus its bytes divided by this rate in bytes per second
ATTEMPTS = 3  # at a round without a quorum, before the server gives up

log = logging.getLogger("fedstrata")


def server_app(where: str) -> ServerApp:
    """The server app of a deployment.

    Args:
        where: the deployment, "package.module:name".
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings, deployment = context.run_config, resolve(where)
        for name in ("sites", "rounds"):
            if given := int(settings.get(name, 0)):
                deployment = deployment._replace(**{name: given})
        _log_to_stdout()
        serve(deployment, grid, str(settings["run"]), Path(str(settings["folder"])) / str(settings["run"]))

    return app


def serve(deployment: Deployment, grid: Grid, run: str, folder: Path) -> ServerState:
    """Run all rounds, from the last checkpoint if there is one; returns the last state.

    Args:
        deployment: what to run.
        grid: Flower's grid.
        run: the run's name.
        folder: where checkpoints, reports, evaluations and the model are written.
    """
    store = Checkpoints(folder / "checkpoints")
    store.prepare(0)
    roster, summaries = _connected(deployment, grid, folder / "sites.json")
    agreement = agree(run, deployment.problem, deployment.algorithm, summaries, **deployment.options)
    names = tuple(summary.site for summary in summaries)
    short_pulls(UPLOAD + sum(a.nbytes for a in jax.tree.leaves(agreement.x0)) / SLOWEST)
    link = grid_link(roster, names, deployment.deadline, json.dumps(summaries))
    with (folder / "reports.jsonl").open("a") as reports:
        on_report = _report_writer(reports, deployment.rounds)
        server = Server(agreement, names, link, quorum=deployment.quorum, on_report=on_report)
        now = server.load(store)
        _spent(server)  # fails now, and not after the last round, if the accounting package is missing
        if now is None:
            now = _with_retries(server.begin)
            server.save(store, now)
        every = deployment.evaluate_every or deployment.rounds
        while now.round < deployment.rounds:
            now = _with_retries(partial(server.round, now))
            server.save(store, now)
            if now.round % every == 0 and now.round < deployment.rounds:
                _evaluate(deployment, server, now, folder)
        _evaluate(deployment, server, now, folder)
    info = {"run": run, "algorithm": type(deployment.algorithm).__name__, "rounds": now.round, **_spent(server)}
    keep_model(folder, deployment.problem, server.solution(now), info)
    return now


def _evaluate(deployment: Deployment, server: Server, now: ServerState, folder: Path) -> None:
    summary = server.evaluate(now, scores=deployment.scores)
    log.info("%s", summary)
    with (folder / "evaluations.jsonl").open("a") as file:
        print(json.dumps(summary.as_json() | _spent(server)), file=file)


def _spent(server: Server) -> dict[str, Any]:
    """The privacy spent so far, as JSON values; nothing if the run is not private."""
    if (spent := server.privacy()) is None:
        return {}
    log.info("%s", spent)
    epsilon = spent.epsilon if math.isfinite(spent.epsilon) else None
    return {"privacy": {"epsilon": epsilon, "delta": spent.delta, "exchanges": spent.exchanges}}


def _connected(deployment: Deployment, grid: Grid, file: Path) -> tuple[Roster, list[DataSummary]]:
    """The sites of the run, once they are connected. The file fixes their names and numbers for the whole run."""
    if file.exists():
        saved = json.loads(file.read_text())
        summaries = [DataSummary(*row) for row in saved["surveys"]]
        roster = Roster(grid, saved["marks"])
        roster.wait_for([summary.site for summary in summaries], deployment.deadline)
        return roster, summaries
    roster = Roster(grid)
    summaries = roster.gather(deployment.sites)
    with replacing(file) as path:
        path.write_text(json.dumps({"surveys": summaries, "marks": roster.marks}))
    return roster, summaries


def _with_retries(attempt: Callable[[], ServerState]) -> ServerState:
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except QuorumError as error:
            log.warning("%s; trying again", error)
    return attempt()


def _report_writer(file: TextIO, rounds: int) -> Callable[[Report], None]:
    def write(report: Report) -> None:
        log.info("%s", report)
        row = {"stage": list(report.stage), "of": rounds, "received": list(report.received), "missing": report.missing}
        print(json.dumps(row), file=file, flush=True)

    return write


def _log_to_stdout() -> None:
    """Log to where Flower logs, which `flwr run --stream` shows."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
