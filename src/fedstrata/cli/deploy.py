"""Train across real sites with Flower: create an app, test it on this machine, check a site, start a run.

examples:
  fedstrata deploy init hospitals --sites 3      create an app in a new folder, with example data
  fedstrata deploy local                         in that folder: test it on this machine, with TLS and keys

on separate machines, in the app's folder:
  fedstrata deploy keys server                   at the server: create its certificate
  fedstrata deploy keys north                    at a site: create its key pair
  fedstrata deploy register keys/north.pub       at the server: register the site's public key
  fedstrata deploy approve                       at a site: allow this version of the app to run here
  fedstrata deploy check sites/north.toml        at a site: preflight check of data, versions, keys, clock, disk
  fedstrata deploy server                        start the SuperLink
  fedstrata deploy server --behind               the same behind nginx, whose configuration is written to out/
  fedstrata deploy site sites/north.toml         start a site's SuperNode
  fedstrata deploy run --name first              start the run, or resume it, and wait for its end

while it runs, and afterwards:
  fedstrata deploy status                        at the server: runs, rounds, sites, privacy spent, connected sites
  fedstrata deploy status sites/north.toml       at a site: what it holds and has answered, and which processes live
  fedstrata deploy stop --name first             stop a run; `deploy run --name first` resumes it
  fedstrata deploy unregister keys/north.pub     at the server: reject this site from now on
  fedstrata deploy clean --days 30               show what old runs and expired certificates could be removed
  fedstrata deploy clean --days 30 --yes         remove it; models, evaluations, reports and logs always stay

`run` passes on the log and exits with 0 only if the run has finished. Ctrl-C ends the log, not the run. `register`,
`server` and `site` replace themselves with a program of Flower; with --print they, and `run`, only show its command.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.base.errors import unknown
from fedstrata.base.text import check_plain_name
from fedstrata.cli.operations import clean, runs, status
from fedstrata.cli.operations.files import app_of, at, become, file_at, server_file
from fedstrata.cli.output import console, print_json, print_table
from fedstrata.cli.parsing import Mistake, json_option, whole

if TYPE_CHECKING:
    from fedstrata.deploy.flower.config import SiteConfig

_NEEDS = {"init": "the name of a new folder", "keys": "`server`, or a site's name", "register": "a site's .pub file"}
_NEEDS |= {"check": "a site's .toml file", "site": "a site's .toml file", "unregister": "a site's .pub file"}
_MAY_HAVE = ("status", "clean")  # a site's .toml file
_TAKEN_BY = {
    "sites": ("init", "local", "run"), "rounds": ("local", "run"), "name": ("run", "stop", "status"),
    "days": ("clean",), "keys": ("clean",), "yes": ("clean",), "behind": ("server",), "new_code": ("run",),
    "insecure": ("local",), "print": ("register", "server", "site", "run"),
}  # fmt: skip
_SHAPE = (
    '{"findings": [{"what", "good", "found"}]} for check, {"folder", "files"} for init and local, {"files"} for keys, '
    '{"version"} for approve, {"run", "flower_run", "finished", "why", "files", "missing"} for run, '
    '{"run", "stopped", "state"} for stop, {"runs", "nodes", "superlink"} for status, '
    '{"site", "supernode", "worker", "log", "runs"} for status of a site, '
    '{"removed": true or false, "files": [{"path", "bytes", "why"}]} for clean, {"unregistered", "node"} for unregister'
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", help=", ".join(_ACTIONS))
    parser.add_argument("what", nargs="?", metavar="WHAT", help="the action's argument: see the examples")
    parser.add_argument("--app", default=".", metavar="FOLDER", help="the app's folder (default: the current one)")
    parser.add_argument("--sites", type=whole(1), metavar="N", help="init: number of sites (3). local: the first N")
    parser.add_argument("--rounds", type=whole(1), metavar="R", help="local, run: instead of those in task.py")
    parser.add_argument("--name", help="run, stop: the run's name (first); the same name resumes it. status: only it")
    parser.add_argument("--days", type=whole(0), metavar="N", help="clean: what is at least N days old (30)")
    parser.add_argument("--keys", action="store_true", help="clean: also public keys as old that are not registered")
    parser.add_argument("--yes", action="store_true", help="clean: remove, and do not only show")
    parser.add_argument("--behind", action="store_true", help="server: behind nginx; with --print, its configuration")
    parser.add_argument("--new-code", action="store_true", help="run: resume with other code that computes the same")
    parser.add_argument("--insecure", action="store_true", help="local: without TLS and keys, a little faster")
    parser.add_argument("--print", action="store_true", help="show Flower's command, do not start it")
    json_option(parser, _SHAPE)


def execute(options: argparse.Namespace) -> int:
    if options.action not in _ACTIONS:
        raise unknown("action of `fedstrata deploy`:", options.action, _ACTIONS)
    if options.action in _NEEDS and options.what is None:
        raise Mistake(f"`fedstrata deploy {options.action}` needs {_NEEDS[options.action]}")
    if options.action not in (*_NEEDS, *_MAY_HAVE) and options.what is not None:
        raise Mistake(f"`fedstrata deploy {options.action}` takes no argument, got {options.what!r}")
    for option, actions in _TAKEN_BY.items():
        value = getattr(options, option)
        if value is not None and value is not False and options.action not in actions:
            name, takers = option.replace("_", "-"), ", ".join(f"`fedstrata deploy {action}`" for action in actions)
            raise Mistake(f"`fedstrata deploy {options.action}` takes no --{name}, which is for {takers}")
    if find_spec("flwr") is None:
        raise Mistake("deploying needs Flower: pip install 'fedstrata[flower]'")
    return _ACTIONS[options.action](options)


def _init(options: argparse.Namespace) -> int:
    from fedstrata.deploy.flower import app_template

    folder = Path(options.what)
    written = app_template.write(folder, options.sites or 3)
    if options.json:
        print_json({"folder": str(folder), "files": [str(p) for p in written]})
        return 0
    print(f"{folder}: {len(written)} files. Edit {written[1]}: problem, algorithm, and how a site loads its data")
    print(f"Next: cd {folder} && fedstrata deploy local")
    return 0


def _local(options: argparse.Namespace) -> int:
    from fedstrata.deploy.flower.config import SiteConfig
    from fedstrata.deploy.flower.run_lock import held, private

    app, _ = app_of(options)
    found = [SiteConfig.read(path) for path in sorted((app / "sites").glob("*.toml"))]
    count = options.sites or len(found)
    if not 1 <= count <= len(found):
        raise Mistake(f"--sites is {count}, but {app / 'sites'} has files for {len(found)} sites; add more there")
    home = app / "out" / "local"
    private(app / "out")
    with held(app / "out" / "local.lock", str(os.getpid())) as mine:
        if not mine:
            raise Mistake(f"`fedstrata deploy local` is running already for {app}: wait for its end, or stop it")
        return _run_here(options, app, home, found[:count])


def _run_here(options: argparse.Namespace, app: Path, home: Path, sites: list["SiteConfig"]) -> int:
    from fedstrata.deploy.evaluation.summary import Summary
    from fedstrata.deploy.flower.local_federation import LocalFederation
    from fedstrata.deploy.flower.run_lock import read_status

    count = len(sites)
    if home.exists():
        shutil.rmtree(home)
    given = {site.site: dict(site.settings) for site in sites}
    policies = {s.site: s.policy._replace(sites_at_least=min(count, s.policy.sites_at_least)) for s in sites}
    config: dict[str, Any] = {"run": "first", "folder": str(home), "sites": count}
    config |= {"rounds": options.rounds} if options.rounds else {}
    federation = LocalFederation(app, home, given, secure=not options.insecure, folder=app / "sites", policy=policies)
    with _exit_on_signals(), federation, (home / "run.log").open("w") as log:
        process = federation.run(log, **config)
        try:
            _watch(process, home, options.json)
        except _CannotLoad as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    files = sorted(p.name for p in (home / "first").glob("*") if p.is_file())
    status = read_status(home / "first")
    if status.get("state") != "finished":
        last = "\n".join((home / "run.log").read_text(errors="replace").splitlines()[-15:])
        why = f": {status['why']}" if status.get("why") else ""
        print(
            f"error: the local run did not finish{why}. All logs are in {home}. Last lines of run.log:\n{last}",
            file=sys.stderr,
        )
        return 1
    if options.json:
        print_json({"folder": str(home / "first"), "files": files})
        return 0
    row = json.loads((home / "first" / "evaluations.jsonl").read_text().splitlines()[-1])
    console().print(Summary.from_json(row).rich())
    if spent := runs.privacy_spent(home / "first"):
        print(f"privacy: {spent}")
    print(f"{home / 'first'}: {', '.join(files)}")
    return 0


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an exception does, so that the programs which it started end, too."""
    leave = lambda number, _: sys.exit(128 + number)
    both = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is not signal.SIG_IGN]  # nohup
    before = {one: signal.signal(one, leave) for one in both}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class _CannotLoad(Exception):
    """A site of a local run cannot load its data: the run would wait for it without end."""


def _check_loaded(home: Path) -> None:
    """Raise the error of a site's `load`. It quotes rows at most to the owner of this machine."""
    for log in sorted(home.glob("*/worker.log")):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(("load: ", "data: ")):
                raise _CannotLoad(f"the site {log.parent.name} cannot begin: {line}. Its log is {log}")


def _watch(process: subprocess.Popen, home: Path, quiet: bool) -> None:
    """A progress bar until the run has ended, and a line for each site that did not reply."""
    from fedstrata.report.progress import Progress

    out, seen, reports = console(stderr=True), 0, home / "first" / "reports.jsonl"
    while not reports.exists() and process.poll() is None:
        _check_loaded(home)
        time.sleep(0.2)
    lines = lambda: reports.read_text(errors="replace").splitlines(keepends=True) if reports.exists() else []
    rows = lambda: runs.exchanges(lines())
    while not rows() and process.poll() is None:
        time.sleep(0.2)
    total = rows()[0]["of"] if rows() else 0
    with Progress(total, "local run", quiet=quiet, console=out) as bar:
        ended = False
        while not ended:
            ended = process.poll() is not None
            for row in rows()[seen:]:
                seen += 1
                bar.update(max(row["stage"][0], 0))
                for site, why in row["missing"].items():
                    out.print(f"round {row['stage'][0]}: {site} did not reply: {why}")
            time.sleep(0.2)
        bar.update(total)


def _keys(options: argparse.Namespace) -> int:
    from fedstrata.deploy.flower.config import ServerConfig, split_address
    from fedstrata.deploy.flower.keys import server_keys, site_keys

    app, _ = app_of(options)
    if options.what == "server":
        server = ServerConfig.read(app / "server.toml")
        host = split_address(server.address)[0]
        made = server_keys(app / server.keys, [host, *({"localhost", "127.0.0.1"} - {host})])
        note = f"Give {made[0]} to every site. {made[2]} stays here."
    else:
        check_plain_name("site", options.what)
        if options.what.startswith(".") or set(options.what) & set("/\\"):
            raise Mistake(
                f"the name of a site names its files: {options.what!r} must not have a slash or begin with a dot"
            )
        made = site_keys(app / "keys", options.what)
        note = f"Give {made[1]} to the server. {made[0]} stays here."
    print_json({"files": [str(p) for p in made]}) if options.json else print(note)
    return 0


def _register(options: argparse.Namespace) -> int:
    from fedstrata.deploy.flower.config import CONNECTION

    key = Path(options.what)
    if not key.is_file():
        raise Mistake(f"there is no {key}; the site creates it with `fedstrata deploy keys NAME`")
    command = ["flwr", "supernode", "register", str(key.absolute()), CONNECTION]
    return become(options, command, at(server_file(options)))


def _approve(options: argparse.Namespace) -> int:
    from fedstrata.deploy.flower.approval import approve

    app, _ = app_of(options)
    found = approve(app, app / "approved.txt")
    print_json({"version": found}) if options.json else print(
        f"{found} is approved at this site: {app / 'approved.txt'}"
    )
    return 0


def _check(options: argparse.Namespace) -> int:
    from fedstrata.deploy.flower.config import SiteConfig, owner_only
    from fedstrata.deploy.flower.preflight import check

    app, where = app_of(options)
    owner_only(file_at(options.what))
    findings = list(check(SiteConfig.read(Path(options.what)), app, where))
    good = all(f.good for f in findings)
    if options.json:
        print_json({"findings": [f._asdict() for f in findings]})
    else:
        rows = [["✓" if f.good else "✗", f.what, f.found] for f in findings]
        print_table(f"{options.what}: {'ready' if good else 'not ready'}", ["", "", "found"], rows)
    return 0 if good else 1


def _server(options: argparse.Namespace) -> int:
    server = server_file(options)
    if options.behind and not server.behind:
        raise Mistake(
            'add behind = "127.0.0.1:9192" to server.toml: there the SuperLink listens, and the programs of this '
            "machine connect to it; nginx listens for the sites"
        )
    if options.behind and options.print:
        print(server.proxy((server.folder / server.database).parent))
        return 0
    if server.behind and not options.print:
        written = server.write_proxy()
        print(f"{written} passes /v1/fleet/ on to {server.behind}, and nothing else: nginx -c {written}", flush=True)
    if server.exposed:
        print(
            f"warning: whoever reaches {server.address} can start and stop runs, register keys and read logs, because "
            "Flower has no accounts: restrict the port, or use a proxy (--behind)",
            file=sys.stderr,
            flush=True,
        )
    return become(options, server.command(), at(server))


def _site(options: argparse.Namespace) -> int:
    from fedstrata.deploy.flower.config import SiteConfig, owner_only
    from fedstrata.deploy.flower.preflight import check_start
    from fedstrata.deploy.flower.supernode import SITE

    path = file_at(options.what)
    owner_only(path)
    site = SiteConfig.read(path)
    if not site.insecure and site.private_key.exists():
        owner_only(site.private_key)
    given = {**site.environment(), SITE: str(path.absolute())}
    if not options.print:
        check_start(site)
        os.chdir(path.parent)  # relative paths in its settings start there
    return become(options, site.command(), given)


_ACTIONS = {
    "init": _init, "local": _local, "keys": _keys, "register": _register, "approve": _approve, "check": _check,
    "server": _server, "site": _site, "run": runs.run, "status": status.status, "stop": runs.stop,
    "unregister": runs.unregister, "clean": clean.clean,
}  # fmt: skip
