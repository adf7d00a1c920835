"""The server app: it finds the sites, runs a deployment over Flower's grid, and writes the results to a folder."""

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from fedstrata.base.files import replacing
from fedstrata.core.fingerprint import differences
from fedstrata.deploy.data_summary import DataSummary, versions
from fedstrata.deploy.flower.client_app import code_of
from fedstrata.deploy.flower.deployment import Deployment, agree_on, resolve, settings_of
from fedstrata.deploy.flower.grid_link import grid_link
from fedstrata.deploy.flower.patches import short_pulls
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.flower.run_lock import only_server, reported, write_status
from fedstrata.deploy.link import Report
from fedstrata.deploy.server import QuorumError, Server, ServerState
from fedstrata.deploy.terms import Terms, check_name
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints
from fedstrata.engine.saving import keep_model

UPLOAD = 15.0  # seconds after which a reply with missing parts counts as lost,
SLOWEST = 1e5  # plus its bytes divided by this rate in bytes per second
SITES = "sites.json"  # the file of a run's sites, settings and versions
ENDING = 10.0  # seconds that the server app of a SuperLink that was killed may take to end
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
        os.umask(0o077)  # whatever is written below belongs to the owner of this process alone
        settings, run, flower_run = context.run_config, str(context.run_config["run"]), str(TaskIdentity.run_id)
        check_name(run)
        folder = Path(str(settings["folder"])) / run
        about = {"flower_run": flower_run}
        with only_server(folder, about, ENDING), reported(folder, run=run, **about):
            deployment = resolve(where)
            for name in ("sites", "rounds"):
                if given := int(settings.get(name, 0)):
                    deployment = deployment._replace(**{name: given})
            new_code = bool(settings.get("new-code", False))
            _log_to_stdout()
            serve(deployment, grid, run, folder, program=code_of(where).split()[-1], new_code=new_code)

    return app


def serve(
    deployment: Deployment, grid: Grid, run: str, folder: Path, *, program: str = "1", new_code: bool = False
) -> ServerState:
    """Run all rounds, from the last checkpoint if there is one; returns the last state.

    Args:
        deployment: what to run.
        grid: Flower's grid.
        run: the run's name.
        folder: where checkpoints, reports, evaluations and the model are written.
        program: a hash of the app's code.
        new_code: whether a run may continue with other code, as long as its settings are the same.

    Raises:
        CheckpointError: the folder has a run with other settings, versions or code.
    """
    check_name(run)
    store = Checkpoints(folder / "checkpoints")
    store.prepare(0)
    begun = _begun(deployment, folder / SITES, program, new_code)
    roster, summaries = _connected(deployment, grid, folder / SITES, begun, program)
    agreement = agree_on(deployment, run, summaries)
    names = tuple(summary.site for summary in summaries)
    short_pulls(UPLOAD + sum(a.nbytes for a in jax.tree.leaves(agreement.x0)) / SLOWEST)
    every = deployment.evaluate_every or deployment.rounds
    terms = Terms(run, tuple(summaries), program, deployment.rounds, deployment.evaluations)
    link = grid_link(roster, names, deployment.deadline, terms)
    with (folder / "reports.jsonl").open("a") as reports:
        server = Server(agreement, names, link, quorum=deployment.quorum)
        status = _Status(folder, server, deployment.rounds)
        server.on_report = _report_writer(reports, deployment.rounds, status)
        now = server.load(store)
        _spent(server)  # fails now, and not after the last round, if the accounting package is missing
        status.write(now.round if now else 0)
        if now is None:
            now = _with_retries(server.begin)
            server.save(store, now)
        while now.round < deployment.rounds:
            now = _with_retries(partial(server.round, now))
            server.save(store, now)
            status.write(now.round)
            if now.round % every == 0 and now.round < deployment.rounds:
                _evaluate(deployment, server, now, folder)
        _evaluate(deployment, server, now, folder)
    info = {"run": run, "algorithm": type(deployment.algorithm).__name__, "rounds": now.round, **_spent(server)}
    keep_model(folder, deployment.problem, server.solution(now), info)
    return now


class _Status:
    """The run's status.json, for `fedstrata deploy status`."""

    def __init__(self, folder: Path, server: Server, rounds: int):
        self.folder, self.server, self.rounds = folder, server, rounds
        self.sites: dict[str, dict[str, Any]] = {name: {"last": None, "why_missing": None} for name in server.names}

    def see(self, report: Report) -> None:
        """Remember which sites replied, and why others did not."""
        for name in report.received:
            self.sites[name] = {"last": list(report.stage), "why_missing": None}
        for name, why in report.missing.items():
            self.sites[name]["why_missing"] = why

    def write(self, round: int) -> None:
        out = self.server.caller.quarantined
        sites = {name: {**entry, "quarantined": out(name) or None} for name, entry in self.sites.items()}
        spent = self.server.privacy()
        epsilon = spent.epsilon if spent is not None and math.isfinite(spent.epsilon) else None
        write_status(self.folder, state="running", round=round, rounds=self.rounds, sites=sites, epsilon=epsilon)


def _begun(deployment: Deployment, file: Path, program: str, new_code: bool) -> dict[str, Any]:
    """What is known of a run that has begun; refuses to continue it with other settings, versions or code."""
    if not file.exists():
        return {}
    saved = json.loads(file.read_text())
    changed = differences(saved.get("settings", {}), settings_of(deployment))
    changed += differences(saved.get("versions", {}), versions())
    if not new_code and saved.get("program") != program:
        code = f"the app's code: saved {saved.get('program')!r}, now {program!r}"
        changed += [f"{code} (if it computes the same, resume with --new-code)"]
    if changed:
        raise CheckpointError(
            f"the run in {file.parent} cannot be resumed with other settings:\n  " + "\n  ".join(changed) + "\n"
            "resume it as it was, or start a new run with another --name"
        )
    return saved


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


def _connected(
    deployment: Deployment, grid: Grid, file: Path, begun: dict[str, Any], program: str
) -> tuple[Roster, list[DataSummary]]:
    """The sites of the run, once they are connected. The file fixes their names and numbers for the whole run."""
    fits = lambda *summaries: agree_on(deployment, "", summaries)
    if begun:
        summaries = [DataSummary.checked(row) for row in begun["surveys"]]
        roster = Roster(grid, begun["marks"], summaries, fits)
        roster.wait_for([summary.site for summary in summaries], deployment.deadline)
    else:
        roster = Roster(grid, check=fits)
        summaries = roster.gather(deployment.sites)
    marks = {summary.site: roster.marks[summary.site] for summary in summaries}
    about = {"settings": settings_of(deployment), "versions": versions(), "program": program}
    with replacing(file) as path:
        path.write_text(json.dumps({"surveys": summaries, "marks": marks, **about}))
    return roster, summaries


def _with_retries(attempt: Callable[[], ServerState]) -> ServerState:
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except QuorumError as error:
            log.warning("%s; trying again", error)
    return attempt()


def _report_writer(file: TextIO, rounds: int, status: _Status) -> Callable[[Report], None]:
    def write(report: Report) -> None:
        status.see(report)
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
