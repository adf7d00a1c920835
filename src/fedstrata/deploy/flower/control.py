"""What an operator asks the SuperLink: its runs and nodes, to stop a run, to remove a site's key."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StopRunRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedstrata.deploy.flower.config import ServerConfig
from fedstrata.deploy.flower.keys import AUTHORITY

NEWEST = 1000  # runs among which one that has not finished is looked for


class UnknownRun(ConnectionError):
    """The SuperLink has no run of this number."""


class AlreadyEnded(ConnectionError):
    """The run that is to be stopped has ended."""


class FlowerNode(NamedTuple):
    """A registered site, as the SuperLink has it."""

    id: int
    status: str  # registered, online, offline
    public_key: bytes


class FlowerRun(NamedTuple):
    """A run, as the SuperLink has it."""

    id: int
    status: str  # pending, starting, running, finished
    outcome: str  # completed, failed, stopped; empty if it has not finished
    details: str

    @property
    def completed(self) -> bool:
        """Whether it finished without an error."""
        return (self.status, self.outcome) == ("finished", "completed")


class Control:
    """The SuperLink's interface for operators. Errors are OSErrors in one line."""

    def __init__(self, server: ServerConfig):
        """An interface that has not connected yet.

        Args:
            server: where the SuperLink is, and its authority.
        """
        trust = None if server.insecure else (server.folder / server.keys / AUTHORITY).read_bytes()
        version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
        self.address = server.own_address
        self.client = ControlHttpClient.from_server_address(self.address, server.insecure, trust, [version])

    def nodes(self) -> list[FlowerNode]:
        """All sites whose keys are registered."""
        with self._translated():
            found = self.client.ListNodes(ListNodesRequest()).nodes_info
        return [FlowerNode(n.node_id, n.status, n.public_key) for n in found if n.status != "unregistered"]

    def run(self, number: int) -> FlowerRun | None:
        """One run; None if the SuperLink does not know it. Asked by its number: a list has only the newest runs."""
        try:
            with self._translated():
                found = self.client.ListRuns(ListRunsRequest(run_id=number)).run_dict
        except UnknownRun:
            return None
        status = found[number].status
        return FlowerRun(number, status.status, status.sub_status, status.details)

    def unfinished(self, name: str, folder: Path) -> list[int]:
        """The numbers of runs of this name that were submitted and have not finished, also those that only start.

        Args:
            name: the run's, in FedStrata's words.
            folder: of the server's runs.
        """
        with self._translated():
            found = self.client.ListRuns(ListRunsRequest(limit=NEWEST)).run_dict
        mine = lambda run: {k: run.override_config[k].string for k in ("run", "folder") if k in run.override_config}
        wanted = {"run": name, "folder": str(folder)}
        return [number for number, run in found.items() if run.status.status != "finished" and mine(run) == wanted]

    def stop(self, number: int) -> None:
        """Stop a run.

        Raises:
            AlreadyEnded: there is nothing to stop.
        """
        with self._translated():
            if not self.client.StopRun(StopRunRequest(run_id=number)).success:
                raise ConnectionError(f"the SuperLink could not stop its run {number}")

    def unregister(self, node: int) -> None:
        """Remove a site's key."""
        with self._translated():
            self.client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def close(self) -> None:
        """Close the connection."""
        self.client.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPStatusError as error:
            found = FlowerError.from_json(error.response.text)
            if found is not None and found.code == ApiErrorCode.RUN_ID_NOT_FOUND:
                raise UnknownRun(f"the SuperLink at {self.address} has no such run") from None
            if found is not None and found.code == ApiErrorCode.RUN_ALREADY_FINISHED:
                raise AlreadyEnded(f"the run at {self.address} has ended") from None
            why = found.message if found is not None else f"status {error.response.status_code}"
            raise ConnectionError(f"the SuperLink at {self.address} refuses this: {why}") from None
        except httpx.HTTPError as error:
            raise ConnectionError(f"no response from the SuperLink at {self.address}: {error}") from None


def public_key(file: Path) -> bytes:
    """A site's public key as the SuperLink stores it.

    Args:
        file: a .pub file.
    """
    try:
        found = load_ssh_public_key(file.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        found = None
    if not isinstance(found, EllipticCurvePublicKey):
        raise ValueError(f"{file} is not a key on a NIST curve, as `fedstrata deploy keys` creates it")
    return public_key_to_bytes(found)
