"""The server app: it finds the sites, runs a deployment over Flower's grid, and writes the results to a folder."""

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from fedstrata.base.memory import machine_memory
from fedstrata.base.text import listed
from fedstrata.deploy.agreement import Agreement
from fedstrata.deploy.data_summary import DataSummary, versions
from fedstrata.deploy.evaluation.request import Request
from fedstrata.deploy.flower.client_app import code_of
from fedstrata.deploy.flower.deployment import Deployment, agree_on, check_deployment, resolve, settings_of
from fedstrata.deploy.flower.grid_link import grid_link
from fedstrata.deploy.flower.patches import limited_pulls
from fedstrata.deploy.flower.roster import Roster
from fedstrata.deploy.flower.run_lock import only_server, read_status, reported, write_status
from fedstrata.deploy.flower.sites_file import FILE, REMEDY, Begun, Program, origin_of
from fedstrata.deploy.link import Report
from fedstrata.deploy.magnitudes import largest
from fedstrata.deploy.server import DivergedError, QuorumError, Server, ServerState
from fedstrata.deploy.terms import Terms, check_name
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints
from fedstrata.engine.codec import BYTES
from fedstrata.engine.saving import keep_model

UPLOAD = 15.0  # seconds after which a reply with missing parts counts as lost,
SLOWEST = 1e5  # plus its bytes divided by this rate in bytes per second
ENDING = 10.0  # seconds that the server app of a SuperLink that was killed may take to end
ROW = 16  # bytes of a row's score and label in a reply, at most
MOST = 2**31 - 1  # rounds or evaluations
ATTEMPTS = 3  # at a round without a quorum or with numbers that are not finite, before the server gives up

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
        about: dict[str, Any] = {"flower_run": flower_run}
        if rounds := int(settings.get("rounds", 0)):
            about |= {"wanted_rounds": rounds}
        with only_server(folder, about, ENDING), reported(folder, run=run, **about):
            deployment = _as_wanted(resolve(where), settings, folder)
            new_code = bool(settings.get("new-code", False))
            _log_to(folder)
            serve(deployment, grid, run, folder, program=code_of(where).split()[-1], new_code=new_code)

    return app


def _as_wanted(deployment: Deployment, settings: Mapping[str, Any], folder: Path) -> Deployment:
    """The deployment with the sites and rounds of the command; a run that has begun keeps those that it had."""
    begun, rounds = Begun.read(folder / FILE), read_status(folder).get("wanted_rounds")
    if isinstance(rounds, int) and rounds >= 1:
        deployment = deployment._replace(rounds=rounds)
    if begun is not None and isinstance(deployment.sites, int):
        deployment = deployment._replace(sites=len(begun.summaries))
    given = {name: int(settings.get(name, 0)) for name in ("sites", "rounds")}
    return deployment._replace(**{name: value for name, value in given.items() if value})


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
        CheckpointError: the folder has a run with other settings, versions or code, or is damaged.
        QuorumError: too few sites replied, also when a round was repeated.
        DivergedError: numbers are not finite. Nothing of them was saved.
    """
    check_name(run)
    check_deployment(deployment)
    store = Checkpoints(folder / "checkpoints", "`fedstrata deploy run` with the same --name")
    store.prepare(0)
    mine, begun = Program(settings_of(deployment), versions(), program), Begun.read(folder / FILE)
    if begun is not None:
        begun.program.check(mine, folder, new_code)
        if deployment.site_count != (count := len(begun.summaries)):
            raise CheckpointError(
                f"the run in {folder} has {count} sites, and now {deployment.site_count} are wanted: resume it with as "
                "many, or start a new run (another --name)"
            )
    elif store.rounds():
        raise CheckpointError(f"{folder / FILE} is missing, and the run has begun; {REMEDY}")
    roster, summaries = _connected(deployment, grid, begun, run, program, lambda why: write_status(folder, why=why))
    agreement = agree_on(deployment, run, summaries)
    Request.of(agreement, None, deployment.scores)  # fails now, and not after the last round
    names = tuple(summary.site for summary in summaries)
    origin = origin_of(folder) if begun is None else begun.origin
    terms = Terms(run, tuple(summaries), program, deployment.rounds, deployment.evaluations, origin)
    link = grid_link(roster, names, deployment.deadline, terms)
    record = Begun(summaries, {summary.site: roster.marks[summary.site] for summary in summaries}, mine, origin)
    if begun is None:
        record.write(folder / FILE)
    most = _largest_reply(agreement, deployment.scores)
    # A site that never finishes its upload must not keep the others' from being read.
    longest = min(UPLOAD + most / SLOWEST, deployment.deadline / 4)
    roster.replies.limit = lambda call: limited_pulls(most, longest)
    every = deployment.evaluate_every or deployment.rounds
    with _appended(folder / "reports.jsonl") as reports:
        server = Server(agreement, names, link, quorum=deployment.quorum)
        status = _Status(folder, server, deployment.rounds)
        server.on_report = _report_writer(reports, deployment.rounds, status)
        server.accountant.keep_in(folder, begun=bool(store.rounds()))
        now = server.load(store)
        if now is not None and now.round > deployment.rounds:
            raise ValueError(
                f"the run has {now.round} rounds already, and {deployment.rounds} are wanted: give as many"
            )
        _spent(server)  # fails now, and not after the last round, if the accounting package is missing
        status.write(now.round if now else 0)
        if now is None:
            try:
                now = _with_retries(server.begin)
            except (QuorumError, DivergedError):
                (folder / FILE).unlink()  # the run has not begun: a site that was wrong about itself may be corrected
                raise
            server.save(store, now)
        while now.round < deployment.rounds:
            now = _with_retries(partial(server.round, now))
            server.save(store, now)
            if begun != record:
                record.write(folder / FILE)  # new code, which the sites have accepted
                begun = record
            status.write(now.round)
            if now.round % every == 0 and now.round < deployment.rounds:
                _evaluate(deployment, server, now, folder)
        _evaluate(deployment, server, now, folder)
    if not math.isfinite(largest(server.solution(now))):
        raise DivergedError(f"the solution after {now.round} rounds is not finite; it is not saved")
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
        if report.missing:
            self.write(max(report.stage.round, 0))

    def write(self, round: int) -> None:
        out = self.server.caller.quarantined
        sites = {name: {**entry, "quarantined": out(name) or None} for name, entry in self.sites.items()}
        write_status(self.folder, state="running", round=round, rounds=self.rounds, sites=sites, why=None)


def _evaluate(deployment: Deployment, server: Server, now: ServerState, folder: Path) -> None:
    summary = server.evaluate(now, scores=deployment.scores)
    log.info("%s", summary)
    with _appended(folder / "evaluations.jsonl") as file:
        print(json.dumps(summary.as_json() | _spent(server)), file=file)


def _spent(server: Server) -> dict[str, Any]:
    """The privacy spent so far, as JSON values; nothing if the run is not private."""
    if (spent := server.privacy()) is None:
        return {}
    log.info("%s", spent)
    epsilon = spent.epsilon if math.isfinite(spent.epsilon) else None
    return {"privacy": {"epsilon": epsilon, "delta": spent.delta, "exchanges": spent.exchanges}}


def _connected(
    deployment: Deployment,
    grid: Grid,
    begun: Begun | None,
    run: str,
    program: str = "1",
    on_wait: Callable[[str], None] = lambda why: None,
) -> tuple[Roster, Sequence[DataSummary]]:
    """The sites of the run, once they are connected. A run that has begun keeps its sites and their numbers."""

    def check(*summaries: DataSummary) -> None:
        _check_memory(agree_on(deployment, "", summaries), summaries)
        Terms(run, summaries, program, MOST, MOST).encode()

    if begun is None:
        roster = Roster(grid, check=check, on_wait=on_wait)
        summaries = roster.gather(deployment.sites)
        _compare_versions(summaries)
        return roster, summaries
    roster = Roster(grid, begun.marks, begun.summaries, check, on_wait)
    roster.wait_for([summary.site for summary in begun.summaries], deployment.deadline)
    return roster, begun.summaries


def _check_memory(agreement: Agreement, summaries: Sequence[DataSummary]) -> None:
    """Refuse rows for which the server would need most of its memory: a site may claim any number of them."""
    need, here = agreement.state_bytes(), machine_memory()
    if need > here // 2:
        rows, site = max((max(summary.counts.values()), summary.site) for summary in summaries)
        raise ValueError(
            f"the state of the run would take {need / 1e9:,.1f} GB of memory here, and this machine has "
            f"{here / 1e9:,.1f} GB; {site} reports {rows:,} rows. If that is right, choose a (smaller) pool_size"
        )


def _largest_reply(agreement: Agreement, scores: Sequence[str]) -> int:
    """The most bytes of arrays in a reply: of an exchange, or of an evaluation in which rows send their scores."""
    rows = sum(max(agreement.rows[split]) for split in scores)
    return min(agreement.largest("up") + ROW * rows, BYTES)


def _compare_versions(summaries: Sequence[DataSummary]) -> None:
    """Log how the versions of the sites of a new run differ: their numbers may do so in the last digits."""
    for name in sorted({name for summary in summaries for name in summary.versions}):
        found = {summary.site: summary.versions.get(name, "none") for summary in summaries}
        if len(set(found.values())) > 1:
            log.warning("sites have different versions of %s: %s", name, listed([f"{s} {v}" for s, v in found.items()]))


def _with_retries(attempt: Callable[[], ServerState]) -> ServerState:
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except (QuorumError, DivergedError) as error:
            log.warning("%s; trying again", error)
    return attempt()


def _report_writer(file: TextIO, rounds: int, status: _Status) -> Callable[[Report], None]:
    def write(report: Report) -> None:
        status.see(report)
        if not report.missing:  # otherwise the caller has logged it
            log.info("%s", report)
        row = {"stage": list(report.stage), "of": rounds, "received": list(report.received), "missing": report.missing}
        print(json.dumps(row), file=file, flush=True)

    return write


def _appended(path: Path) -> TextIO:
    """A file to append lines to. A line that a crash has cut short is ended, so that the next one can be read."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a")


def _log_to(folder: Path) -> None:
    """Log to where Flower logs, which `flwr run --stream` shows, and to the run's folder, whoever reads the other."""
    shown, kept = logging.StreamHandler(sys.stdout), logging.FileHandler(folder / "server.log", encoding="utf-8")
    shown.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    kept.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers, log.propagate = [shown, kept], False
    log.setLevel(logging.INFO)
