"""Files in the folder of a run at the server, damaged or of an earlier release: a clear error, and nothing is lost."""

import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import simulated
from grids import NAME, SITES, TASK, deployment, grid, hurry, solution

from fedstrata.deploy.data_summary import DataSummary, versions
from fedstrata.deploy.flower import server_app
from fedstrata.deploy.flower.sites_file import Begun, Program
from fedstrata.engine.checkpoint import CheckpointError

__all__ = ["grid", "hurry"]  # fixtures

SEAL = "sha256"


def serve(grid, folder, rounds):
    return server_app.serve(deployment(rounds=rounds), grid, "first", folder)


@pytest.fixture(scope="module")
def expected():
    return simulated(NAME, 2).solution()


@pytest.fixture
def folder(grid, tmp_path):
    """The folder of a run after one round."""
    serve(grid, tmp_path / "out", 1)
    return tmp_path / "out"


@pytest.fixture
def written(tmp_path):
    """The file of a run of three sites."""
    summaries = [DataSummary.of(f"site-{i}", TASK.federation.select([i])) for i in range(SITES)]
    marks = {summary.site: "0" * 32 for summary in summaries}
    Begun(summaries, marks, Program({"seed": 5}, {"jax": "0.1"}, "1"), "0" * 32).write(tmp_path / "good.json")
    return (tmp_path / "good.json").read_text()


def changed(**changes):
    """The entries of the file with others in their place, without their hash."""

    def change(text):
        found = {**json.loads(text), **changes, SEAL: None}
        return json.dumps({name: value for name, value in found.items() if value is not None})

    return change


DAMAGED = {
    "empty": lambda text: "",
    "cut short": lambda text: text[: len(text) // 2],
    "another name": lambda text: text.replace("site-1", "site-7"),
    "another number": lambda text: text.replace('"train": 9', '"train": 8', 1),
    "noise": lambda text: "\0\1\2",
    "null": lambda text: "null",
    "a list": lambda text: "[]",
    "a text": lambda text: '"sites"',
    "deep": lambda text: "[" * 100_000,
    "summaries that are a number": changed(surveys=5),
    "no summaries at all": changed(surveys=[], marks={}),
    "summaries of numbers": changed(surveys=[1, 2, 3]),
    "summaries of an earlier release": lambda text: changed(surveys=[r[:3] for r in json.loads(text)["surveys"]])(text),
    "marks that are a list": changed(marks=[]),
    "a mark too few": lambda text: changed(marks=dict(list(json.loads(text)["marks"].items())[1:]))(text),
    "marks that are numbers": changed(marks={"site-0": 1, "site-1": 2, "site-2": 3}),
    "settings that are a list": changed(settings=[1]),
    "versions that are a text": changed(versions="x"),
    "code that is a number": changed(program=5),
    "an origin that is a number": changed(origin=5),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_of_sites_is_named_with_a_remedy(how, written, tmp_path):
    file, bad = tmp_path / "sites.json", DAMAGED[how](written)
    assert bad != written
    file.write_text(bad)
    with pytest.raises(CheckpointError) as error:
        Begun.read(file)
    assert str(error.value).startswith(f"{file} is damaged (")
    assert str(error.value).endswith("; restore it from a backup, or start a new run (another --name)")
    assert len(str(error.value)) < 300 + len(str(file))


def test_a_run_resumes_once_its_file_of_sites_is_restored(grid, folder, expected):
    file = folder / "sites.json"
    good = file.read_text()
    file.write_text(good[:-20])
    with pytest.raises(CheckpointError, match=r"sites\.json is damaged"):
        serve(grid, folder, 2)
    assert file.read_text() == good[:-20]
    file.write_text(good)
    serve(grid, folder, 2)
    np.testing.assert_allclose(solution(folder), expected, rtol=1e-12)


@pytest.mark.parametrize("lacking", ["settings", "versions", "program", "marks", "surveys", "origin"])
def test_a_file_of_an_earlier_release_is_refused_with_what_it_lacks(lacking, written, tmp_path):
    (tmp_path / "sites.json").write_text(changed(**{lacking: None})(written))
    with pytest.raises(CheckpointError, match=rf"sites\.json has no {lacking}: an earlier release began this run; let"):
        Begun.read(tmp_path / "sites.json")


def test_the_file_of_the_first_release_is_refused(grid, folder):
    """It had three entries of every summary, and neither settings nor versions."""
    found = json.loads((folder / "sites.json").read_text())
    old = {"surveys": [row[:3] for row in found["surveys"]], "marks": found["marks"]}
    (folder / "sites.json").write_text(json.dumps(old))
    with pytest.raises(
        CheckpointError, match="has no origin, settings, versions, program: an earlier release began this run"
    ):
        serve(grid, folder, 2)


@pytest.mark.parametrize("what", ["folder", "link"])
def test_something_else_in_place_of_the_file_of_sites_is_named(what, grid, folder, tmp_path):
    file = folder / "sites.json"
    shutil.move(file, tmp_path / "elsewhere")
    if what == "folder":
        file.mkdir()
    else:
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"sites.json is .*; restore it from a backup"):
        serve(grid, folder, 2)


def test_the_file_of_sites_is_for_its_owner_and_says_how_the_run_began(folder):
    assert (folder / "sites.json").stat().st_mode & 0o077 == 0
    found = Begun.read(folder / "sites.json")
    assert [summary.site for summary in found.summaries] == ["site-0", "site-1", "site-2"]
    assert Begun.read(folder / "none.json") is None
    found.program.check(found.program._replace(program="2"), folder, new_code=True)
    with pytest.raises(CheckpointError, match=r"the app's code: saved '1', now '2'"):
        found.program.check(found.program._replace(program="2"), folder, new_code=False)
    with pytest.raises(CheckpointError, match=r"seed: saved 5, now 6"):
        found.program.check(found.program._replace(settings={**found.program.settings, "seed": 6}), folder, True)


@pytest.mark.parametrize("library", sorted(versions()))
def test_a_run_is_not_resumed_with_another_version_of_a_library_at_the_server(library, grid, folder, monkeypatch):
    before, files = versions(), lambda: {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    kept = files()
    monkeypatch.setattr(server_app, "versions", lambda: {**before, library: "0.0.1"})
    with pytest.raises(CheckpointError, match=re.escape(f"{library}: saved {before[library]!r}, now '0.0.1'")):
        serve(grid, folder, 2)
    assert files() == kept


@pytest.mark.parametrize("name", ["status.json", "server.lock"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\0", b'{"sites": 5, "round": "x"}'])
def test_a_damaged_status_or_lock_is_replaced(name, content, grid, folder, expected):
    (folder / name).write_bytes(content)
    serve(grid, folder, 2)
    np.testing.assert_allclose(solution(folder), expected, rtol=1e-12)
    assert json.loads((folder / "status.json").read_text())["round"] == 2


@pytest.mark.parametrize("name", ["reports.jsonl", "evaluations.jsonl"])
def test_a_line_that_a_crash_has_cut_short_spoils_no_other(name, grid, folder):
    file = folder / name
    before = file.read_text().splitlines()
    file.write_text(file.read_text()[:-9])
    serve(grid, folder, 2)
    lines = file.read_text().splitlines()
    assert lines[: len(before) - 1] == before[:-1]
    assert lines[len(before) - 1] == before[-1][:-8]
    assert [json.loads(line) for line in lines[len(before) :]] != []
