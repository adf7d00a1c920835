"""A registered site that forges the objects of which Flower makes a reply. They are counted before any are made."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedstrata.base.strict_json import LONGEST
from fedstrata.deploy.flower import patches, supernode
from fedstrata.deploy.flower.client_app import record
from fedstrata.deploy.flower.pulling import Replies, Unreadable

MOST = 10_000_000


@pytest.fixture
def bounded(monkeypatch, hurry):
    module = patches.importlib.import_module("flwr.superlink.grid.http_grid")
    for name in ("pull_objects", "inflate_object_from_contents"):
        monkeypatch.setattr(module, name, getattr(module, name))
    patches.bounded_messages(patches.SERVER_APP, MOST)


def reply_with(more, body=b"x" * 1000):
    call = Message(record({"call": "token"}, b""), 7, "train.phase0")
    call.metadata.__dict__.update(_message_id=call.object_id, _run_id=1)
    return Message(RecordDict({**record({"call": "token"}, body), **more}), reply_to=call)


def repeated(contents, tree, times):
    """The reply's contents and tree, with an array that names its part many times, as the SuperLink accepts them."""
    children = [repeated(contents, child, times) for child in tree.children]
    head, _, body = contents[tree.object_id].partition(b"\0")
    kind, ids, _ = head.decode().split(" ")
    if kind == "Array":
        body = json.dumps({**json.loads(body), "arraychunk_ids": [0] * times}).encode()
    for old, (new, _) in zip(tree.children, children, strict=True):
        ids, body = ids.replace(old.object_id, new), body.replace(old.object_id.encode(), new.encode())
    content = f"{kind} {ids} {len(body)}".encode() + b"\0" + body
    validate_object_content(content)
    contents[new := get_object_id(content)] = content
    return new, ObjectTree(object_id=new, children=[found for _, found in children])


def fetched(reply, times=1):
    """What the server gets, and how many objects were fetched."""
    contents, pulls = {i: found.deflate() for i, found in get_all_nested_objects(reply).items()}, []
    root, tree = repeated(contents, get_object_tree(reply), times)
    about = message_to_proto(remove_content_from_message(reply))
    about.metadata.message_id = root

    def pull_object(request):
        pulls.append(request.object_id)
        return PullObjectResponse(object_found=True, object_available=True, object_content=contents[request.object_id])

    grid = HttpGrid("127.0.0.1:1", insecure=True, token="t")
    grid._run = SimpleNamespace(run_id=1)
    grid._client = SimpleNamespace(
        PullMessages=lambda request: PullAppMessagesResponse(messages_list=[about], message_object_trees=[tree]),
        PullObject=pull_object,
        ConfirmMessageReceived=lambda request: None,
    )
    [(_, found)] = Replies(grid).pulled({reply.metadata.reply_to_message_id: "site-1"})
    return found, len(pulls)


def test_an_honest_reply_passes(bounded):
    found, pulls = fetched(reply_with({}))
    assert found.content["body"]["letter"].data.endswith(b"x" * 1000)
    assert pulls == 6


def test_an_array_that_names_one_part_again_and_again_is_refused_before_it_is_made(bounded):
    found, _ = fetched(reply_with({}, b"x" * 2**20), times=100_000)
    assert isinstance(found, Unreadable)
    assert "at most 10,000,000 are allowed" in found.why


def test_an_object_that_is_named_many_times_is_fetched_once(bounded):
    array = Array(dtype="uint8", shape=(1,), stype="numpy.ndarray", data=b"x" * 1000)
    found, pulls = fetched(reply_with({f"{i}": ArrayRecord({f"{i}": array}) for i in range(50)}))
    assert not isinstance(found, Unreadable)
    assert pulls < 60


def test_a_reply_of_many_objects_or_bytes_is_refused(bounded):
    many = {f"{i}": ArrayRecord({f"{i}": Array("uint8", (1,), "x", b"%d" % i)}) for i in range(400)}
    assert "objects" in fetched(reply_with(many))[0].why
    assert "a message of more than 10,000,000 bytes" in fetched(reply_with({}, b"x" * (MOST + patches.HEADS)))[0].why
    text = {"text": ConfigRecord({"text": "x" * LONGEST})}
    assert not isinstance(fetched(reply_with(text))[0], Unreadable)
    numbers = {"numbers": ConfigRecord({"numbers": [0] * patches.HEADS})}
    assert "bytes beside its arrays" in fetched(reply_with(numbers))[0].why


def test_replies_are_bounded_by_what_the_run_sends(bounded):
    """A site that sends more than any reply of the run has is refused before its parts are put together."""
    patches.limited_pulls(2_000_000, 30.0)
    assert not isinstance(fetched(reply_with({}, b"x" * 1_900_000))[0], Unreadable)
    assert "at most 2,000,000 are allowed" in fetched(reply_with({}, b"x" * 2_100_000))[0].why


@pytest.mark.parametrize(("kept", "most"), [('{"call_bytes": 5}', 5), ("{", 256_000_000), (None, 256_000_000)])
def test_a_sites_policy_bounds_its_calls_before_they_are_fetched(kept, most, tmp_path, monkeypatch):
    """With a damaged policy, the worker refuses every call."""
    monkeypatch.setenv(supernode.STATE, str(tmp_path))
    if kept is not None:
        (tmp_path / "policy.json").write_text(kept)
    assert supernode.longest_call() == most


def test_a_call_that_names_one_part_again_and_again_is_refused_at_a_site(monkeypatch, hurry):
    """Also at the SuperNode, which fetches the parts of a call and does not put them together."""
    inflatable = patches.importlib.import_module(patches.CLIENT_APP)
    for name in ("pull_objects", "inflate_object_from_contents"):
        monkeypatch.setattr(inflatable, name, getattr(inflatable, name))
    patches.bounded_messages(patches.CLIENT_APP, MOST)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    call = Message(record({"call": "token"}, b"x" * 2**20), 7, "train.phase0")
    call.metadata.__dict__.update(_message_id=call.object_id, _run_id=1)
    contents = {i: found.deflate() for i, found in get_all_nested_objects(call).items()}
    fetch = lambda tree: inflatable.pull_and_inflate_object_from_tree(
        tree, lambda i: contents[i], lambda i: None, return_type=Message
    )
    assert fetch(get_object_tree(call)).content["body"]["letter"].data.endswith(b"x")
    _, tree = repeated(contents, get_object_tree(call), 100_000)
    with pytest.raises(ValueError, match="at most 10,000,000 are allowed"):
        fetch(tree)
    node = patches.importlib.import_module(patches.SUPERNODE)
    monkeypatch.setattr(node, "pull_objects", node.pull_objects)
    patches.bounded_messages(patches.SUPERNODE, MOST)
    with pytest.raises(ValueError, match="a message of 2,000 objects"):
        node.pull_objects([str(i) for i in range(2000)], pull_object_fn=lambda i: b"")
