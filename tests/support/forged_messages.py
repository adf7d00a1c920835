"""Bytes that a malicious site may send in place of a reply: each forgery takes the bytes of an honest one."""

import json
import struct

import numpy as np

from fedstrata.deploy.messages import Message


def _changed(**changes):
    """The reply of another run, site or stage."""

    def forged(body):
        reply = Message.decode(body)
        given = {name: change(getattr(reply, name)) for name, change in changes.items()}
        return reply._replace(**given).encode()

    return forged


def _each(change):
    """A change of every array; of a reply without arrays, one that is not expected."""
    extra = {"x": np.zeros(3)}
    return _changed(arrays=lambda arrays: {name: change(array) for name, array in (arrays or extra).items()})


def _header(change, which=b"FSM1"):
    """A change of the inner header, in its text; lengths agree."""

    def forged(body):
        at = body.index(which) + 4
        length = struct.unpack_from("<I", body, at)[0]
        text = change(json.loads(body[at + 4 : at + 4 + length]))
        text = text.encode() if isinstance(text, str) else json.dumps(text).encode()
        return body[:at] + struct.pack("<I", len(text)) + text + body[at + 4 + length :]

    return forged


def _one(dtype, shape, name="x"):
    return _header(lambda fields: [[name, dtype, shape]])


def _outer(change):
    return _header(change, b"FSL1")


# By name: a function of an honest reply's bytes.
MESSAGES = {
    "no bytes": lambda body: b"",
    "noise": lambda body: np.random.default_rng(0).bytes(len(body) + 50),
    "other first letters": lambda body: b"PK\x03\x04" + body[4:],
    "other inner letters": lambda body: body.replace(b"FSM1", b"FSM9"),
    "one byte less": lambda body: body[:-1],
    "half of it": lambda body: body[: len(body) // 2],
    "one byte more": lambda body: body + b"\0",
    "twice": lambda body: body + body,
    "a huge header length": lambda body: body[:4] + b"\xff\xff\xff\xff" + body[8:],
    "a longer shape": _each(lambda a: np.zeros((*a.shape, 2), a.dtype)),
    "a flat shape": _each(lambda a: np.zeros(a.size + 1, a.dtype)),
    "half precision": _each(lambda a: np.zeros(a.shape, np.float16)),
    "integers": _each(lambda a: np.zeros(a.shape, np.int16)),
    "truth values": _each(lambda a: np.zeros(a.shape, bool) if a.dtype != bool else np.zeros(a.shape)),
    "complex numbers": _one("complex128", [3]),
    "objects": _one("object", [3]),
    "a type that is a list": _one(["f8"], [3]),
    "a type that is a number": _one(8, [3]),
    "a shape that is a text": _one("float64", "3"),
    "a shape of 10^18": _one("float64", [10**18]),
    "shapes whose product wraps to zero": _one("float64", [2**32, 2**32]),
    "a shape of nothing and much": _one("float64", [0, 10**18]),
    "1000 dimensions": _one("float64", [1] * 1000),
    "a negative side": _one("float64", [-3]),
    "more bytes than there are": _one("float64", [10**6]),
    "a name that is a number": _one("float64", [3], 5),
    "a name with a newline": _one("int8", [0], "x\n\x1b[2K"),
    "a long name": _one("int8", [0], "x" * 100_000),
    "100,000 fields": _header(lambda fields: [[str(i), "int8", [0]] for i in range(100_000)]),
    "9,999 fields": _header(lambda fields: [[str(i), "int8", [0]] for i in range(9_999)]),
    "repeated fields": _header(lambda fields: [["x", "int8", [0]]] * 2),
    "fields that are an object": _header(lambda fields: {"x": 1}),
    "a deep header": _header(lambda fields: "[" * 100_000),
    "a header that is a number": _header(lambda fields: "9" * 5000),
    "no header text": _header(lambda fields: ""),
    "no arrays, or others": _changed(arrays=lambda arrays: {} if arrays else {"x": np.zeros(3)}),
    "one array more": _changed(arrays=lambda arrays: {**arrays, "more": np.zeros(2)}),
    "other names": _changed(arrays=lambda arrays: {"y" + n: a for n, a in (arrays or {"": np.zeros(2)}).items()}),
    "another run": _changed(run=lambda run: run + "2"),
    "another site": _changed(site=lambda site: "site-0"),
    "another round": _changed(stage=lambda stage: stage._replace(round=stage.round + 1)),
    "another exchange": _changed(stage=lambda stage: stage._replace(exchange=stage.exchange + 1)),
    "another phase": _changed(stage=lambda stage: stage._replace(phase=7)),
    "a stage of texts": _outer(lambda about: {**about, "stage": ["0", "0"]}),
    "a stage beyond 32 bits": _outer(lambda about: {**about, "stage": [2**31, 0]}),
    "no stage": _outer(lambda about: {**about, "stage": None}),
    "a site that is a list": _outer(lambda about: {**about, "site": ["site-1"]}),
    "a run with a newline": _outer(lambda about: {**about, "run": "first\nround 9"}),
    "no run": _outer(lambda about: {n: v for n, v in about.items() if n != "run"}),
    "a header that is a list": _outer(lambda about: [1]),
}  # fmt: skip


def _said(name, value):
    return _changed(arrays=lambda arrays: {n: np.array(value, a.dtype) if n == name else a for n, a in arrays.items()})


# The same for replies to an evaluation.
EVALUATIONS = {
    "an infinite value": _said("said.values['train/objective']", np.inf),
    "a negative number of rows": _said("said.counts['train']", -1),
    "no rows": _said("said.counts['train']", 0),
    "more rows than can be counted": _said("said.counts['train']", 2**31),
    "more rows than it reported": _said("said.counts['train']", 1000),
    "rows that wrap in 32 bits": _said("said.counts['train']", 2**32 + 9),
    "as many rows as 64 bits": _said("said.counts['train']", 2**63 - 1),
    "scores that nobody wanted": _changed(arrays=lambda arrays: {**arrays, "said.scores['train']": np.zeros(9)}),
    "labels that nobody wanted": _changed(arrays=lambda arrays: {**arrays, "said.labels['train']": np.zeros(9, bool)}),
    "a truth value of 2": lambda body: body[:-1] + b"\2",
    "a measure more": _changed(arrays=lambda arrays: {**arrays, "said.values['train/x']": np.zeros(())}),
}

# Values that an evaluation accepts. Some of them cannot be written as JSON numbers.
ODD_MEASURES = {
    "undefined": _said("said.values['train/objective']", np.nan),
    "the largest number": _said("said.values['train/objective']", np.finfo(np.float64).max),
}
