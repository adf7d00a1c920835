"""Runs of `fedstrata deploy`: started and watched, stopped; and a site that is unregistered."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.cli.operations.files import app_of, at, become, file_at, run_name, server_file
from fedstrata.cli.output import close_output, print_json
from fedstrata.cli.parsing import Mistake

if TYPE_CHECKING:
    from fedstrata.deploy.flower.config import ServerConfig
    from fedstrata.deploy.flower.control import FlowerRun

SETTLE = 20.0  # seconds after its last log line until Flower must know how a run ended
STOP = 60.0  # seconds until a stopped server app must have ended
RESULTS = ("model.npz", "solution.npz", "evaluations.jsonl", "reports.jsonl")


def run(options: argparse.Namespace) -> int:
    """Start a run, pass its log on, and report how it ended.

    Args:
        options: of the command line.
    """
    from fedstrata.deploy.flower.local_federation import run_command
    from fedstrata.deploy.flower.run_lock import NOT_RESUMED, private, read_status, server_of
    from fedstrata.deploy.messages import EVALUATE

    app, _ = app_of(options)
    name, server = run_name(options), server_file(options)
    folder = app / "out" / name
    config: dict[str, Any] = {"run": name, "folder": str(app / "out")}
    config |= {word: value for word in ("sites", "rounds") if (value := getattr(options, word))}
    config |= {"new-code": True} if options.new_code else {}
    command, given = run_command(app, config), at(server)
    if options.print:
        return become(options, command, given)
    if (who := server_of(folder)) is not None:
        raise Mistake(
            f"run {name!r} is running already, in {_process(who)}: `fedstrata deploy "
            f"status` shows it, `fedstrata deploy stop --name {name}` stops it"
        )
    if read_status(folder).get("cleaned"):
        raise Mistake(
            f"the checkpoints of run {name!r} were removed by `fedstrata deploy clean`: choose another --name"
        )
    private(folder)
    reports = _Reports(folder / "reports.jsonl")
    try:
        number, last = _passed_on(command, given, folder / "run.log", sys.stderr if options.json else sys.stdout)
    except _Interrupted as error:
        known = "The run continues at the server." if error.started else "The run may have started."
        print(
            f"\n{known} `fedstrata deploy status` shows it, `fedstrata deploy stop --name {name}` stops it.",
            file=sys.stderr,
        )
        return 130
    why = _why_unfinished(server, number, last, folder)
    files = [str(folder / file) for file in RESULTS if (folder / file).exists()]
    try:
        if options.json:
            found = {"run": name, "flower_run": number, "finished": why is None, "why": why, "files": files}
            print_json({**found, "missing": reports.missing()})
        elif why is None:
            rows = reports.rows()
            _tell(folder, name, new=not rows or any(row["stage"][1] != EVALUATE for row in rows))
            for site, times in reports.missing().items():
                print(f"missing:     {site}, in {times} of {len(rows)} exchanges; the reports tell why")
    except BrokenPipeError:  # what is told below, and the exit code, are true all the same
        close_output(sys.stdout)
    if why is not None:
        what = "was not resumed" if (reason := why.removeprefix(NOT_RESUMED)) != why else "did not finish"
        print(f"error: run {name!r} {what}: {reason}. Logs: {folder / 'run.log'}", file=sys.stderr)
    return 0 if why is None else 1


class _Interrupted(Exception):
    """Ctrl-C, while the log of a run was shown."""

    def __init__(self, started: bool):
        super().__init__()
        self.started = started  # whether Flower has said so


class _Reports:
    """The exchanges of a run since now."""

    def __init__(self, file: Path):
        self.file, self.begin = file, file.stat().st_size if file.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        with self.file.open(errors="replace") as lines:
            lines.seek(self.begin)
            return exchanges(lines)

    def missing(self) -> dict[str, int]:
        """By site that did not reply in all exchanges: in how many."""
        return dict(Counter(site for row in self.rows() for site in row["missing"]))


def exchanges(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The exchanges in the lines of reports.jsonl, without a line that a crash cut short, or that is being written.

    Args:
        lines: with their ends.
    """
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line) if line.endswith("\n") else None
            found += [row] if isinstance(row, dict) else []
    return found


def _passed_on(command: list[str], given: dict[str, str], log: Path, out: Any) -> tuple[int | None, str]:
    """Run Flower's command and copy its output; returns the number of Flower's run, and its last words."""
    number, lines = None, deque[str](maxlen=50)
    process = subprocess.Popen(
        command, env={**given, "PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True, umask=0o077,
    )  # fmt: skip
    try:
        log.touch(0o600)
        with log.open("a") as file:
            copies = [out, file]
            for line in process.stdout or ():
                lines.append(line)
                if number is None and (found := re.search(r"Successfully started run (\d+)", line)):
                    number = int(found[1])
                for copy in copies:
                    try:
                        print(line, end="", file=copy, flush=True)
                    except OSError:  # nobody reads any more, or the disk is full: the run itself continues
                        close_output(copy)
                        copies = [other for other in copies if other is not copy]
        process.wait()
    except KeyboardInterrupt:
        raise _Interrupted(number is not None) from None
    finally:
        process.kill()  # after Ctrl-C; it only shows the log
        process.wait()
        if process.stdout:
            process.stdout.close()
    return number, _last(lines)


def _last(lines: Iterable[str]) -> str:
    """The last line with a word in it; of a message that Flower's command line has put into a box, all its lines."""
    found, box = "", []
    for line in map(str.strip, lines):
        words, edge = line.strip("╭╮╰╯│─ "), line[:1]
        if edge == "╭":
            box = [words]
        elif edge in ("│", "╰") and box:
            box.append(words)
            if edge == "╰":
                found, box = f"{box[0]}: {' '.join(box[1:])}".strip(": "), []
        elif any(letter.isalnum() for letter in words):
            found = words
    return found


def _why_unfinished(server: "ServerConfig", number: int | None, last: str, folder: Path) -> str | None:
    """Why a run did not finish, in one line; None if it did. Flower and the run's own status must agree."""
    from fedstrata.deploy.flower.run_lock import read_status, server_of

    if number is None:
        return f"Flower did not start it: {last or 'no output'}"
    try:
        flower = _settled(server, number)
    except OSError as error:
        return f"{error}; if the run continues, `fedstrata deploy status` shows it"
    status = read_status(folder)
    mine = status.get("flower_run") == str(number)
    if flower is not None and flower.completed and mine and status.get("state") == "finished":
        return None
    if flower is not None and flower.status != "finished" and server_of(folder) is not None:
        return "the log ended, but the run continues; `fedstrata deploy status` shows it"
    why = status.get("why") if mine else None
    if flower is None:
        return f"the SuperLink does not know its run {number} any more"
    if flower.outcome == "stopped":
        return f"it was stopped; `fedstrata deploy run --name {folder.name}` resumes it"
    found = why or flower.details or f"Flower's status: {flower.status}:{flower.outcome}"
    return " ".join(str(found).split())


def _settled(server: "ServerConfig", number: int) -> "FlowerRun | None":
    from fedstrata.deploy.flower.control import Control

    control, until = Control(server), time.monotonic() + SETTLE
    try:
        while (found := control.run(number)) is not None and found.status != "finished" and time.monotonic() < until:
            time.sleep(0.5)
        return found
    finally:
        control.close()


def _tell(folder: Path, name: str, new: bool) -> None:
    before = "had finished before, and was only evaluated again: --rounds extends it, --name starts another"
    print(f"run {name!r} {'has finished' if new else before}")
    if (folder / "model.npz").exists():
        print(f'model:       {folder / "model.npz"}; use it: fs.load_model("{folder / "model.npz"}")')
    print(f"parameters:  {folder / 'solution.npz'}")
    print(f"evaluations: {folder / 'evaluations.jsonl'}")
    print(f"reports:     {folder / 'reports.jsonl'}")
    if spent := privacy_spent(folder):
        print(f"privacy:     {spent}")


def privacy_spent(folder: Path) -> str:
    """The privacy that a run has spent by its last evaluation, in words; empty if the run has no noise or clipping.

    Args:
        folder: the run's.
    """
    try:
        found = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["privacy"]
        about = f"δ = {found['delta']:g}, {found['exchanges']} exchanges"
    except (OSError, LookupError, ValueError, TypeError):
        return ""
    return "no guarantee" if found.get("epsilon") is None else f"ε = {found['epsilon']:.4g} at {about}"


def stop(options: argparse.Namespace) -> int:
    """Stop a run, and wait until its server has ended.

    Args:
        options: of the command line.
    """
    from fedstrata.deploy.flower.control import AlreadyEnded, Control, UnknownRun
    from fedstrata.deploy.flower.run_lock import read_status, server_of, write_status

    app, _ = app_of(options)
    name = run_name(options)
    folder = app / "out" / name
    if not folder.is_dir():
        raise Mistake(f"there is no run {name!r} in {app / 'out'}; `fedstrata deploy status` lists them")
    who, control = server_of(folder), Control(server_file(options))
    try:
        numbers = control.unfinished(name, app / "out")  # also of a run that has no server yet
        served = str((who or {}).get("flower_run", ""))
        if served.isdigit() and int(served) not in numbers:
            numbers.append(int(served))
        for number in numbers:
            with contextlib.suppress(AlreadyEnded, UnknownRun):  # its server is about to end
                control.stop(number)
    except OSError as error:
        server = f"; the server of run {name!r} is {_process(who)}" if who is not None else ""
        raise OSError(f"{error}{server}") from None
    finally:
        control.close()
    until = time.monotonic() + STOP
    while (left := server_of(folder)) is not None:
        if time.monotonic() > until:
            raise TimeoutError(
                f"Flower stopped run {name!r}, but its server has not ended within {STOP:.0f} s: {_process(left)}"
            )
        time.sleep(0.2)
    found = read_status(folder)
    late = found.get("state") == "finished" and str(found.get("flower_run")) in map(str, numbers)
    if not late and (numbers or found.get("state") in ("waiting", "running")):
        write_status(folder, state="stopped", why="by `fedstrata deploy stop`")
    if options.json:
        stopped = bool(numbers) and not late
        print_json({"run": name, "stopped": stopped, "state": read_status(folder).get("state")})
    elif late:
        print(f"run {name!r} has finished: it was not stopped in time")
    elif not numbers:
        print(f"run {name!r} has no server: there is nothing to stop")
    else:
        print(f"run {name!r} is stopped; `fedstrata deploy run --name {name}` resumes it")
    return 0


def _process(who: dict[str, Any]) -> str:
    return f"process {who.get('pid', 'unknown')} on {who.get('host', 'unknown')}"


def unregister(options: argparse.Namespace) -> int:
    """Remove a site's key from the SuperLink.

    Args:
        options: of the command line.
    """
    from fedstrata.deploy.flower.control import Control, public_key

    key = file_at(options.what)
    wanted, control = public_key(key), Control(server_file(options))
    try:
        found = [node for node in control.nodes() if node.public_key == wanted]
        if not found:
            raise Mistake(f"{key} is not registered at {control.address}: there is nothing to remove")
        control.unregister(found[0].id)
    finally:
        control.close()
    if options.json:
        print_json({"unregistered": str(key), "node": found[0].id})
    else:
        print(f"{key} is no longer registered; the server rejects it from now on. To return, the site needs a new key")
    return 0
