"""Everything about a site that can be wrong before a run, looked at before the run."""

import contextlib
import importlib.metadata
import os
import shutil
import ssl
import stat
import sys
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedstrata import __version__
from fedstrata.runtime.flower import wire
from fedstrata.runtime.flower.approved import approved, fingerprint
from fedstrata.runtime.flower.deployment import Deployment, resolve
from fedstrata.runtime.flower.keys import days_left
from fedstrata.runtime.flower.programs import Site, environment, split_address

CLOCKS = 5.0  # seconds by which Flower lets a site's clock be ahead of the server's; behind, five minutes
PROGRAMS = ("flower-supernode", "flower-superexec", "flwr-clientapp")


class Finding(NamedTuple):
    """One look: what at, whether it is well, and what was found, or what to do."""

    what: str
    good: bool
    found: str


class Wrong(ValueError):
    """Something that a look has found, with its remedy."""


def check(site: Site, app: Path, where: str) -> Iterator[Finding]:
    """All looks, one after the other. app: the folder of the Flower app. where: its deployment, "package.task:name"."""
    known: dict[str, Any] = {}
    looks: dict[str, Callable[[], str]] = {
        "versions": lambda: _versions(),
        "programs": lambda: _programs(site),
        "app": lambda: _app(site, app),
        "state": lambda: _state(site),
        "data": lambda: _data(site, app, where, known),
        "one round": lambda: _one_round(site, known),
        "disk": lambda: _disk(site, known),
        "private key": lambda: _private_key(site),
        "authority": lambda: _authority(site),
        "server": lambda: _server(site, known),
        "clock": lambda: _clock(known),
    }
    if site.insecure:
        looks = {name: look for name, look in looks.items() if name not in ("private key", "authority")}
    for name, look in looks.items():
        try:
            yield Finding(name, True, look())
        except Exception as error:  # whatever it is, the next look is worth having
            text = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            yield Finding(name, False, text.splitlines()[0] if text else type(error).__name__)


def _versions() -> str:
    flower, jax = (importlib.metadata.version(name) for name in ("flwr", "jax"))
    if tuple(map(int, flower.split(".")[:2])) != (1, 41):
        raise Wrong(
            f"flwr {flower} is installed, and this FedStrata was tested with 1.41: pip install 'flwr>=1.41,<1.42'"
        )
    return f"fedstrata {__version__}, flwr {flower}, jax {jax}, Python {sys.version.split()[0]}"


def _programs(site: Site) -> str:
    path = environment(Path())["PATH"]
    if lacking := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
        raise Wrong(f"{', '.join(lacking)} not found beside this Python: pip install 'fedstrata[flower]'")
    return "all found"


def _app(site: Site, app: Path) -> str:
    found, known = fingerprint(app), site.folder / site.approved
    if found not in approved(known):
        raise Wrong(f"version {found[:16]} is not approved here: read {app}, then `fedstrata deploy approve`")
    return f"version {found[:16]}, approved; the server's must be the same"


def _state(site: Site) -> str:
    folder = site.folder / site.state
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise Wrong(f"{folder} must be this user's alone: chmod 700 {folder}")
    probe = folder / ".writable"
    probe.write_bytes(b"")
    probe.unlink()
    wire.address(folder)
    return "writable, for its owner alone"


def _data(site: Site, app: Path, where: str, known: dict[str, Any]) -> str:
    from fedstrata.runtime.survey import Survey, start_point

    sys.path.insert(0, str(app))
    with contextlib.chdir(site.folder):
        deployment: Deployment = resolve(where)
        data = deployment.load(site.node_config)
    problem, options = deployment.problem, deployment.options
    survey = Survey.of(site.site, data)
    problem.check(start_point(problem, options.get("params"), options.get("seed", 0)), data)
    known.update(deployment=deployment, data=data)
    return ", ".join(f"{name}: {count} rows" for name, count in survey.counts.items())


def _one_round(site: Site, known: dict[str, Any]) -> str:
    """As the only site of a run: what its data do to the method is seen here and not in the middle of a run."""
    import jax

    from fedstrata.runtime.rehearsal import advance, rehearsal

    deployment: Deployment = _needed(known, "deployment")
    options = {name: value for name, value in deployment.options.items() if name != "cohort"}
    conductor, sites, _ = rehearsal(deployment.problem, deployment.algorithm, known["data"], **options)
    began = time.monotonic()
    now = advance(conductor, 1)
    if not all(np.all(np.isfinite(a)) for a in jax.tree.leaves(conductor.solution(now))):
        raise Wrong("after one round on this site's data alone the parameters are not finite: look at the data")
    known["kept"] = sum(a.nbytes for a in sites[0].shelf.read(now.after[0]).values())
    return f"finite, {time.monotonic() - began:.1f} s with compilation; {known['kept'] / 1e6:.1f} MB of state"


def _disk(site: Site, known: dict[str, Any]) -> str:
    free, need = shutil.disk_usage(site.folder / site.state).free, 4 * _needed(known, "kept") + 10e6
    if free < need:
        raise Wrong(f"{free / 1e6:.0f} MB are free at {site.folder / site.state}, and {need / 1e6:.0f} MB are needed")
    return f"{free / 1e9:.1f} GB free"


def _private_key(site: Site) -> str:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    path = site.private_key
    if not path.exists():
        raise Wrong(f"there is no {path}: `fedstrata deploy keys {site.site}` makes it")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Wrong(f"others can read {path}: chmod 600 {path}")
    if not isinstance(load_ssh_private_key(path.read_bytes(), None), EllipticCurvePrivateKey):
        raise Wrong(f"{path} is not a key on a NIST curve: `fedstrata deploy keys {site.site}` makes one")
    return f"{path.name}, for its owner alone"


def _authority(site: Site) -> str:
    path = site.folder / site.authority
    if not path.exists():
        raise Wrong(f"there is no {path}: the server's owner has it, from `fedstrata deploy keys server`")
    left = days_left(path)
    if left <= 0:
        raise Wrong(f"{path} ended {-left:.0f} days ago: the server's owner makes new keys")
    return f"ends in {left:.0f} days"


def _server(site: Site, known: dict[str, Any]) -> str:
    host, port = split_address(site.server)
    if site.insecure:
        connection: HTTPConnection = HTTPConnection(host, port, timeout=10)
    else:
        context = ssl.create_default_context(cafile=str(site.folder / site.authority))
        connection = HTTPSConnection(host, port, timeout=10, context=context)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
    except ssl.SSLCertVerificationError as error:
        raise Wrong(
            f"{site.server} is not the server that {site.authority} speaks for: {error.verify_message}"
        ) from None
    except (OSError, HTTPException) as error:
        raise Wrong(f"no answer from {site.server} ({error}): is the SuperLink running, and the port open?") from None
    finally:
        connection.close()
    known["date"] = answer.getheader("Date"), time.time()
    return f"{site.server} answers" + ("" if site.insecure else ", with the right certificate")


def _clock(known: dict[str, Any]) -> str:
    date, here = _needed(known, "date")
    if date is None:
        return "the server does not tell its time"
    ahead = here - parsedate_to_datetime(date).timestamp()
    if not -300 < ahead < CLOCKS + 1:  # the server's is told in whole seconds
        raise Wrong(f"this clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's: set it")
    return f"within {max(abs(ahead), 1):.0f} s of the server's"


def _needed(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise Wrong("could not be looked at: see above")
    return known[name]
