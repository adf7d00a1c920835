"""Levels: indices as papers print them, and a state's tuple that stays as it is."""

import pytest

from fedstrata.core.levels import Levels


def test_levels_count_from_one_between_below_and_above():
    v = Levels(("a", "b"), below="x", above=None)
    assert [v[k] for k in range(4)] == ["x", "a", "b", None]
    assert (list(v), len(v)) == (["a", "b"], 2)


@pytest.mark.parametrize("level", [-1, 0, 3])
def test_a_level_that_was_not_given_is_refused(level):
    with pytest.raises(IndexError, match=f"no level {level}: these are levels 1 to 2"):
        Levels(("a", "b"))[level]


def test_levels_before_the_first_are_never_those_at_the_end():
    with pytest.raises(IndexError, match="no level -1"):
        Levels(("a", "b"), below="x")[-1]


def test_writing_leaves_the_tuple_as_it_is():
    given = ("a", "b")
    h = Levels(given, below="x")
    h[2] = "c"
    assert (given, tuple(h)) == (("a", "b"), ("a", "c"))


def test_a_recursion_reads_the_level_below_as_it_was_just_written():
    h = Levels(below=1)
    for k in range(1, 5):
        h[k] = 2 * h[k - 1]
    assert tuple(h) == (2, 4, 8, 16)


def test_a_recursion_from_above():
    v = Levels((1, 2, 3), above=10)
    for k in range(3, 0, -1):
        v[k] = v[k] + v[k + 1]
    assert tuple(v) == (16, 15, 13)


@pytest.mark.parametrize("level", [0, 3])
def test_below_and_above_are_not_written(level):
    with pytest.raises(IndexError, match=f"level {level} cannot be written: these are levels 1 to 2"):
        Levels(("a", "b"), below="x", above="y")[level] = "z"


def test_a_level_is_added_only_after_the_last():
    h = Levels()
    with pytest.raises(IndexError, match="level 2 cannot be written: there are none"):
        h[2] = "b"


def test_a_tuple_that_begins_with_level_zero():
    h = Levels.from_zero(("x", "a", "b"))
    assert (h[0], h[1], tuple(h)) == ("x", "a", ("a", "b"))
    assert repr(h) == "Levels(('a', 'b'), below='x')"
