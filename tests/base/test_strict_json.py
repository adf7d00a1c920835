"""JSON from a peer: what Python's reader accepts within the limits is read alike; everything else is a short error."""

import contextlib
import gc
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.base import strict_json

texts = st.text(max_size=8)
leaves = st.none() | st.booleans() | st.integers(-(10**19) + 1, 10**19 - 1) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))


@given(values, st.booleans())
def test_values_come_back(value, escaped):
    text = json.dumps(value, ensure_ascii=escaped)
    assert strict_json.loads(text, objects=1000) == value
    assert strict_json.loads(text.encode(), objects=1000) == value


digits = st.text('1"\\\\', max_size=60) | st.integers(0, 10**25).map(str) | st.integers(-(10**25), 10**25)


@given(st.recursive(digits, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(digits.map(str), inner)))
def test_digits_in_a_text_are_no_number(value):
    def too_long(value):
        if isinstance(value, int):
            return abs(value) >= 10**strict_json.DIGITS
        return not isinstance(value, str) and any(map(too_long, value.values() if isinstance(value, dict) else value))

    if too_long(value):
        with pytest.raises(ValueError, match=r"a number of 2\d digits"):
            strict_json.loads(json.dumps(value), objects=1000)
    else:
        assert strict_json.loads(json.dumps(value), objects=1000) == value


@given(st.binary(max_size=80) | st.text('[]{}",:\\u019dDa-.eE ', max_size=40).map(str.encode))
def test_any_bytes_give_a_value_or_a_short_error(data):
    error = ""
    try:
        found = strict_json.loads(data, objects=3)
    except ValueError as refused:
        error = str(refused)
    else:
        assert found == json.loads(data)
        json.dumps(found, ensure_ascii=False).encode()  # no lone surrogate
    assert len(error) < 400


MIB = strict_json.LONGEST
BAD = {
    "too long": (b" " * MIB + b"[]", "1,048,578 bytes"),
    "many values": (b"[" + b"1," * strict_json.VALUES + b"1,1]", "more than 100,000 values"),
    "many keys": (b"{" + b",".join(b'"%d":[1]' % i for i in range(60_000)) + b"}", "more than 20,000 keys"),
    "many digits": (b"[" + b"9" * (MIB - 2) + b"]", "1048574 digits"),
    "twenty digits": (b"[-10000000000000000000]", "20 digits"),
    "digits, and quotes without end": (b"[" + b"1" * 20 + b',"' + b'\\"' * (MIB // 2 - 20), "20 digits"),
    "digits in a text, and quotes without end": (b'["' + b"1" * 20 + b'\\"' * (MIB // 2 - 20), "Unterminated string"),
    "a fraction": (b"[1.5]", "1.5 is not a whole number"),
    "a long fraction": (b"[1." + b"1" * 1_000_000 + b"]", "a number of 1000000 digits"),
    "an exponent": (b"[1e400]", "1e400 is not a whole number"),
    "NaN": (b"[NaN]", "NaN is not a whole number"),
    "infinity": (b"[-Infinity]", "-Infinity is not a whole number"),
    "deep lists": (b"[" * MIB, "nested too deeply"),
    "deep objects": (b'{"":' * 20_000, "nested too deeply"),
    "a repeated key": (b'{"a": 1, "a": 2}', "a repeated key"),
    "many objects": (b"[{},{},{}]", "more than 2 objects"),
    "a lone surrogate": (rb'["\ud83d"]', "not valid Unicode"),
    "a pair in the wrong order": (rb'["\ude00\ud83d"]', "not valid Unicode"),
    "a surrogate as a key": (rb'{"\uDEAD": 1}', "not valid Unicode"),
    "a surrogate after many escapes": (b'["' + b"\\\\" * (MIB // 2 - 10) + b'\\ud83d"]', "not valid Unicode"),
    "UTF-16": ("[1]".encode("utf-16"), "not valid Unicode"),
    "a byte order mark": (b"\xef\xbb\xbf[]", "BOM"),
    "a control character": (b'["\x00"]', "control character"),
}


@pytest.mark.parametrize("why", BAD)
def test_what_is_beyond_a_limit_is_refused_at_once(why):
    data, words = BAD[why]
    taken = []
    for _ in range(3):
        start = time.process_time()
        with pytest.raises(ValueError, match=words):
            strict_json.loads(data, objects=2)
        taken.append(time.process_time() - start)
    assert min(taken) < 0.05


def test_pairs_of_surrogates_and_escaped_backslashes_are_texts():
    assert strict_json.loads(rb'["\ud83d\ude00", "\\ud83d", "\\\\\ud83d\ude00"]') == ["😀", "\\ud83d", "\\\\😀"]


def test_the_garbage_collector_runs_again_after_any_text():
    """It pauses while a text is parsed: many small lists would start a walk through all objects of the process."""
    for data in (b"[]", b"[" * 5_000, b"nothing"):
        with contextlib.suppress(ValueError):
            strict_json.loads(data)
        assert gc.isenabled()
    gc.disable()
    try:
        strict_json.loads(b"[]")
        assert not gc.isenabled()  # whoever disabled it enables it
    finally:
        gc.enable()


def test_many_small_lists_start_no_full_collection():
    old, before = gc.get_threshold(), gc.get_stats()[2]["collections"]
    gc.set_threshold(700, 10, 10)
    try:
        for _ in range(3):
            strict_json.loads(b"[" + b"[]," * 99_000 + b"[]]")
        assert gc.get_stats()[2]["collections"] <= before + 1
    finally:
        gc.set_threshold(*old)
