"""The preflight check of a site: everything that can be wrong before a run."""

import contextlib
import importlib.metadata
import os
import shutil
import socket
import ssl
import stat
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedstrata import __version__
from fedstrata.base.text import listed
from fedstrata.deploy import site_log
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.flower import socket_frames
from fedstrata.deploy.flower.approval import approved, fingerprint
from fedstrata.deploy.flower.config import SiteConfig, environment, split_address
from fedstrata.deploy.flower.deployment import Deployment, agree_on, check_deployment, resolve
from fedstrata.deploy.flower.keys import days_left
from fedstrata.deploy.flower.run_lock import is_held
from fedstrata.deploy.flower.supernode import LOCK
from fedstrata.deploy.guard import Guard
from fedstrata.deploy.policy import Refused
from fedstrata.deploy.server_clock import LARGEST, ServerClock, why_rejected
from fedstrata.deploy.site_folder import SECRET, TERMS
from fedstrata.deploy.site_log import SiteLog, SiteLogError
from fedstrata.deploy.state_files import DamagedFile
from fedstrata.deploy.terms import Terms

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation

PROGRAMS = ("flower-supernode", "flower-superexec", "flwr-clientapp")


class Finding(NamedTuple):
    """The outcome of one check."""

    what: str  # was checked
    good: bool
    found: str  # what was found, or what to do


class Wrong(ValueError):
    """A mistake that a check has found, with its remedy."""


def check(site: SiteConfig, app: Path, where: str) -> Iterator[Finding]:
    """Run all checks, one after the other; a failed one does not stop the others.

    Args:
        site: to check.
        app: the folder of the Flower app.
        where: its deployment, "package.module:name".
    """
    checks = _Checks(site, app, where)
    steps: dict[str, Callable[[], str]] = {
        "versions": checks.versions,
        "programs": checks.programs,
        "app": checks.approval,
        "state": checks.state,
        "port": checks.port,
        "data": checks.load_data,
        "policy": checks.policy,
        "one round": checks.one_round,
        "disk": checks.disk,
        "private key": checks.private_key,
        "authority": checks.authority,
        "server": checks.server,
        "clock": checks.clock,  # before the key: a wrong clock looks like a wrong key
        "registered": checks.registered,
    }
    if site.insecure:
        del steps["private key"], steps["authority"], steps["registered"]
    for name, step in steps.items():
        try:
            yield Finding(name, True, step())
        except Exception as error:  # of any kind: the other checks still run
            text = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            yield Finding(name, False, text.splitlines()[0] if text else type(error).__name__)


def check_start(site: SiteConfig) -> None:
    """Refuse to start a SuperNode that would end at once, for want of a key, a certificate or a port.

    Args:
        site: to start.

    Raises:
        Wrong: with the remedy.
    """
    checks = _Checks(site, Path(), "")
    if not site.insecure:
        checks.private_key()
        checks.authority()
    checks.port()


class _Checks:
    """The checks of one site. Later ones use the results of earlier ones."""

    def __init__(self, site: SiteConfig, app: Path, where: str):
        self.site, self.app, self.where = site, app, where
        self.deployment: Deployment | None = None
        self.data: Federation | None = None
        self.runs: set[str] = set()  # that have begun here, by its log
        self.state_bytes: int | None = None  # of a site's fields after one round
        self.reached, self.time = False, ServerClock()  # whether the server has responded, and its time

    def versions(self) -> str:
        flower, jax = (importlib.metadata.version(name) for name in ("flwr", "jax"))
        if tuple(map(int, flower.split(".")[:2])) != (1, 41):
            raise Wrong(
                f"flwr {flower} is installed, and this FedStrata was tested with 1.41: pip install 'flwr>=1.41,<1.42'"
            )
        return f"fedstrata {__version__}, flwr {flower}, jax {jax}, Python {sys.version.split()[0]}"

    def programs(self) -> str:
        path = environment(Path())["PATH"]
        if lacking := [name for name in PROGRAMS if shutil.which(name, path=path) is None]:
            raise Wrong(f"{', '.join(lacking)} not found beside this Python: pip install 'fedstrata[flower]'")
        return "all found"

    def approval(self) -> str:
        found = fingerprint(self.app)
        if found not in approved(self.site.folder / self.site.approved):
            raise Wrong(f"version {found[:16]} is not approved here: read {self.app}, then `fedstrata deploy approve`")
        return f"version {found[:16]}, approved; the server's must be the same"

    def state(self) -> str:
        folder = self.site.folder / self.site.state
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
            raise Wrong(f"{folder} must belong to this user alone: chmod 700 {folder}")
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
        socket_frames.address(folder)
        try:
            lines = site_log.lines_of(folder / site_log.FILE) if (folder / site_log.FILE).exists() else ()
            self.runs = {line["run"] for line in lines if line["kind"] == "terms"}
        except SiteLogError as error:
            raise Wrong(str(error)) from None
        return "writable, by its owner alone" + ("; its log is whole" if lines else "")

    def port(self) -> str:
        if is_held(self.site.folder / self.site.state / LOCK):
            return f"{self.site.port}; this site's SuperNode runs"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.site.port))
            except OSError as error:
                raise Wrong(
                    f"port {self.site.port} of this machine cannot be used ({error.strerror}): stop the program that "
                    "has it, or set another port in the site's file"
                ) from None
        return f"{self.site.port} is free"

    def policy(self) -> str:
        """In plain words; a mistake if it would refuse a run of this app."""
        policy = self.site.policy
        if self.deployment is not None and self.data is not None:
            named = self.deployment.sites
            own = DataSummary.of(self.site.site, self.data, key="0")
            if not isinstance(named, int) and own.site not in named:
                raise Wrong(f"the app names the sites {', '.join(named)}, and this one is {own.site}")
            if len(self.runs) >= policy.runs_at_most:
                raise Wrong(
                    f"it would refuse a new run: {len(self.runs)} have begun here; the site's owner may raise "
                    "runs_at_most"
                )
            counts = {name: rows or max(own.counts.values()) for name, rows in own.counts.items()}
            other = lambda i: own._replace(site=f"another-{i}", key=str(i), counts=counts)
            others = [other(i) for i in range(1, self.deployment.site_count)]
            terms = Terms("this app", (own, *others), "", self.deployment.rounds, self.deployment.evaluations)
            with TemporaryDirectory() as folder:
                guard = Guard(policy._replace(runs=("*",)), SiteLog(Path(folder) / "log", own.site))
                try:
                    guard.check_terms(terms, own)
                    agreement = agree_on(self.deployment, terms.run, terms.sites)
                    guard.check_agreement(terms, agreement, own.site)
                    guard.check_parts(agreement.context.problem, self.data, own.site)
                except Refused as error:
                    raise Wrong(f"it would refuse this app: {error}") from None
                finally:
                    guard.log.close()
        return "; ".join(policy.words())

    def load_data(self) -> str:
        from fedstrata.deploy.flower.worker import checked_summary

        sys.path.insert(0, str(self.app))
        with contextlib.chdir(self.site.folder):
            deployment = resolve(self.where)
            data = deployment.load(self.site.node_config)
            again = deployment.load(self.site.node_config)
        summary = checked_summary(deployment, self.site.site, data)
        if data.fingerprint() != again.fingerprint():
            raise Wrong("`load` gives other data each time, which a run refuses: let it draw with a fixed seed")
        check_deployment(deployment)
        self.deployment, self.data = deployment, data
        rows = ", ".join(f"{name}: {count} rows" for name, count in summary.counts.items())
        if changed := self._changed_since(data):
            rows += f"; not as they were when {listed(changed, 3)} began here: resumed, such a run refuses this site"
        return rows

    def _changed_since(self, data: "Federation") -> list[str]:
        """The names of runs that began here with other data."""
        state, found = self.site.folder / self.site.state, []
        with contextlib.suppress(OSError, ValueError, DamagedFile):  # the site itself tells what is damaged
            secret = bytes.fromhex((state / SECRET).read_text())
            own = DataSummary.of(self.site.site, data, secret=secret)
            for path in sorted((state / "runs").glob(f"*/{TERMS}")):
                terms = Terms.decode(path.read_text())
                found += [terms.run] if terms.sites[terms.number(own.site)].data != own.data else []
        return found

    def one_round(self) -> str:
        """As the only site of a run: data that break the method are found now, and not in the middle of a run."""
        import jax

        from fedstrata.deploy.in_process import advance, in_process_run

        if self.deployment is None or self.data is None:
            raise Wrong("not checked: see above")
        options = {name: value for name, value in self.deployment.options.items() if name != "cohort"}
        problem, own = self.deployment.problem, DataSummary.of(self.site.site, self.data)
        if problem.may_lack and (empty := [name for name in {*problem.streams.values()} if not own.counts[name]]):
            self.state_bytes = agree_on(self.deployment, "check", [own]).state_bytes()
            return f"not run: without rows of split {empty[0]!r} the method cannot run on this site's data alone"
        server, sites, _ = in_process_run(problem, self.deployment.algorithm, self.data, **options)
        began = time.monotonic()
        now = advance(server, 1)
        if not all(np.all(np.isfinite(a)) for a in jax.tree.leaves(server.solution(now))):
            raise Wrong("after one round on this site's data alone the parameters are not finite: check the data")
        self.state_bytes = sum(a.nbytes for a in sites[0].store.read(now.after[0]).values())
        return f"finite, {time.monotonic() - began:.1f} s with compilation; {self.state_bytes / 1e6:.1f} MB of state"

    def disk(self) -> str:
        if self.state_bytes is None:
            raise Wrong("not checked: see above")
        folder = self.site.folder / self.site.state
        free, need = shutil.disk_usage(folder).free, 4 * self.state_bytes + 10e6
        if free < need:
            raise Wrong(f"{free / 1e6:.0f} MB are free at {folder}, and {need / 1e6:.0f} MB are needed")
        return f"{free / 1e9:.1f} GB free"

    def private_key(self) -> str:
        path, name = self.site.private_key, self.site.site
        if not path.exists():
            raise Wrong(f"there is no {path}: create it with `fedstrata deploy keys {name}`")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise Wrong(f"others can read {path}: chmod 600 {path}")
        if not isinstance(load_ssh_private_key(path.read_bytes(), None), EllipticCurvePrivateKey):
            raise Wrong(f"{path} is not a key on a NIST curve: create one with `fedstrata deploy keys {name}`")
        return f"{path.name}, readable by its owner alone"

    def authority(self) -> str:
        path = self.site.folder / self.site.authority
        if not path.exists():
            raise Wrong(f"there is no {path}: the server's owner creates it with `fedstrata deploy keys server`")
        if path.stat().st_mode & 0o022:
            raise Wrong(f"others can change {path}, which tells the site who is the server: chmod 644 {path}")
        left = days_left(path)
        if left <= 0:
            raise Wrong(f"{path} expired {-left:.0f} days ago: the server's owner creates new keys")
        return f"expires in {left:.0f} days"

    def server(self) -> str:
        self._request("GET", "/")  # any response is good
        return f"{self.site.server} responds" + ("" if self.site.insecure else ", with the right certificate")

    def clock(self) -> str:
        if not self.reached:
            raise Wrong("not checked: see above")
        if not self.time.received:
            return "the server does not send its time"
        if abs(self.time.seen) > LARGEST:
            raise Wrong(f"this clock is {self.time.told()}: set it")
        if self.time.offset:
            return f"this clock is {self.time.told()}: set it; until then, signatures use the server's time"
        return f"within {max(abs(self.time.seen), 1):.0f} s of the server's"

    def registered(self) -> str:
        """Ask to be activated with an impossible interval: a registered key is told so, and nothing changes."""
        if not self.reached or not self.site.private_key.exists():
            raise Wrong("not checked: see above")
        status, body = self._request("POST", "/v1/fleet/activate-node", *activation(self.site.private_key, self.time))
        found = FlowerError.from_json(body)
        name = self.site.site
        if found is not None and found.code == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
            return f"the server has the key of {name}"
        if found is not None and found.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            public = self.site.private_key.with_suffix(".pub").name
            raise Wrong(
                f"the server does not know this key: send it {public}; there, `fedstrata deploy register {public}`"
            )
        if status == 401:
            raise Wrong(f"the server refuses this site's signature: {why_rejected(status, self.time)}")
        raise Wrong(f"{self.site.server} answers with {status}, not as a SuperLink of Flower would")

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> tuple[int, str]:
        """Status and text of a response; its date sets the clock."""
        site = self.site
        host, port = split_address(site.server)
        if site.insecure:
            connection: HTTPConnection = HTTPConnection(host, port, timeout=10)
        else:
            context = ssl.create_default_context(cafile=str(site.folder / site.authority))
            connection = HTTPSConnection(host, port, timeout=10, context=context)
        began = time.monotonic()
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            text = response.read(2**16).decode(errors="replace")
        except ssl.SSLCertVerificationError as error:
            raise Wrong(
                f"{site.server} is not the server that {site.authority} was made for: {error.verify_message}"
            ) from None
        except (OSError, HTTPException) as error:
            raise Wrong(
                f"no response from {site.server} ({error}): is the SuperLink running, and the port open?"
            ) from None
        finally:
            connection.close()
        self.reached = True
        self.time.learn(response.getheader("Date"), time.monotonic() - began)
        return response.status, text


def activation(private_key: Path, clock: ServerClock) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request to activate a node that changes nothing, signed as Flower's SuperNode signs.

    Args:
        private_key: the site's.
        clock: gives the time to sign.
    """
    key = load_ssh_private_key(private_key.read_bytes(), None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise Wrong("not checked: see above")
    public, now = public_key_to_bytes(key.public_key()), clock.now().isoformat()
    encoded = lambda data: b64encode(data).decode()
    headers = {
        "content-type": PROTOBUF_MEDIA_TYPE,
        "accept": PROTOBUF_MEDIA_TYPE,
        FLEET_HTTP_PUBLIC_KEY_HEADER: encoded(public),
        TIMESTAMP_HEADER: now,
        FLEET_HTTP_SIGNATURE_HEADER: encoded(sign_message(key, now.encode())),
    }
    return ActivateNodeRequest(public_key=public, heartbeat_interval=0.0).SerializeToString(), headers
