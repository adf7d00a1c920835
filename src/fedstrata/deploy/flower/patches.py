"""Every change that is made to Flower's modules. No other file assigns to their attributes.

Flower's fixed waits suit rounds of minutes; an exchange here may take milliseconds. Its SuperNode ends if the server
rejects it after a crash, because its clock is wrong, or after a minute without a network; after a run was stopped, it
is late. Its client app runs whatever app the server sends, and its logs repeat what a peer sent. Each function below
changes one of these.
"""

import dataclasses
import importlib
import json
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Set
from functools import partial, wraps
from hashlib import sha256
from typing import Any

from fedstrata.base.few_lines import FewLines
from fedstrata.base.text import one_line
from fedstrata.deploy.server_clock import ServerClock, why_rejected

POLL = 0.5  # seconds between two polls of the server by a site; Flower: 3
NEARBY = 0.05  # seconds between two polls of a process on the same machine; Flower: 0.5 to 1
HEARTBEAT = 10.0  # seconds; Flower counts a node as gone after two missed heartbeats
REJECTED = 30.0  # seconds for which a site that the server rejects tries again
RETRY = 2.0  # seconds between two of these attempts

OBJECTS = 1000  # of Flower in a message; one of ours has five, and one for every 5 MiB
HEADS = 2**20 + 2**17  # bytes of its objects that are no parts of arrays: those of a JSON text, and of Flower's own

LOGS = "flwr", "uvicorn.error"  # the loggers of Flower's programs, and of the web servers in them
LONGEST = 2000  # characters of a line in their logs

log = logging.getLogger("fedstrata")


def plain_logs() -> None:
    """Write each record of Flower's logs as one line of printable characters.

    Flower logs texts of a peer as they are: with line ends a site could forge lines in the server's log, or the server
    in a site's, and with escape codes hide others.
    """
    for name in LOGS:
        logging.getLogger(name).addFilter(_plain)


def _plain(record: logging.LogRecord) -> bool:
    try:
        text = record.getMessage()
    except Exception:  # the record does not fit its arguments, and logging must not end its caller
        text = f"{record.msg} {record.args}"
    record.msg, record.args = one_line(text, LONGEST), ()
    if record.exc_info and not record.exc_text:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
    if record.exc_text:  # its last lines may quote a peer; after the bar, none looks like a line of the log
        record.exc_text = "\n".join(f"| {one_line(line, LONGEST)}" for line in record.exc_text.splitlines())
    return True


def short_sleeps(module: str) -> None:
    """Shorten the sleeps of a module that runs at a site: long ones wait for the server, short ones for this machine.

    Args:
        module: the name of one of Flower's modules; it gets its own `time`.
    """
    replaced: Any = types.ModuleType("time")
    replaced.__dict__.update({name: value for name, value in vars(time).items() if not name.startswith("__")})
    replaced.sleep = lambda seconds: time.sleep(POLL if seconds > 1 else NEARBY)
    importlib.import_module(module).__dict__["time"] = replaced


def short_pulls(longest: float | None = None) -> None:
    """Poll soon for the missing parts of a message.

    Args:
        longest: seconds after which a message with missing parts counts as lost. None: Flower's two hours, for which
            the server would wait for a site that died while it was sending.
    """
    module: Any = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    for function in (module.pull_objects, module.pull_and_inflate_object_from_tree):
        function.__kwdefaults__["initial_backoff"] = NEARBY
        if longest is not None:
            function.__kwdefaults__["max_time"] = longest
            function.__kwdefaults__["backoff_cap"] = min(longest / 4, function.__kwdefaults__["backoff_cap"])


SERVER_APP = "flwr.superlink.grid.http_grid"  # where a server app fetches replies,
CLIENT_APP = "flwr.supercore.inflatable.inflatable_utils"  # a client app its message,
SUPERNODE = "flwr.supernode.start_client_internal"  # and a SuperNode the same, without putting it together


def bounded_messages(module: str, most: int) -> None:
    """Refuse a message whose objects are too many or too large, before Flower puts them together.

    Flower fetches an object as often as a message names it, and an array may name one part again and again: 5 MB become
    500 GB of memory. Its records of settings take thirty times as much memory as they have bytes.

    Args:
        module: where its objects are fetched: `SERVER_APP`, `CLIENT_APP` or `SUPERNODE`.
        most: the limit on the bytes of its arrays, as sent and as put together; a later call replaces it.
    """
    found: Any = importlib.import_module(module)
    for name, bounded in (("pull_objects", _few), ("inflate_object_from_contents", _small)):
        if (function := getattr(found, name, None)) is not None:
            setattr(found, name, bounded(getattr(function, "__wrapped__", function), most))


def limited_pulls(most: int, longest: float) -> None:
    """In a server app: how large the replies may be that are fetched from now on, and how long one may take.

    Args:
        most: as in `bounded_messages`.
        longest: as in `short_pulls`.
    """
    bounded_messages(SERVER_APP, most)
    short_pulls(longest)


def _few(pull: Callable[..., dict[str, bytes]], most: int) -> Callable[..., dict[str, bytes]]:
    @wraps(pull)
    def pulled(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **given: Any) -> dict[str, bytes]:
        ids, sizes = list(dict.fromkeys(object_ids)), []
        if len(ids) > OBJECTS:
            raise ValueError(f"a message of {len(ids):,} objects; at most {OBJECTS:,} are allowed")

        def counted(object_id: str) -> bytes:
            found = pull_object_fn(object_id)
            sizes.append(len(found))
            if sum(sizes) > most + HEADS:
                raise ValueError(f"a message of more than {most:,} bytes")
            return found

        return pull(ids, counted, **given)

    return pulled


def _small(inflate: Callable[..., Any], most: int) -> Callable[..., Any]:
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of

    @wraps(inflate)
    def inflated(object_id: str, object_contents: dict[str, bytes], **given: Any) -> Any:
        total = heads = 0
        for content in object_contents.values():
            kind, children, length = head_of(content)
            if kind == "ArrayChunk":
                continue
            if (heads := heads + len(content)) > HEADS:
                raise ValueError(f"a message with {heads:,} bytes beside its arrays; at most {HEADS:,} are allowed")
            if kind == "Array":
                parts = json.loads(content[len(content) - length :])["arraychunk_ids"]
                total += sum(len(object_contents[children[part]]) for part in parts)
        if total > most:
            raise ValueError(f"a message whose arrays have {total:,} bytes; at most {most:,} are allowed")
        return inflate(object_id, object_contents, **given)

    return inflated


def short_heartbeats() -> None:
    """Let the server notice a dead SuperNode, and accept its successor, after twenty seconds and not after a minute."""
    for name in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
        importlib.import_module(name).__dict__["HEARTBEAT_DEFAULT_INTERVAL"] = HEARTBEAT


def only_runs_of_server_apps(approved: Callable[[], Set[str]] | None = None) -> None:
    """Let a SuperNode take messages only of running runs of approved apps that a server app leads.

    It sends replies when ready.

    In any other run, of an agent app for one, Flower starts a program that unpacks and runs whatever bundle the server
    sends. Messages of a run that is stopped while they arrive are dropped: Flower answers them nevertheless. But it
    sends replies only after it has received a message, the oldest first: from then on, each would be one message late.

    Flower unpacks a bundle's settings here, without a limit, long before the client app's check of the bundle: a small
    bundle can fill the memory. So bundles that are not approved are refused here, too. The server is told why.

    Args:
        approved: returns the hashes of approved bundles; None: every bundle is taken.
    """
    module: Any = importlib.import_module(SUPERNODE)
    pull = _of_approved_apps(module._pull_and_store_message, approved, module._insert_message)
    module._pull_and_store_message = _refusing(pull, module.RunNotRunningException)


class _NotApproved(Exception):
    """The bundle of a run is not approved at this site."""


def _of_approved_apps(
    pull: Callable[..., Any], approved: Callable[[], Set[str]] | None, answer: Callable[..., None]
) -> Callable[..., Any]:
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

    if approved is None:
        return pull
    few = FewLines(log)

    def check(found: str) -> None:
        try:
            known = approved()
        except OSError as error:  # the list can be changed by others, or cannot be read
            few.write(logging.ERROR, one_line(f"no app is approved: {error}"))
            known = frozenset()
        if found not in known:
            raise _NotApproved(f"this site has not approved version {one_line(found[:16])} of the app")

    def checked(get_fab: Callable[..., Any], fab_hash: str, number: int) -> Any:
        check(fab_hash)  # before the bundle is fetched,
        fab = get_fab(fab_hash, number)
        check(sha256(fab.content).hexdigest())  # and that this is what was sent
        return fab

    def pulled(state: Any, object_store: Any, receive: Callable[[], Any], get_fab: Any, **given: Any) -> int | None:
        received: list[Any] = []

        def kept() -> Any:
            received.append(receive())
            return received[-1]

        given |= {"state": state, "object_store": object_store, "receive": kept, "get_fab": partial(checked, get_fab)}
        try:
            return pull(**given)
        except _NotApproved as error:
            message = received[-1][0]
            few.write(logging.ERROR, f"refused run {message.metadata.run_id}: {error}")
            reply = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=message)
            answer(reply, state, object_store)
            return message.metadata.run_id

    return pulled


def _refusing(pull: Callable[..., Any], stopped: type[Exception]) -> Callable[..., Any]:
    from flwr.supercore.constant import TaskType

    few = FewLines(log)

    def failing(part: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return part(*arguments)
        except stopped:
            raise RuntimeError("its run was stopped") from None  # after any other error, Flower drops the message

    def of_server_app(get_run: Callable[[int], Any], number: int) -> Any:
        run = get_run(number)
        if run.primary_task_type != TaskType.SERVER_APP:
            leads = one_line(run.primary_task_type, 100)
            few.write(logging.ERROR, f"refused run {number}, which a {leads} leads: sites run client apps only")
            raise stopped
        return run

    def pulled(state: Any, get_run: Any, pull_object: Any, confirm_message_received: Any, **given: Any) -> int | None:
        parts, confirm = partial(failing, pull_object), partial(failing, confirm_message_received)
        given |= {"get_run": partial(of_server_app, get_run), "pull_object": parts, "confirm_message_received": confirm}
        if (run := pull(state=state, **given)) is not None:
            return run
        with state.lock_msg_store:
            ready = [e.message.metadata for e in state.msg_store.values() if not e.is_retrieved]
        return next((about.run_id for about in ready if about.reply_to_message_id), None)

    return pulled


def failures_are_answered() -> None:
    """Let a SuperNode answer a message whose client app has failed before it could, e.g. because the call is too large.

    Flower waits for the client app's own reply to that message, and takes no other message of the run until then.
    """
    module: Any = importlib.import_module("flwr.supernode.nodestate.in_memory_nodestate")
    state = module.InMemoryNodeState
    finish = getattr(state.finish_task, "__wrapped__", state.finish_task)
    state.finish_task = _answering(finish, module.CLIENT_APP_CRASHED_ERROR)


def _answering(finish: Callable[..., bool], error: Any) -> Callable[..., bool]:
    from flwr.common.constant import SubStatus
    from flwr.supercore.constant import TaskType

    @wraps(finish)
    def finished(self: Any, task_id: int, sub_status: str, details: str) -> bool:
        done = finish(self, task_id, sub_status, details)
        if done and sub_status == SubStatus.FAILED:
            runs = {task.run_id for task in self.get_tasks(task_ids=[task_id]) if task.type == TaskType.CLIENT_APP}
            self._store_error_replies(runs, error)  # to messages without a reply
        return done

    return finished


def bounded_responses(most: int) -> None:
    """Let Flower's programs read a response of at most so many bytes, not compressed, and from the server itself.

    A compressed response takes a thousand times its bytes of memory, before anybody counts them; and a redirection
    makes a site send requests to other machines in its network.

    Args:
        most: bytes of a response.
    """
    client: Any = importlib.import_module("flwr.supercore.protobuf.client").ProtobufClient
    client.__init__ = _bounding(getattr(client.__init__, "__wrapped__", client.__init__), most)


def _bounding(make: Callable[..., None], most: int) -> Callable[..., None]:
    import httpx

    class Counted(httpx.SyncByteStream):
        def __init__(self, stream: Any):
            self.stream, self.left = stream, most

        def __iter__(self) -> Iterator[bytes]:
            for piece in self.stream:
                if (left := self.left - len(piece)) < 0:
                    raise ValueError(f"a response of more than {most:,} bytes")
                self.left = left
                yield piece

        def close(self) -> None:
            self.stream.close()

    def count(response: httpx.Response) -> None:
        if (coding := response.headers.get("content-encoding", "identity")) != "identity":
            raise ValueError(f"a response that is compressed, though it must not be ({one_line(coding, 100)})")
        response.stream = Counted(response.stream)

    @wraps(make)
    def made(self: Any, *arguments: Any, **given: Any) -> None:
        make(self, *arguments, **given)
        self._client.follow_redirects = False
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [count]}

    return made


def only_client_apps() -> None:
    """Let Flower's SuperExec take tasks of client apps only. Its other programs run any bundle, without a check."""
    from flwr.supercore.constant import TaskType

    plugin: Any = importlib.import_module("flwr.supercore.superexec.run_superexec").AutoExecPlugin
    plugin.supported_task_types = frozenset({TaskType.CLIENT_APP})


def hidden_tokens(variable: str) -> None:
    """Keep the token of a task out of the command of its program, which all users of a machine can read.

    Args:
        variable: of the program's environment, which holds the token.
    """
    module: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    module.SubprocessExecutor.launch = _hiding(module.SubprocessExecutor.launch, variable)


def _hiding(launch: Callable[..., Any], variable: str) -> Callable[..., Any]:
    @wraps(launch)
    def launched(self: Any, spec: Any) -> Any:
        os.environ[variable] = spec.token
        try:
            return launch(self, dataclasses.replace(spec, token=f"${variable}"))
        finally:
            del os.environ[variable]

    return launched


def persistent_connections() -> None:
    """Let a SuperNode try again after a TLS handshake without an answer. Flower takes it for a wrong certificate."""
    module: Any = importlib.import_module("flwr.supernode.fleet_http_connection")
    module.make_simple_http_retry_invoker = _patient(module.make_simple_http_retry_invoker)


def _patient(make: Callable[[], Any]) -> Callable[[], Any]:
    def patient() -> Any:
        invoker = make()
        invoker.should_giveup = lambda error, ends=invoker.should_giveup: not _passes(error) and ends(error)
        return invoker

    return patient


def _passes(error: Exception) -> bool:
    """Whether an error of a connection may pass: the network was silent, or the other side closed it."""
    import httpx

    text = str(error).lower()
    closed = any(word in text for word in ("eof", "reset by peer", "broken pipe")) and "certificate" not in text
    return isinstance(error, httpx.TimeoutException) or (isinstance(error, httpx.NetworkError) and closed)


def persistent_activation(clock: ServerClock | None = None) -> None:
    """Let a SuperNode try again if the server rejects it: after a crash, until its last heartbeat has expired.

    Args:
        clock: that of the signatures, for the message about a rejection.
    """
    client: Any = importlib.import_module("flwr.supernode.fleet_http_client").FleetHttpClient
    client.ActivateNode = _repeated(client.ActivateNode, clock)


def _repeated(activate: Callable[..., Any], clock: ServerClock | None = None) -> Callable[..., Any]:
    import httpx

    def repeated(*arguments: Any) -> Any:
        until = time.monotonic() + REJECTED
        while True:
            try:
                return activate(*arguments)
            except httpx.HTTPStatusError as error:
                if time.monotonic() > until:
                    log.error("the server rejects this site: %s", why_rejected(error.response.status_code, clock))
                    raise
                status = error.response.status_code
                log.warning("the server does not accept this site yet: %s Trying again", why_rejected(status, clock))
            time.sleep(RETRY)

    return repeated


def sign_with_the_servers_time(clock: ServerClock) -> None:
    """Let a SuperNode sign the server's time and not its own. A rejected request is sent again with the right time.

    Args:
        clock: follows the server's.
    """
    module: Any = importlib.import_module("flwr.supernode.node_auth_http_interceptor")
    module.now = clock.now
    signer = module.NodeAuthHttpInterceptor
    signed = (module.FLEET_HTTP_PUBLIC_KEY_HEADER, module.TIMESTAMP_HEADER, module.FLEET_HTTP_SIGNATURE_HEADER)
    signer.intercept = _corrected(signer.intercept, clock, signed)


def _corrected(intercept: Callable[..., Any], clock: ServerClock, signed: tuple[str, ...]) -> Callable[..., Any]:
    def corrected(self: Any, context: Any, call_next: Callable[[Any], Any]) -> Any:
        began = time.monotonic()
        response = intercept(self, context, call_next)
        refused, waited = response.status_code == 401, time.monotonic() - began
        if clock.learn(response.headers.get("date"), 0.0 if refused else waited) and refused:
            response.close()
            for name in signed:  # Flower refuses to replace headers
                del context.request.headers[name]
            response = intercept(self, context, call_next)
            clock.learn(response.headers.get("date"))
        return response

    return corrected


def client_app_alone() -> None:
    """Import Flower's client app without its SuperNode, whose database takes half of the import time."""
    unused: Any = types.ModuleType("flwr.supernode.cli.flower_supernode")
    unused.flower_supernode = None
    sys.modules[unused.__name__] = unused


def guard_installation(installing: Callable[..., Any], locating: Callable[..., Any]) -> None:
    """Put checks before the functions with which Flower's client app unpacks an app and finds its folder.

    Args:
        installing: returns the first function with its check.
        locating: returns the second function with its check.
    """
    runner: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    loader: Any = importlib.import_module("flwr.clientapp.utils")
    runner.install_from_fab = installing(runner.install_from_fab)
    runner.get_project_dir = locating(runner.get_project_dir)
    loader.get_project_dir = locating(loader.get_project_dir)
