"""Texts from a peer: one printable line each, whatever they hold."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from fedstrata.base.text import has_controls, one_line

any_text = st.text(st.characters(codec=None, categories=None), max_size=60)  # lone surrogates included


@given(any_text, st.integers(1, 80))
def test_a_line_is_printable_short_and_can_be_written_to_any_log(text, longest):
    line = one_line(text, longest)
    assert len(line) <= longest
    assert line.isprintable()
    line.encode()  # no lone surrogate
    assert len(line.splitlines()) <= 1
    assert one_line(line, longest) == line


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=60))
def test_printable_texts_stay_as_they_are(text):
    assert one_line(text) == text
    assert not has_controls(text)


def test_what_could_forge_a_line_or_hide_a_text_is_escaped():
    assert one_line("a\nb\rc\td\x1b[31m\x00\x85") == r"a\nb\rc\td\x1b[31m\x00\x85"
    assert one_line("\u2028\u2029\u202e\u2066\u200f\ud800\U000e0041") == (
        r"\u2028\u2029\u202e\u2066\u200f\ud800\U000e0041"
    )
    assert one_line("Köln, 東京, C:\\data") == "Köln, 東京, C:\\data"
    assert one_line("a" * 10**6) == "a" * 299 + "…"
    assert one_line(ValueError("no\nline")) == r"no\nline"


@given(any_text)
def test_controls_are_found_by_their_class(text):
    worst = {"Cc", "Cs", "Zl", "Zp"}
    direction = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    bad = any(unicodedata.category(c) in worst or unicodedata.bidirectional(c) in direction for c in text)
    assert has_controls(text) >= bad
