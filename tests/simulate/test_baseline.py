"""Runs that an earlier version saved resume: one per family, from the checkpoints in `baseline/`."""

import json
import shutil
import zipfile
from pathlib import Path

import baseline_runs
import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.engine.checkpoint import Checkpoints

HERE = Path(__file__).parent / "baseline"


def unpacked(family: str, folder: Path) -> Checkpoints:
    """The saved run, relabelled with this version of JAX: the test compares its results."""
    with zipfile.ZipFile(HERE / f"{family}.zip") as archive:
        archive.extractall(folder / "old")
    old = Checkpoints(folder / "old")
    saved = old.load()
    assert saved is not None
    assert saved.paths is None  # that version stored no names
    store = Checkpoints(folder / "run")
    store.prepare(0)
    store.save(saved.round, saved.arrays, {**saved.config, "jax": jax.__version__}, saved.paths)
    shutil.rmtree(folder / "old")
    return store


@pytest.mark.parametrize(
    "family",
    [
        name if name == "average" else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(baseline_runs.runs())
    ],
)
def test_a_run_saved_by_an_earlier_version_resumes(family, tmp_path):
    problem, algorithm, federation, options = baseline_runs.runs()[family]
    options = {**baseline_runs.OPTIONS, **options}
    store = unpacked(family, tmp_path)
    (round,) = store.rounds()
    resumed = fs.run(problem, algorithm, federation, checkpoint=store.folder, resume=True, **options)
    whole = fs.run(problem, algorithm, federation, **options)
    assert resumed.rounds == whole.rounds == baseline_runs.ROUNDS > round
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    jax.tree.map(close, (resumed.solutions, resumed.state, resumed.local), (whole.solutions, whole.state, whole.local))
    for column in ("objective", "bytes_up", "bytes_down", "samples"):
        close(resumed.history[column], whole.history[column])


def test_other_settings_are_still_refused(tmp_path):
    problem, _, federation, options = baseline_runs.runs()["average"]
    store = unpacked("average", tmp_path)
    options = {**baseline_runs.OPTIONS, **options, "checkpoint": store.folder, "resume": True}
    with pytest.raises(fs.CheckpointError, match=r"SCAFFOLD.step_size: saved 0.1, now 0.2"):
        fs.run(problem, fs.SCAFFOLD(0.2, 3), federation, **options)
    with pytest.raises(fs.CheckpointError, match=r"batch_size: saved 2, now 3"):
        fs.run(problem, fs.SCAFFOLD(0.1, 3), federation, **{**options, "batch_size": 3})
    with pytest.raises(fs.CheckpointError, match=r"weights: saved 'uniform', now 'size'"):
        fs.run(problem, fs.SCAFFOLD(0.1, 3), federation, **options, weights="size")


def test_fields_in_another_order_are_refused_by_name(tmp_path):
    """Equal shapes in another order would resume silently wrong: the checkpoint stores the paths of its fields."""
    problem, algorithm, federation, options = baseline_runs.runs()["average"]
    options = {**baseline_runs.OPTIONS, **options, "checkpoint": tmp_path, "checkpoint_every": 0.0}
    with pytest.raises(baseline_runs.Stopped):
        fs.run(problem, algorithm, federation, callbacks=[baseline_runs.stop], **options)
    store = Checkpoints(tmp_path)
    saved = store.load()
    assert saved is not None
    assert saved.paths is not None
    x, c = (next(p for p in saved.paths if p.startswith(f".shared.{field}")) for field in ("x", "c"))
    swapped = [{x: c, c: x}.get(path, path) for path in saved.paths]
    store.save(saved.round, saved.arrays, saved.config, swapped)
    with pytest.raises(fs.CheckpointError, match="their order has changed"):
        fs.run(problem, algorithm, federation, resume=True, **options)
    renamed = [path.replace(".shared.c", ".shared.control") for path in saved.paths]
    store.save(saved.round, saved.arrays, saved.config, renamed)
    with pytest.raises(fs.CheckpointError, match=r"shared\.control"):
        fs.run(problem, algorithm, federation, resume=True, **options)


def test_the_settings_of_a_new_checkpoint_name_every_option(tmp_path):
    problem, algorithm, federation, options = baseline_runs.runs()["average"]
    fs.run(problem, algorithm, federation, checkpoint=tmp_path, **{**baseline_runs.OPTIONS, **options})
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["weights"], settings["sampling"], settings["privacy"]) == ("uniform", "replacement", None)
