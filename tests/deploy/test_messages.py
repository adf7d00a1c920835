"""Messages: decoding inverts encoding, and malformed bytes are refused."""

import numpy as np
import pytest

from fedstrata.deploy.messages import Message, Stage, unpack

MESSAGE = Message(
    "run 1", Stage(3, 1, 1, 0), "Ulm", {"x": np.arange(3.0), "n": np.int32([1])}, Stage(2, 4), {"h": [0, -1]}
)


def test_decoding_inverts_encoding():
    again = Message.decode(MESSAGE.encode())
    assert again._replace(arrays={}) == MESSAGE._replace(arrays={})
    assert all(
        np.array_equal(again.arrays[n], a) and again.arrays[n].dtype == a.dtype for n, a in MESSAGE.arrays.items()
    )
    assert Message.decode(Message("r", Stage(-1, 0), "s", {}).encode()) == Message("r", Stage(-1, 0), "s", {})


def test_every_cut_is_refused():
    whole = MESSAGE.encode()
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="message"):
            Message.decode(whole[:end])


@pytest.mark.parametrize(
    "header",
    ["[]", '"x"', "{}", '{"run":"r","site":"s","stage":[1],"after":null,"pools":null}'.replace("[1]", '["a",0]'),
     '{"run":"r","site":"s","stage":[0,0,0,0,0],"after":null,"pools":null}',
     '{"run":"r","site":"s","stage":[0,0],"after":[true,0],"pools":null}',
     '{"run":"r","site":"s","stage":[0,0],"after":null,"pools":[1]}',
     '{"run":"r","site":"s","stage":[0],"after":null,"pools":null}',
     '{"run":"r","site":"s","stage":[2147483648,0],"after":null,"pools":null}',
     '{"run":"r","site":"s","stage":[0,0],"after":[0,-2147483648],"pools":null}',
     '{"run":"r","site":"s","stage":[0,0],"after":[],"pools":null}',
     '{"run":"r","site":"s","stage":"00","after":null,"pools":null}',
     '{"run":"r","site":"s","stage":[0,0],"after":null,"pools":{"h":[2147483648]}}',
     '{"run":"r","site":"s","stage":[0,0],"after":null,"pools":{"h":3}}',
     '{"run":"r","site":"s","stage":[0,0],"after":null,"pools":{"h":{}}}',
     '{"run":"r","site":"s","stage":[0,0],"after":null,"pools":{"' + "h" * 513 + '":[]}}',
     '{"run":5,"site":"s","stage":[0,0],"after":null,"pools":null}',
     '{"run":"r","site":null,"stage":[0,0],"after":null,"pools":null}',
     '{"run":"r","run":"r","site":"s","stage":[0,0],"after":null,"pools":null}',
     '{"run":"' + "r" * 129 + '","site":"s","stage":[0,0],"after":null,"pools":null}',
     '{"run":"r","site":"\\u0007","stage":[0,0],"after":null,"pools":null}',
     '{"run":"r","site":"\\u202e","stage":[0,0],"after":null,"pools":null}',
     '{"run":"r","site":"\\ud800","stage":[0,0],"after":null,"pools":null}',
     '{"run":"r","site":"s","stage":[0.0,0],"after":null,"pools":null}',
     '{"run":"r","site":"s","stage":[1' + "0" * 5000 + ',0],"after":null,"pools":null}',
     "[" * 5000],
    ids=lambda header: header[:70],
)  # fmt: skip
def test_odd_headers_are_refused(header):
    text = header.encode()
    body = Message("r", Stage(0, 0), "s", {}).encode()
    data = body[:4] + len(text).to_bytes(4, "little") + text + body[-10:]
    with pytest.raises(ValueError, match=r"^message: unreadable header .{0,200}$"):
        Message.decode(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "r" * 201}, "the name of the run must be a text of at most 128 characters"),
        ({"site": "Ulm\n"}, r"the name of the site .* not Ulm\\n\)"),
        ({"stage": Stage(2**31, 0)}, "stage must be 2 to 4 whole numbers below 2\\^31"),
        ({"after": Stage(0, True)}, "after must be 2 to 4 whole numbers"),
        ({"pools": {"h": [2**31]}}, "pools must be lists of whole numbers"),
        ({"pools": {"h": [1] * 100_001}}, "header would be refused: more than 100,000 values"),
        ({"arrays": {"x": np.broadcast_to(np.zeros(()), (2**28 - 12,))}}, "bytes, and at most"),
    ],
    ids=["run", "site", "stage", "after", "pools", "many writers", "arrays"],
)
def test_a_sender_finds_out_first(change, words):
    with pytest.raises(ValueError, match=words):
        MESSAGE._replace(**change).encode()


def test_the_writers_of_many_rows_travel():
    writers = MESSAGE._replace(arrays={}, pools={"h": list(range(99_000))})
    assert Message.decode(writers.encode()) == writers


def test_unexpected_names_of_a_reply_are_shown_in_one_short_line():
    arrays = {f"{i}\n" * 100: np.ones(2) for i in range(1_000)}
    with pytest.raises(ValueError, match=r"^message: unexpected .{0,400} and 995 more$"):
        unpack(arrays, None, ())
