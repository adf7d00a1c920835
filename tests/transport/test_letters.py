"""Letters: what is written is read again, and nothing that is malformed is taken for one."""

import numpy as np
import pytest

from fedstrata.transport.letters import Letter, Stage

LETTER = Letter(
    "run 1", Stage(3, 1, 1, 0), "Ulm", {"x": np.arange(3.0), "n": np.int32([1])}, Stage(2, 4), {"h": [0, -1]}
)


def test_a_letter_is_read_as_it_was_written():
    again = Letter.decode(LETTER.encode())
    assert again._replace(arrays={}) == LETTER._replace(arrays={})
    assert all(
        np.array_equal(again.arrays[n], a) and again.arrays[n].dtype == a.dtype for n, a in LETTER.arrays.items()
    )
    assert Letter.decode(Letter("r", Stage(-1, 0), "s", {}).encode()) == Letter("r", Stage(-1, 0), "s", {})


def test_every_cut_is_refused():
    whole = LETTER.encode()
    for end in range(len(whole)):
        with pytest.raises(ValueError, match=r"letter|message"):
            Letter.decode(whole[:end])


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
    body = Letter("r", Stage(0, 0), "s", {}).encode()
    data = body[:4] + len(text).to_bytes(4, "little") + text + body[-10:]
    with pytest.raises(ValueError, match="letter: unreadable header"):
        Letter.decode(data)
