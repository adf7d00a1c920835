"""A site's log that was changed: the site says where, and answers nothing. What a crash left behind is mended."""

import json
import os

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from attackers import VICTIM, call_of, limit, log_of

from fedstrata.deploy.journal import Journal
from fedstrata.deploy.site_log import FIRST, SiteLog, SiteLogError, broken, line_hash


def edited(line, **entries):
    """A line with other entries, and the hash that fits them: only the next line tells."""
    found = {**json.loads(line), **entries}
    return json.dumps({**found, "hash": line_hash(found)}, sort_keys=True, separators=(",", ":")).encode()


CHANGES = {  # of the lines of a log; with the number of the first line that is wrong
    "a number": (lambda lines: [*lines[:3], lines[3].replace(b'"bytes":94', b'"bytes":93'), *lines[4:]], 4),
    "a name": (lambda lines: [*lines[:2], lines[2].replace(b'"first"', b'"fi_st"'), *lines[3:]], 3),
    "a verdict": (lambda lines: [*lines[:4], lines[4].replace(b'"sent"', b'"kept"')], 5),
    "a line with its hash": (lambda lines: [*lines[:3], edited(lines[3], bytes=1), *lines[4:]], 5),
    "a space": (lambda lines: [lines[0].replace(b":", b": ", 1), *lines[1:]], 1),
    "one left out": (lambda lines: [*lines[:2], *lines[3:]], 3),
    "the first left out": (lambda lines: lines[1:], 1),
    "two swapped": (lambda lines: [*lines[:3], lines[4], lines[3]], 4),
    "one moved to the end": (lambda lines: [lines[0], *lines[2:], lines[1]], 2),
    "one twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
    "one inserted": (lambda lines: [*lines[:3], edited(lines[3], n=3, kind="torn"), *lines[3:]], 5),
    "an empty line": (lambda lines: [*lines[:3], b"", *lines[3:]], 4),
    "no object": (lambda lines: [*lines[:3], b"5", *lines[4:]], 4),
    "nothing but nesting": (lambda lines: [b"[" * 100_000, *lines[1:]], 1),
    "no text": (lambda lines: [*lines[:1], b"\xff\xfe\x00", *lines[2:]], 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_log_that_was_changed_names_the_line_and_ends_all_answers(attacker, begun, worked, expected, change):
    path = begun.victim / "log.jsonl"
    lines = path.read_bytes().splitlines()
    make, number = CHANGES[change]
    after = make(lines)
    assert after != lines
    path.write_bytes(b"\n".join(after) + b"\n")
    why = rf"line {number} of .*log.jsonl was changed, moved or left out; find out who did it\. .*, move the file away"
    for _ in range(2):
        with pytest.raises(SiteLogError, match=why):
            attacker.sends(call_of())
    assert f"line {number} " in broken(path)
    assert worked == []
    assert path.read_bytes() == b"\n".join(after) + b"\n"  # evidence
    path.rename(path.with_suffix(".old"))  # the remedy
    assert begun.finishes(expected)
    assert [line["verdict"] for line in log_of(begun.victim) if line["kind"] == "terms"] == [
        "agreed before this log began"
    ]


def test_every_flipped_byte_of_a_log_is_found(begun, tmp_path):
    data = (begun.victim / "log.jsonl").read_bytes()
    path = tmp_path / "log"
    changed = set()
    for place in range(len(data)):
        damaged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        changed.add(damaged)
        path.write_bytes(damaged)
        with pytest.raises(SiteLogError, match=r"log was changed|the end of .*log is not a line"):
            SiteLog(path, VICTIM)
    assert len(changed) == len(data)


def test_a_line_that_a_crash_cut_short_is_replaced_by_one_that_says_so(begun, tmp_path):
    """It was being written, so that nothing had left yet."""
    data = (begun.victim / "log.jsonl").read_bytes()
    start, path = data.rfind(b"\n", 0, -1) + 1, tmp_path / "log"
    for end in range(start + 1, len(data)):
        path.write_bytes(data[:end])
        SiteLog(path, VICTIM).close()
        whole = end == len(data) - 1  # only the end of the line is missing
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
        assert kinds[4:] == (["answer"] if whole else ["torn"])
        assert broken(path) == ""
        log = SiteLog(path, VICTIM)
        assert Journal(log).answered("first").answers == (2 if whole else 1)
        log.close()


@pytest.mark.parametrize("end", [-1, -40, None], ids=["but its end", "cut short", "whole"])
def test_zeros_that_a_power_cut_leaves_at_the_end_are_taken_for_a_torn_line(begun, tmp_path, end):
    """The file has grown, and what was to be there was not written."""
    data, path = (begun.victim / "log.jsonl").read_bytes(), tmp_path / "log"
    path.write_bytes(data[:end] + b"\0" * 500)
    SiteLog(path, VICTIM).close()
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds[4:] == {-1: ["answer"], -40: ["torn"], None: ["answer", "torn"]}[end]
    assert broken(path) == ""


def test_a_disk_that_takes_a_part_and_does_not_give_it_back_ends_the_log(begun, tmp_path, monkeypatch):
    """A further line would be joined to the part, and the next start would find a log that somebody has changed."""
    path, real = tmp_path / "log", os.write
    path.write_bytes((begun.victim / "log.jsonl").read_bytes())
    log = SiteLog(path, VICTIM)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, text: real(file, text[: len(text) // 2]))
        full.setattr(os, "ftruncate", lambda file, size: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(SiteLogError, match="No space left"):
            log.add("policy")
    with pytest.raises(SiteLogError, match=r"an earlier line of .* may be torn; start the site again"):
        log.add("policy")
    log.close()
    SiteLog(path, VICTIM).close()
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "torn"


@pytest.mark.parametrize(
    "end", [b"\0" * 50 + b"x", b"\0" * 2**23, b"garbage", b'{"a": 1}', b"[1]", b"{\xff", b"{" + b"a" * 2**22]
)
def test_an_end_that_no_crash_leaves_is_not_taken_for_one(attacker, begun, end):
    path = begun.victim / "log.jsonl"
    data = path.read_bytes()
    path.write_bytes(data + end)
    with pytest.raises(SiteLogError, match=r"the end of .*log.jsonl is not a line that this site began; find out who"):
        attacker.sends(call_of())
    assert path.read_bytes() == data + end


def test_a_full_disk_ends_all_answers_and_leaves_the_log_whole(attacker, begun, monkeypatch, expected):
    """The disk takes a part of a line. Nothing leaves; once there is room, the same call is answered."""
    real, path = os.write, begun.victim / "log.jsonl"
    limit(begun)
    attacker.evaluates()
    before = path.read_bytes()
    monkeypatch.setattr(os, "write", lambda file, text: real(file, text[: len(text) // 2]))
    for _ in range(2):
        with pytest.raises(SiteLogError, match=r"cannot write .*log.jsonl: No space left .*; nothing was answered"):
            attacker.sends(call_of(x=0.5))
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert attacker.sends(call_of(x=0.5)).arrays
    assert broken(path) == ""


def test_a_second_process_does_not_write_the_same_log(attacker, begun):
    attacker.sends(call_of())
    with pytest.raises(SiteLogError, match=r"another process writes .*log.jsonl; stop it first"):
        SiteLog(begun.victim / "log.jsonl", VICTIM)


def test_texts_of_a_server_forge_no_line(attacker, begun):
    """Names and reasons with line ends, of any length."""
    lines = len(log_of(begun.victim))
    forged = '"}\n{"n": 99, "kind": "answer", "verdict": "sent"}'
    journal = begun.grid.workers[str(begun.victim)]._guard(VICTIM).journal
    journal.write_refusal(forged, [0, 0], forged + "\u2028\r" + "x" * 10_000)
    text = (begun.victim / "log.jsonl").read_text()
    assert len(text.splitlines()) == len(log_of(begun.victim)) == lines + 1
    assert len(text.splitlines()[-1]) < 1900
    assert broken(begun.victim / "log.jsonl") == ""


def test_the_first_line_of_a_log_begins_a_chain(begun):
    lines = log_of(begun.victim)
    assert lines[0]["prev"] == FIRST
    assert [line["prev"] for line in lines[1:]] == [line["hash"] for line in lines[:-1]]
    assert all(line["hash"] == line_hash(line) for line in lines)
    assert [line["kind"] for line in lines] == ["policy", "summary", "terms", "answer", "answer"]
