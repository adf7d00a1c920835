"""Checkpoints: what is saved comes back, the newest stay, and what cannot work is refused before anything runs."""

import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from fedstrata.core.fingerprint import differences
from fedstrata.engine.checkpoint import KEEP, CheckpointError, Checkpoints


def filled(folder, rounds) -> Checkpoints:
    store = Checkpoints(folder)
    for round in rounds:
        store.save(round, {"a": np.full(3, round)}, {})
    return store


EVERY_KIND = {
    "carry/00000": np.random.default_rng(0).normal(size=(3, 4)),
    "count": np.arange(5, dtype=np.int64),
    "key": np.array([1, 2**32 - 1], np.uint32),
    "flag": np.array([True, False]),
    "scalar": np.array(2.5),
    "half": np.ones(2, np.float16),
    "brain": np.arange(3).astype(ml_dtypes.bfloat16),
    "odd": np.array([np.nan, -0.0, np.inf]),
    "turned": np.arange(6.0).reshape(2, 3).T,
    "ünïcode ['x']/…": np.ones(1, np.float32),
}


def test_round_trip_keeps_names_order_dtypes_and_bits(tmp_path):
    config = {"algorithm": "FedAvg", "nested": {"a": [1, 2.5, None, True]}}
    Checkpoints(tmp_path).save(12, EVERY_KIND, config)
    saved = Checkpoints(tmp_path).load()
    assert (saved.round, saved.config) == (12, config)
    assert list(saved.arrays) == list(EVERY_KIND)
    for name, array in EVERY_KIND.items():
        assert saved.arrays[name].dtype == array.dtype, name
        assert saved.arrays[name].shape == array.shape, name
        assert saved.arrays[name].tobytes() == array.tobytes(), name


def test_a_folder_without_checkpoints(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        assert Checkpoints(folder).load() is None
        assert Checkpoints(folder).rounds() == []


def test_the_newest_are_kept(tmp_path):
    store = filled(tmp_path, (5, 10, 11, 100))
    assert store.rounds() == [11, 100]
    assert len(list(tmp_path.glob("round-*"))) == KEEP
    assert store.load().round == 100


def test_a_round_saved_again_is_replaced(tmp_path):
    store = filled(tmp_path, (1,))
    store.save(1, {"a": np.zeros(3)}, {"new": True})
    saved = store.load()
    assert (list(saved.arrays), saved.config) == (["a"], {"new": True})


def test_what_is_not_a_finished_checkpoint_is_passed_over(tmp_path):
    """A killed writer leaves its temporary folder behind; people leave notes."""
    store = filled(tmp_path, (1,))
    (tmp_path / "round-000000009.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes.txt").write_text("round-000000008")
    assert store.rounds() == [1]
    assert store.load().round == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*file.*; choose another folder"):
            Checkpoints(folder).prepare(10)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied; choose another folder"):
        Checkpoints(tmp_path / "run").prepare(10)
    tmp_path.chmod(0o700)


def test_room_for_all_checkpoints_is_checked_first(tmp_path, monkeypatch):
    """The newest, the one before, and the one being written: three times the size."""
    store = Checkpoints(tmp_path / "run")
    usage = lambda free: lambda _: shutil._ntuple_diskusage(10**9, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", usage(6_000_000))
    store.prepare(2_000_000)
    assert list(store.folder.iterdir()) == []  # the probe is gone
    monkeypatch.setattr(shutil, "disk_usage", usage(5_999_999))
    with pytest.raises(CheckpointError, match=r"has 6 MB free, but this run's checkpoints need 6 MB; free some space"):
        store.prepare(2_000_000)


def test_differences_name_what_changed_and_both_values():
    saved, now = (
        {"algorithm": "FedAvg", "step_size": 0.1, "gone": 1},
        {"algorithm": "FedAvg", "step_size": 0.2, "new": []},
    )
    assert differences(saved, saved) == []
    assert differences(saved, now) == [
        "step_size: saved 0.1, now 0.2",
        "gone: saved 1, now 'nothing'",
        "new: saved 'nothing', now []",
    ]
