"""Flower's SuperNode with shorter waits; it reconnects after a crash, and signs with the server's time.

`patches` has the details. It is the only SuperNode of its state folder, and its helper processes end soon after it.
One of these is Flower's SuperExec, which starts a program for every message. It runs client apps only, and no other
user of the machine can take a message or its token.
"""

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path

from fedstrata.base.errors import StateError
from fedstrata.deploy.flower import patches
from fedstrata.deploy.flower.fork_server import TOKEN
from fedstrata.deploy.flower.run_lock import held, is_held, private
from fedstrata.deploy.policy import Policy
from fedstrata.deploy.server_clock import ServerClock
from fedstrata.deploy.state_files import DamagedFile, write_text

LOCK, WORKER = "site.lock", "worker.lock"  # of the SuperNode and of the worker, in the site's state folder
SETTINGS, SECRET = "settings.toml", "superexec.secret"  # what Flower reads there: the site's settings, and a key
STATE = "FEDSTRATA_STATE"  # the variable that names this folder
SITE = "FEDSTRATA_SITE"  # the variable that names the site's .toml file
SUPEREXEC = "superexec"  # the first argument of the process that starts a program for every message
APPROVED = "FEDSTRATA_APPROVED"  # the variable that names the list of approved apps
GRACE = 20.0  # seconds after which helpers end if their SuperNode does not come back
STOPPING = 10.0  # seconds in which a SuperNode may end that was stopped together with its SuperExec
LEAST_RESPONSE = 2**26  # bytes of a response that can always be read: the bundle of an app, for one
PARENT = 1.0  # seconds between two checks of the SuperExec whether its SuperNode lives

log = logging.getLogger("fedstrata")


class SiteWatch:
    """Tells the helpers of a site, its worker and its forking process, that its SuperNode is gone."""

    def __init__(self, folder: Path, grace: float = GRACE):
        """A watch that has not looked yet.

        Args:
            folder: the site's state.
            grace: seconds for which the SuperNode may be away.
        """
        self.lock, self.grace, self.since, self.seen = folder / LOCK, grace, None, False

    def gone(self) -> bool:
        """Whether the SuperNode, or its folder, has been away for the time of grace; False if there never was one."""
        found = is_held(self.lock)
        self.seen = self.seen or found is not None
        if found or not self.seen:
            self.since = None
            return False
        self.since = time.monotonic() if self.since is None else self.since
        return time.monotonic() - self.since >= self.grace


@contextlib.contextmanager
def only_supernode(folder: Path) -> Iterator[None]:
    """Be the only SuperNode of a state folder; SystemExit with a message if there is another one.

    Args:
        folder: the site's state.
    """
    private(folder)
    with held(folder / LOCK, str(os.getpid())) as mine:
        if not mine:
            pid = (folder / LOCK).read_text().strip() or "unknown"
            raise SystemExit(
                f"error: a SuperNode of this site runs already (process {pid}, which holds {folder / LOCK}): stop it "
                "first, or give the second site a state folder of its own"
            )
        yield


def end_worker(folder: Path) -> None:
    """End the worker of an earlier SuperNode: whoever restarts a site may have changed its data or its packages.

    A call that it was working on is repeated, with the same result.

    Args:
        folder: the site's state.
    """
    until = time.monotonic() + GRACE
    while is_held(folder / WORKER) and time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError):  # it has just ended, or has not written its number yet
            number = int((folder / WORKER).read_text())
            if _is_worker(number):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


def keep_policy(file: Path) -> None:
    """Write policy and settings of the site's file into its state folder; SystemExit if the file is refused.

    A service that was written with `fedstrata deploy site --print` starts this program alone.

    Args:
        file: the site's .toml file, as it is now.
    """
    from fedstrata.deploy.flower.config import SiteConfig, owner_only

    try:
        owner_only(file)
        SiteConfig.read(file).keep()
    except (OSError, ValueError, TypeError, StateError) as error:
        raise SystemExit(f"error: {error}") from None


def _is_worker(number: int) -> bool:
    """Whether a process may be a worker; only Linux tells for sure."""
    about = Path(f"/proc/{number}/cmdline")
    return b"fedstrata.deploy.flower.worker" in about.read_bytes() if about.exists() else not Path("/proc").exists()


def start_superexec(folder: Path, arguments: list[str]) -> None:
    """Start the SuperExec of this process, with a new key for its requests. This process ends if the SuperExec ends.

    With Flower's own, any user of the machine can ask the SuperNode for its messages.

    Args:
        folder: the site's state.
        arguments: of the SuperNode.
    """
    write_text(folder / SECRET, secrets.token_hex(32))
    host, port = (arguments[arguments.index(option) + 1] for option in ("--host", "--port"))
    words = ["--insecure", "--runtime-api-address", f"{host}:{port}", "--parent-pid", str(os.getpid())]
    words += ["--superexec-auth-secret-file", str(folder / SECRET)]
    process = subprocess.Popen([sys.executable, "-P", "-m", "fedstrata.deploy.flower.supernode", SUPEREXEC, *words])
    threading.Thread(target=end_after, args=(process,), daemon=True).start()


def end_after(superexec: subprocess.Popen) -> None:
    """Wait for the SuperExec, and end this process with an error, so that whoever manages its service starts it again.

    Without it the site looks online, and starts no program for a message.

    Args:
        superexec: the process.
    """
    code = superexec.wait()
    time.sleep(STOPPING)  # a signal to all processes of the service ends both, each in its own time
    log.error("the SuperExec of this site has ended (status %s), and so does its SuperNode: start it again", code)
    os._exit(1)


def longest_call() -> int:
    """The most bytes of a call by this site's policy; the default if that is damaged: then the worker refuses all."""
    folder, policy = os.environ.get(STATE), None
    with contextlib.suppress(DamagedFile):
        policy = Policy.kept_in(Path(folder)) if folder else None
    return (policy or Policy()).call_bytes


def run_superexec() -> None:
    """Run Flower's SuperExec with the arguments of this process."""
    from flwr.supercore.cli import flower_superexec

    patches.plain_logs()
    patches.only_client_apps()
    patches.hidden_tokens(TOKEN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    flower_superexec()


def end_with_parent() -> None:
    """End this process when the SuperNode that its arguments name is not its parent any more.

    Flower looks for a process of this number only, and a dead one that nobody has waited for keeps its number.
    """
    parent = int(sys.argv[sys.argv.index("--parent-pid") + 1])
    while os.getppid() == parent:
        time.sleep(PARENT)
    os._exit(1)


def approved_apps() -> Callable[[], Set[str]] | None:
    """What returns the hashes of approved bundles; None if this SuperNode was started without a list of them."""
    from fedstrata.deploy.flower.approval import approved

    return partial(approved, Path(file)) if (file := os.environ.get(APPROVED)) else None


def main() -> None:
    """Run the SuperNode with the arguments of this process."""
    os.umask(0o077)
    if sys.argv[1:2] == [SUPEREXEC]:
        sys.argv = ["flower-superexec", *sys.argv[2:]]
        return run_superexec()
    folder = os.environ.get(STATE)
    with only_supernode(Path(folder)) if folder else contextlib.nullcontext():
        if folder:
            end_worker(Path(folder))
            if file := os.environ.get(SITE):
                keep_policy(Path(file))
            start_superexec(Path(folder), sys.argv)
        from flwr.supercore.exit import ExitCode, flwr_exit
        from flwr.supernode.cli import flower_supernode

        patches.plain_logs()
        patches.short_sleeps(patches.SUPERNODE)
        patches.short_pulls()
        patches.short_heartbeats()
        clock = ServerClock()
        patches.sign_with_the_servers_time(clock)
        patches.persistent_activation(clock)
        patches.persistent_connections()
        patches.only_runs_of_server_apps(approved_apps())
        patches.bounded_messages(patches.SUPERNODE, longest_call())
        patches.bounded_responses(max(longest_call() + patches.HEADS, LEAST_RESPONSE))
        patches.failures_are_answered()
        sys.argv[0] = "flower-supernode"
        try:
            flower_supernode()
        except Exception:
            log.exception("Flower's SuperNode has ended")
        # It returns only after an error, and its web server would keep the process alive, deaf to the server.
        flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, "The connection to the SuperLink has ended: see above.")


if __name__ == "__main__":
    main()
