"""What a server or a site holds: `fedstrata deploy status`, and `clean`, which removes what is old."""

import argparse
import contextlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstrata.cli.deploy_run import app_of, file_at, server_file
from fedstrata.cli.output import print_json, print_table
from fedstrata.cli.parsing import Mistake

if TYPE_CHECKING:
    from fedstrata.deploy.flower.config import ServerConfig, SiteConfig

DAY = 86400.0


def status(options: argparse.Namespace) -> int:
    """Show the runs of the server, or what a site holds.

    Args:
        options: of the command line.
    """
    if options.what is not None:
        from fedstrata.deploy.flower.config import SiteConfig

        return _site_status(options, SiteConfig.read(file_at(options.what)))
    app, _ = app_of(options)
    runs = [run_status(folder) for folder in run_folders(app) if options.name in (None, folder.name)]
    if options.name is not None and not runs:
        raise Mistake(f"there is no run {options.name!r} in {app / 'out'}; `fedstrata deploy status` lists them")
    nodes, silent = _nodes(app, server_file(options))
    if options.json:
        print_json({"runs": runs, "nodes": nodes, "superlink": silent})
        return 0
    rows = [[r["run"], r["state"], _rounds(r), _epsilon(r), r.get("model") or "", r.get("why") or ""] for r in runs]
    if rows:
        print_table(f"{app / 'out'}", ["run", "state", ">round", ">ε", "model", "why"], rows)
    else:
        print(f"{app / 'out'} has no runs yet: `fedstrata deploy run` starts one")
    for found in runs:
        if sites := found.get("sites"):
            missing = lambda site: site.get("quarantined") or site.get("why_missing") or ""
            rows = [[name, _stage(site), missing(site)] for name, site in sites.items()]
            print_table(f"{found['run']}: sites", ["site", "last reply", "missing, or quarantined"], rows)
    if nodes is None:
        print(f"sites: not known, {silent}")
    else:
        print_table("registered sites", ["key", "state", "node"], [[n["key"], n["status"], n["node"]] for n in nodes])
    return 0


def run_folders(app: Path) -> list[Path]:
    """The folders of the server's runs."""
    return sorted(p for p in (app / "out").glob("*") if (p / "status.json").exists() or (p / "checkpoints").is_dir())


def run_status(folder: Path) -> dict[str, Any]:
    """What is known of a run. A run without a server is not running, whatever its file says.

    Args:
        folder: the run's.
    """
    from fedstrata.deploy.flower.run_lock import read_status, server_of

    found = {"run": folder.name, "state": "unknown", "round": None, "rounds": None, **read_status(folder)}
    who = server_of(folder)
    if who is None and found["state"] in ("waiting", "running"):
        found |= {"state": "died", "why": f"died; `fedstrata deploy run --name {folder.name}` resumes it"}
    model = folder / "model.npz"
    return {**found, "server": who, "model": str(model) if model.exists() else found.get("model")}


def _nodes(app: Path, server: "ServerConfig") -> tuple[list[dict[str, Any]] | None, str | None]:
    """The registered sites, by the names of the keys in the app's folder; None and why, if the SuperLink is silent."""
    from fedstrata.deploy.flower.control import Control, public_key

    names = {}
    for path in sorted((app / server.keys).glob("*.pub")):
        with contextlib.suppress(ValueError, OSError):
            names[public_key(path)] = path.name
    try:
        control = Control(server)
    except (OSError, ValueError) as error:
        return None, str(error)
    try:
        found = control.nodes()
    except (OSError, ValueError) as error:
        return None, str(error)
    finally:
        control.close()
    return [{"key": names.get(n.public_key, "unknown"), "status": n.status, "node": n.id} for n in found], None


def _rounds(run: dict[str, Any]) -> str:
    return "" if run["round"] is None else f"{run['round']} of {run['rounds']}"


def _epsilon(run: dict[str, Any]) -> str:
    return f"{run['epsilon']:.3g}" if isinstance(run.get("epsilon"), int | float) else ""


def _stage(site: dict[str, Any]) -> str:
    last = site.get("last")
    return f"round {last[0]}, phase {last[1]}" if last else "none"


def _site_status(options: argparse.Namespace, site: "SiteConfig") -> int:
    from fedstrata.deploy.flower.run_lock import is_held
    from fedstrata.deploy.flower.supernode import LOCK

    folder = site.folder / site.state
    alive = {"supernode": bool(is_held(folder / LOCK)), "worker": bool(is_held(folder / "worker.lock"))}
    runs = [found for found in _held_runs(folder) if options.name in (None, found["run"])]
    if options.json:
        print_json({"site": site.site, **alive, "runs": runs})
        return 0
    print(f"{site.site}: " + ", ".join(f"{who} {'runs' if here else 'does not run'}" for who, here in alive.items()))
    last = lambda stages: "round {}, exchange {}".format(*stages[-1]) if stages else ""
    rows = [[r["run"], f"{r['bytes'] / 1e6:.1f}", last(r["stages"]), r["used"], _said(r["log"])] for r in runs]
    print_table(f"{folder}", ["run", ">MB", "last stage", "last used", "log"], rows)
    return 0


def _held_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs of which a site has state or log lines."""
    from fedstrata.deploy.site_store import DiskStore, run_folder

    logged, found = _log(folder / "log.jsonl"), []
    names = {run_folder(name): name for name in logged}
    homes = {names.get(p.name, p.name): p for p in sorted((folder / "runs").glob("*")) if p.is_dir()}
    for name in sorted({*homes, *logged}):
        home = homes.get(name)
        stages = [list(stage) for stage in DiskStore(home, name).stages()] if home else []
        used = _day(_last_used(home)) if home else None
        found.append({"run": name, "bytes": _size(home), "stages": stages, "used": used, "log": logged.get(name)})
    return found


def _log(path: Path) -> dict[str, dict[str, Any]]:
    """The site's log, in short: per run the number of lines per verdict, bytes per way, and its last line."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError), path.open(errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # a line that is being written
                continue
            if not isinstance(row, dict) or not row.get("run"):
                continue
            run = found.setdefault(str(row["run"]), {"verdicts": Counter(), "bytes": Counter(), "last": None})
            run["verdicts"][str(row.get("verdict"))] += 1
            run["bytes"][str(row.get("way"))] += int(row.get("bytes") or 0)
            run["last"] = {name: row.get(name) for name in ("time", "kind", "stage", "verdict", "why")}
    return found


def _said(log: dict[str, Any] | None) -> str:
    if log is None:
        return "none"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in log["verdicts"].items())
    sent = ", ".join(f"{number / 1e6:.1f} MB {way}" for way, number in log["bytes"].items())
    why = log["last"].get("why")
    return f"{counts}; {sent}; last: {log['last'].get('kind')} {log['last'].get('stage')}" + (f", {why}" if why else "")


class _Old(NamedTuple):
    """Something that may be removed."""

    path: Path
    why: str
    run: Path | None = None  # the server's run whose checkpoints these are


def clean(options: argparse.Namespace) -> int:
    """Show what is old, or remove it.

    Args:
        options: of the command line.
    """
    if options.what is not None:
        from fedstrata.deploy.flower.config import SiteConfig

        old = list(_old_at_site(SiteConfig.read(file_at(options.what)), options.days))
    else:
        old = list(_old_at_server(*_app_and_server(options), options.days, options.keys))
    found = [{"path": str(o.path), "bytes": _size(o.path), "why": o.why} for o in old]
    for one in old if options.yes else ():
        _remove(one)
    if options.json:
        print_json({"removed": options.yes, "files": found})
        return 0
    if not found:
        print(f"nothing to remove is at least {options.days} days old")
        return 0
    rows = [[f"{f['bytes'] / 1e6:.1f}", f["path"], f["why"]] for f in found]
    print_table("removed" if options.yes else "to be removed with --yes", [">MB", "what", "why"], rows)
    return 0


def _app_and_server(options: argparse.Namespace) -> tuple[Path, "ServerConfig"]:
    return app_of(options)[0], server_file(options)


def _old_at_server(app: Path, server: "ServerConfig", days: int, keys: bool) -> Iterator[_Old]:
    from fedstrata.deploy.flower.keys import CERTIFICATE, KEY

    for folder in run_folders(app):
        found = run_status(folder)
        age = (time.time() - _updated(found, folder)) / DAY
        ended = found["state"] in ("finished", "stopped") and found["server"] is None
        if ended and age >= days and (folder / "checkpoints").is_dir():
            yield _Old(folder / "checkpoints", f"{found['state']} {age:.0f} days ago; cannot be resumed then", folder)
    home = app / server.keys
    yield from _expired(home)
    if _is_expired(home / CERTIFICATE) and (home / KEY).exists():
        yield _Old(home / KEY, "its certificate has expired")
    if keys:
        nodes, why = _nodes(app, server)
        if nodes is None:
            raise Mistake(f"--keys must ask the SuperLink which keys are registered: {why}")
        known = {node["key"] for node in nodes}
        for path in sorted(home.glob("*.pub")):
            if path.name not in known:
                yield _Old(path, "not registered")


def _old_at_site(site: "SiteConfig", days: int) -> Iterator[_Old]:
    """A site is not told that a run has ended; a run that was used within a day stays while the site is connected."""
    from fedstrata.deploy.flower.run_lock import is_held
    from fedstrata.deploy.flower.supernode import LOCK

    folder = site.folder / site.state
    running = bool(is_held(folder / LOCK)) or bool(is_held(folder / "worker.lock"))
    for home in sorted(path for path in (folder / "runs").glob("*") if path.is_dir() and not path.is_symlink()):
        age = (time.time() - _last_used(home)) / DAY
        if age >= max(days, 1 if running else 0):
            yield _Old(home, f"last used {age:.0f} days ago; the site cannot take part in this run any more then")
    authority = site.folder / site.authority
    if _is_expired(authority):
        yield _Old(authority, "expired")


def _expired(home: Path) -> Iterator[_Old]:
    yield from (_Old(path, "expired") for path in sorted(home.glob("*.crt")) if _is_expired(path))


def _is_expired(path: Path) -> bool:
    from fedstrata.deploy.flower.keys import days_left

    try:
        return days_left(path) < 0
    except (OSError, ValueError):
        return False


def _remove(old: _Old) -> None:
    from fedstrata.deploy.flower.run_lock import only_server, write_status

    if old.run is None:
        shutil.rmtree(old.path) if old.path.is_dir() else old.path.unlink()
        return
    with only_server(old.run, {}):  # no server can start meanwhile
        write_status(old.run, cleaned=True)
        shutil.rmtree(old.path)


def _updated(found: dict[str, Any], folder: Path) -> float:
    try:
        return datetime.fromisoformat(found["updated"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return _last_used(folder)


def _last_used(folder: Path) -> float:
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def _size(path: Path | None) -> int:
    if path is None:
        return 0
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(found.st_size for p in files if not (found := p.lstat()).st_mode & 0o040000)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
