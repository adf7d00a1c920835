"""What a malicious site may send in place of a data summary or a reply. A forgery takes what an honest site sends."""

import io
import json
import os
import pickle

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from grids import Failed

from fedstrata.data.validation import LARGEST
from fedstrata.deploy.flower.client_app import record

FORGED = "round 9, phase 0: 3 replied"  # must never start a line of a log
NASTY = f"x\r\n{FORGED}\x1b[2K\x1b]0;owned\x07\u202e\u2028{FORGED}\x00"


def _npy(array, **how):
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


class Bomb:
    """Its pickle makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def _pickled():
    return np.array([Bomb()], dtype=object)


def _letter(about, data, **changes):
    given = {"dtype": "uint8", "shape": (len(data),), "stype": "numpy.ndarray", "data": data, **changes}
    return RecordDict({"about": ConfigRecord(about), "body": ArrayRecord({"letter": Array(**given)})})


def _data(about, body):
    return record(about, body)["body"]["letter"].data


# By name: a function of an honest reply's header and bytes; what Flower delivers in their place.
CONTENTS = {
    "no content": lambda about, body: None,
    "a text": lambda about, body: "hello",
    "a list": lambda about, body: [about, body],
    "an empty record": lambda about, body: RecordDict({}),
    "no body": lambda about, body: RecordDict({"about": ConfigRecord(about)}),
    "no header": lambda about, body: RecordDict({"body": record(about, body)["body"]}),
    "metrics for a header": lambda about, body: RecordDict(
        {"about": MetricRecord({"call": 1}), "body": record(about, body)["body"]}
    ),
    "arrays for a header": lambda about, body: RecordDict(
        {"about": ArrayRecord({}), "body": record(about, body)["body"]}
    ),
    "a header for a body": lambda about, body: RecordDict({"about": ConfigRecord(about), "body": ConfigRecord({})}),
    "a body without a letter": lambda about, body: RecordDict({"about": ConfigRecord(about), "body": ArrayRecord({})}),
    "a header of 1000 entries": lambda about, body: record({**about, **{str(i): "x" * 100 for i in range(1000)}}, body),
    "a pickle": lambda about, body: _letter(about, _npy(_pickled(), allow_pickle=True)),
    "a bare pickle": lambda about, body: _letter(about, pickle.dumps(Bomb())),
    "a file of floats": lambda about, body: _letter(about, _npy(np.ones(16))),
    "no bytes at all": lambda about, body: _letter(about, b""),
    "half a header": lambda about, body: _letter(about, _data(about, body)[:64]),
    "bytes cut short": lambda about, body: _letter(about, _data(about, body + b"more")[:-4]),
    "bytes beyond the end": lambda about, body: _letter(about, _data(about, body) + b"more"),
    "another format version": lambda about, body: _letter(about, _data(about, body).replace(b"\x01\x00", b"\x02\x00")),
    "an error that is a number": lambda about, body: record({**about, "error": 5}, body),
    "an error that is bytes": lambda about, body: record({**about, "error": b"\xff" * 99}, body),
    "an error that is a long list": lambda about, body: record({**about, "error": [1.5] * 100_000}, body),
}

# Flower cannot read it, and forgets all replies that it has fetched together with it.
UNREADABLE = {
    type(error).__name__: lambda about, body, error=error: error
    for error in (ValueError(NASTY), KeyError("Message"), MemoryError(), EOFError(), RecursionError("x" * 10**6))
}

# The site says that it cannot answer. That is no offence, whatever it says.
EXCUSES = {
    "a text that forges a line": lambda about, body: record({**about, "error": NASTY}, body),
    "a text of 10 MB": lambda about, body: record({**about, "error": "\n" * 10_000_000}, body),
    "an empty text": lambda about, body: record({**about, "error": ""}, body),
    "an unknown error of Flower": lambda about, body: Failed(99, NASTY),
    "an error of Flower without anything": lambda about, body: Failed(None, None),
    "an exception in a client app": lambda about, body: Failed(2, "Traceback (most recent call last):\n" * 1000),
}

# Somebody else may have sent it, or Flower has lost something: the call is repeated.
LOST = {
    "no token": lambda about, body: record({n: v for n, v in about.items() if n != "call"}, body),
    "another token": lambda about, body: record({**about, "call": "0" * 32}, body),
    "a token that is a number": lambda about, body: record({**about, "call": 7}, body),
    "a message that Flower has lost": lambda about, body: Failed(3, NASTY),
    "a node that Flower has lost": lambda about, body: Failed(5),
}

# What is unusual, and harmless.
HARMLESS = {
    "another type": lambda about, body: _letter(about, _data(about, body), dtype="object", stype="pickle"),
    "another shape": lambda about, body: _letter(about, _data(about, body), shape=(10**18,)),
    "more entries": lambda about, body: record({**about, "more": [1, 2], "error2": b"x"}, body),
    "more records": lambda about, body: RecordDict({**record(about, body), "more": ConfigRecord({"x": 1})}),
}


def _summary(change):
    """A forgery of the header, from a change of the summary's rows: [site, counts, shapes, data, key, versions]."""

    def forged(about, body):
        rows = json.loads(about["survey"])
        found = change(rows)
        return record({**about, "survey": json.dumps(rows if found is None else found)}, body)

    return forged


def _text(text):
    return lambda about, body: record({**about, "survey": text}, body)


def _header(**changes):
    return lambda about, body: record({n: v for n, v in {**about, **changes}.items() if v is not None}, body)


def _put(place, *keys_and_value):
    """A summary with another value at a place: `_put(2, "train", "x", 5)`."""

    def change(rows):
        *keys, value = keys_and_value
        holder, last = rows, place
        for key in keys:
            holder, last = holder[last], key
        holder[last] = value

    return _summary(change)


def _unlike(**changes):
    """Splits that are in the counts, but not among the shapes."""
    return _summary(lambda rows: rows[1].update(changes))


NAMES = {"a newline": "x\ny", "an escape": "\x1b[2Kx", "an override": "x\u202ey", "a separator": "x\u2028y", "none": "",
         "a null": "x\0", "a megabyte": "x" * 2**20, "a number": 5, "a list": ["x"], "nothing": None}  # fmt: skip
COUNTS = {"negative": -1, "a truth value": True, "a fraction": 1.5, "a text": "9", "nothing": None, "2^31": 2**31,
          "2^31 + 9": 2**31 + 9, "2^32 + 9": 2**32 + 9, "2^63": 2**63, "a list": [9], "60 digits": 10**60}  # fmt: skip
SHAPES = {"a huge side": [10**18], "1000 dimensions": [1] * 1000, "a negative side": [-3], "a fraction": [1.5],
          "a truth value": [True], "a product beyond 64 bits": [2**31] * 4, "a text": "3", "nothing": None}  # fmt: skip
SUMMARIES = {
    "no summary": _header(survey=None),
    "no mark": _header(mark=None),
    "no key": _put(4, ""),
    "a summary that is a number": _header(survey=5),
    "a summary that is bytes": _header(survey=b"[]"),
    "a summary that is a list": _header(survey=["x"]),
    "a mark that is a number": _header(mark=5),
    "an empty mark": _header(mark=""),
    "a mark of a megabyte": _header(mark="x" * 2**20),
    "no JSON": _text("hello"),
    "an empty text": _text(""),
    "null": _text("null"),
    "an object": _text("{}"),
    "an empty list": _text("[]"),
    "a long text": _text("[" + "1," * 2**21 + "1]"),
    "deep nesting": _text("[" * 100_000),
    "a long integer": _text(f"[{'9' * 100_000}]"),
    "not a number": _text("[NaN]"),
    "half a pair of surrogates": _text(r'["\ud800"]'),
    "repeated keys": lambda about, body: record(
        {**about, "survey": about["survey"].replace('{"train":', '{"train": 1, "train":', 1)}, body
    ),
    "an older form": _summary(lambda rows: rows[:3]),
    "one entry more": _summary(lambda rows: [*rows, 1]),
    "an unknown type": _put(2, "train", "x", ["object", [3]]),
    "a type that is a list": _put(2, "train", "x", [["f8"], [3]]),
    "a column that is a text": _put(2, "train", "x", "f8"),
    "columns that are a list": _put(2, "train", [1]),
    "a column with a newline": _put(2, "train", "x\ny", ["float64", []]),
    "10,000 columns": _put(2, "train", {str(i): ["float64", []] for i in range(10_000)}),
    "no training data": _summary(lambda rows: [rows[0], {"test": 9}, {"test": rows[2]["train"]}, *rows[3:]]),
    "a split without a shape": _unlike(test=9),
    "a split with a newline": _summary(
        lambda rows: [rows[0], *({**part, NASTY: part["train"]} for part in rows[1:3]), *rows[3:]]
    ),
    "a version that is a number": _put(5, "jax", 5),
    "a version with a newline": _put(5, "jax", NASTY),
    "versions that are a list": _put(5, []),
    **{f"a name: {what}": _put(0, name) for what, name in NAMES.items()},
    **{f"a count: {what}": _put(1, "train", count) for what, count in COUNTS.items()},
    **{f"a shape: {what}": _put(2, "train", "x", ["float64", shape]) for what, shape in SHAPES.items()},
}

# Valid summaries that do not go with those of the others.
DISAGREEING = {
    "other columns": _put(2, "train", {"z": ["float64", [3]]}),
    "columns of another size": _put(2, "train", "x", ["float64", [4]]),
    "columns of another type": _put(2, "train", "x", ["float32", [3]]),
    "one split more": _summary(
        lambda rows: [rows[0], *({**part, "new": part["train"]} for part in rows[1:3]), *rows[3:]]
    ),
    "as many rows as can be counted": _put(1, "train", LARGEST),
}
