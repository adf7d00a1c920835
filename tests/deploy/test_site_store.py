"""Folders of runs at a site: one per run, on every file system."""

import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedstrata.deploy.site_store import run_folder

names = st.text(st.characters(codec=None, categories=None), max_size=80) | st.text("ab._-A/+", max_size=5)


def seen(folder):
    """A name as a file system sees it that does not distinguish cases and forms of one letter."""
    return unicodedata.normalize("NFKC", folder).casefold()


@settings(max_examples=300)
@given(names, names)
@example("a.b", "a_b")
@example("First", "first")
@example("caf\u00e9", "cafe\u0301")
@example("", "_")
@example("a" * 64, "a" * 65)
@example("a" * 64, "a" * 64 + ".")
def test_different_runs_have_different_folders(one, other):
    assert (seen(run_folder(one)) == seen(run_folder(other))) == (one == other)


@given(names)
@example("")
@example(".")
@example("..")
@example("../../etc/passwd")
@example("C:\\runs")
@example("a\0b")
@example("\ud800")
@example("x" * 10_000)
def test_a_folder_is_valid_everywhere(run):
    folder = run_folder(run)
    assert 1 <= len(folder) <= 65
    assert folder.isascii()
    assert all(c.isalnum() or c in "_-+" for c in folder)
    assert run_folder(folder) == folder or "+" in folder


@pytest.mark.parametrize("run", ["first", "run-2_b", "2026-01-31", "a" * 64])
def test_short_plain_names_stay(run):
    assert run_folder(run) == run


@pytest.mark.parametrize("run", ["con", "nul", "com1", "lpt9", "aux", "prn"])
def test_names_of_devices_do_not(run):
    assert run_folder(run).startswith(f"{run}+")
