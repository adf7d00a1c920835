"""What a server or a site holds: `fedstrata deploy status`."""

import argparse
import contextlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.cli.operations.files import app_of, file_at, server_file
from fedstrata.cli.output import print_json, print_table
from fedstrata.cli.parsing import Mistake

if TYPE_CHECKING:
    from fedstrata.deploy.flower.config import ServerConfig, SiteConfig


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
    nodes, silent = registered(app, server_file(options))
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
    """What is known of a run. A run without a server is not running, whatever its file has.

    Args:
        folder: the run's.
    """
    from fedstrata.deploy.flower.run_lock import read_status, server_of

    who = server_of(folder)
    found = {"run": folder.name, "state": "unknown", "round": None, "rounds": None, **read_status(folder)}
    who = who or server_of(folder)  # it may have started since, and then what was read is older
    if who is None and found["state"] in ("waiting", "running"):
        found |= {"state": "died", "why": f"died; `fedstrata deploy run --name {folder.name}` resumes it"}
    sites = found.get("sites")
    found["sites"] = {n: s for n, s in sites.items() if isinstance(s, dict)} if isinstance(sites, dict) else {}
    model = folder / "model.npz"
    found |= _spent(folder) or {}  # also of the exchanges since the status was written
    return {**found, "server": who, "model": str(model) if model.exists() else None}


def registered(app: Path, server: "ServerConfig") -> tuple[list[dict[str, Any]] | None, str | None]:
    """The registered sites, by the names of the keys in the app's folder; None and why, if the SuperLink is silent."""
    from fedstrata.deploy.flower.control import Control

    names = {key: path.name for path, key in public_keys(app / server.keys)}
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


def public_keys(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """The public keys of sites in a folder, with their files. Other files are left out.

    Args:
        folder: of the server's keys.
    """
    from fedstrata.deploy.flower.control import public_key

    for path in sorted(folder.glob("*.pub")):
        with contextlib.suppress(ValueError, OSError):
            yield path, public_key(path)


def _rounds(run: dict[str, Any]) -> str:
    return "" if run["round"] is None else f"{run['round']} of {run['rounds']}"


def _epsilon(run: dict[str, Any]) -> str:
    """ε, or why there is no number; empty for a run without noise or clipping."""
    return f"{run['epsilon']:.3g}" if isinstance(run.get("epsilon"), int | float) else run.get("no_epsilon", "")


def _stage(site: dict[str, Any]) -> str:
    from fedstrata.deploy.messages import EVALUATE

    last = site.get("last")
    if not isinstance(last, list) or len(last) < 2:
        return "none"
    return f"evaluation after round {last[0]}" if last[1] == EVALUATE else f"round {last[0]}, exchange {last[1]}"


def _site_status(options: argparse.Namespace, site: "SiteConfig") -> int:
    from fedstrata.deploy.flower.run_lock import is_held
    from fedstrata.deploy.flower.supernode import LOCK, WORKER
    from fedstrata.deploy.site_log import FILE, broken

    folder = site.folder / site.state
    alive = {"supernode": bool(is_held(folder / LOCK)), "worker": bool(is_held(folder / WORKER))}
    if (folder / FILE).exists():
        wrong, state = broken(folder / FILE), "whole"
    elif any((folder / "runs").glob("*")):
        wrong, state = f"{folder / FILE} is missing: what this site has answered is not known", ""
    else:
        wrong, state = "", "none yet"
    logged = {} if wrong else _log(folder / FILE)  # lines that somebody changed are not evidence
    runs = [found for found in _held_runs(folder, logged) if options.name in (None, found["run"])]
    if options.json:
        print_json({"site": site.site, **alive, "log": wrong or state, "runs": runs})
        return 1 if wrong else 0
    print(f"{site.site}: " + ", ".join(f"{who} {'runs' if here else 'does not run'}" for who, here in alive.items()))
    last = lambda stages: "round {}, exchange {}".format(*stages[-1]) if stages else ""
    rows = [
        [r["run"], f"{r['bytes'] / 1e6:.1f}", last(r["stages"]), r["used"], _epsilon(r), _log_in_words(r["log"])]
        for r in runs
    ]
    print_table(f"{folder}", ["run", ">MB", "last stage", "last used", ">ε", "log"], rows)
    print(wrong or {"whole": "The chain of its log is whole.", "none yet": "It has no log yet."}[state])
    return 1 if wrong else 0


def _held_runs(folder: Path, logged: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of which a site has state or log lines."""
    from fedstrata.deploy.site_store import DiskStore, run_folder

    found = []
    names = {run_folder(name): name for name in logged}
    homes = {names.get(p.name, p.name): p for p in sorted((folder / "runs").glob("*")) if p.is_dir()}
    for name in sorted({*homes, *logged}):
        home = homes.get(name)
        stages = [list(stage) for stage in DiskStore(home, name).stages()] if home else []
        used = _day(last_used(home)) if home else None
        about = {"bytes": size(home), "stages": stages, "used": used, "epsilon": None, **(_spent(home) or {})}
        found.append({"run": name, **about, "log": logged.get(name)})
    return found


def _spent(home: Path | None) -> dict[str, Any] | None:
    """The ε of a run by the counts in its folder, or why it is not known; None if the run is not private."""
    from fedstrata.base.accounting import epsilon
    from fedstrata.deploy.privacy_accountant import FILE as COUNTS
    from fedstrata.deploy.state_files import DamagedFile, read_json

    try:
        if home is None or (found := read_json(home / COUNTS, "restore it")) is None:
            return None
        spent = epsilon(found["noise"], max(found["exchanges"].values(), default=0), found["delta"])
        if found.get("unprotected") or not math.isfinite(spent):
            return {"epsilon": None, "no_epsilon": "no guarantee"}
    except (DamagedFile, KeyError, TypeError, AttributeError):
        return {"epsilon": None, "no_epsilon": f"{COUNTS} is damaged"}
    except ImportError:
        return {"epsilon": None, "no_epsilon": "needs fedstrata[privacy]"}
    return {"epsilon": spent}


def _log(path: Path) -> dict[str, dict[str, Any]]:
    """The site's log, in short: per run the number of lines per verdict, bytes per way, and its last line."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError), path.open(errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n"):  # it is being written
                continue
            row = json.loads(line)
            if not row.get("run"):
                continue
            run = found.setdefault(str(row["run"]), {"verdicts": Counter(), "bytes": Counter(), "last": None})
            run["verdicts"][str(row.get("verdict"))] += 1
            sent = row.get("bytes")
            run["bytes"][str(row.get("way"))] += sent if isinstance(sent, int) else 0
            run["last"] = {name: row.get(name) for name in ("time", "kind", "stage", "verdict", "why")}
    return found


def _log_in_words(log: dict[str, Any] | None) -> str:
    if log is None:
        return "none"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in log["verdicts"].items())
    sent = f"{log['bytes']['out'] / 1e6:.1f} MB sent"
    why = log["last"].get("why")
    return f"{counts}; {sent}; last: {log['last'].get('kind')} {log['last'].get('stage')}" + (f", {why}" if why else "")


def last_used(folder: Path) -> float:
    """When something in a folder was written last, in seconds since 1970."""
    return max((found.st_mtime for found in _found(folder)), default=0.0)


def size(path: Path | None) -> int:
    """The bytes of a file, or of all files of a folder."""
    return sum(found.st_size for found in _found(path) if not stat.S_ISDIR(found.st_mode)) if path else 0


def _found(path: Path) -> Iterator[os.stat_result]:
    """A file, or a folder and all that is in it. What a working site removes meanwhile is left out."""
    walk = os.walk(path) if not path.is_symlink() else ()
    inside = (os.path.join(parent, name) for parent, folders, names in walk for name in (*folders, *names))
    for one in (path, *inside):
        with contextlib.suppress(FileNotFoundError):
            yield os.lstat(one)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
