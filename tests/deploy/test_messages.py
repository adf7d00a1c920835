"""Messages: decoding inverts encoding, and malformed bytes are refused."""

import numpy as np
import pytest

from fedstrata.deploy.messages import Message, Stage

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
     "[" * 5000],
)  # fmt: skip
def test_odd_headers_are_refused(header):
    text = header.encode()
    body = Message("r", Stage(0, 0), "s", {}).encode()
    data = body[:4] + len(text).to_bytes(4, "little") + text + body[-10:]
    with pytest.raises(ValueError, match="message: unreadable header"):
        Message.decode(data)
