"""Checkpoints under everything that happens to files: damage, full disks, kills, other versions."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedstrata
from fedstrata.engine import checkpoint
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints

# What a failed read leaves in the reader's threads is not this library's to clean up.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def arrays_of(round: int, size: int = 2000) -> dict[str, np.ndarray]:
    """Numbers that do not compress, and from which the round can be read."""
    return {"a": round + np.random.default_rng(round).random(size), "round": np.array(round)}


def filled(folder, rounds=(1, 2, 3)) -> Checkpoints:
    store = Checkpoints(folder)
    for round in rounds:
        store.save(round, arrays_of(round), {"seed": 7})
    return store


def damage(folder: Path, how: str) -> None:
    """The largest file has the numbers, the manifest their positions."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    victim = max(files, key=lambda p: p.stat().st_size) if how != "manifest" else folder / "manifest.ocdbt"
    data = victim.read_bytes()
    if how == "truncate":
        victim.write_bytes(data[: len(data) // 2])
    elif how == "flip":
        middle = len(data) // 2
        victim.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        victim.unlink()


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_newest_falls_back_with_a_warning(tmp_path, caplog, how):
    store = filled(tmp_path)
    damage(tmp_path / "round-000000003", how)
    with caplog.at_level(logging.WARNING, "fedstrata"):
        saved = store.load()
    assert saved.round == 2
    np.testing.assert_array_equal(saved.arrays["a"], arrays_of(2)["a"])
    messages = [r.getMessage() for r in caplog.records if r.name == "fedstrata"]
    assert any("round 3" in m and "is damaged" in m and str(tmp_path) in m for m in messages)
    assert "resuming from round 2 instead of round 3" in messages


def test_all_damaged_is_an_error_with_a_remedy(tmp_path):
    store = filled(tmp_path)
    for folder in tmp_path.glob("round-*"):
        damage(folder, "flip")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read \(round 3: .+\); delete it"):
        store.load()


def test_a_checksum_catches_what_the_format_does_not(tmp_path, monkeypatch, caplog):
    """Arrays that read well but are not those that were saved."""
    store = filled(tmp_path, (1,))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_digest", lambda arrays: "0" * 64)
        store.save(2, arrays_of(2), {})
    with caplog.at_level(logging.WARNING, "fedstrata"):
        assert store.load().round == 1
    assert "its checksum is wrong" in caplog.text


def test_another_version_is_refused_by_number(tmp_path, monkeypatch, caplog):
    store = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 99)
        store.save(1, arrays_of(1), {})
    with caplog.at_level(logging.WARNING, "fedstrata"), pytest.raises(CheckpointError, match="can be read"):
        store.load()
    assert "it has format 99, this program reads 1" in caplog.text


def python(code: str, *words: str, **options):
    """A child that imports this library, with its standard output read as lines."""
    path = {"PYTHONPATH": str(Path(fedstrata.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **path}, **options)


FULL_DISK = """
import json, resource, signal, sys
import numpy as np
from fedstrata.engine.checkpoint import CheckpointError, Checkpoints
store, big = Checkpoints(sys.argv[1]), {"a": np.random.default_rng(0).random(100_000)}
store.save(1, {"a": np.arange(3.0)}, {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write past the limit fails as on a full disk
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
try:
    store.save(2, big, {})
except CheckpointError as error:
    left = [path.name for path in store.folder.iterdir() if path.name != "settings.json"]
    print(json.dumps([str(error), left, store.load().arrays["a"].tolist()]))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
store.save(2, big, {})
print(json.dumps(store.rounds()))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs file size limits")
def test_a_write_that_fails_keeps_the_checkpoint_before_and_can_be_tried_again(tmp_path):
    child = python(FULL_DISK, str(tmp_path), stderr=subprocess.DEVNULL)
    out = child.communicate(timeout=120)[0].splitlines()
    assert child.returncode == 0
    message, left, kept = json.loads(out[0])
    assert message.startswith(f"could not write the checkpoint of round 2 to {tmp_path}: ")
    assert "the checkpoint of round 1 is intact: make room and resume" in message
    assert (left, kept) == (["round-000000001"], [0.0, 1.0, 2.0])
    assert json.loads(out[1]) == [1, 2]
    assert sorted(p.name for p in tmp_path.glob("round-*")) == ["round-000000001", "round-000000002"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "the disk is full; no earlier checkpoint exists"),
        (ValueError("RESOURCE_EXHAUSTED: … No space left on device [os_error_code='28']"), "the disk is full"),
        (PermissionError(13, "Permission denied", "/workspace/run"), "Permission denied: '/workspace/run'"),
        (AssertionError(), "AssertionError; no earlier checkpoint exists"),
    ],
)
def test_the_reason_of_a_failed_write_is_reported(tmp_path, monkeypatch, error, words):
    import orbax.checkpoint as ocp

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", fail)
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoints(tmp_path).save(1, arrays_of(1), {})
    assert caught.value.__cause__ is error


@pytest.fixture
def heard_interrupts():
    """Python's own handler; a program that a shell starts in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_while_writing_leaves_whole_checkpoints_only(tmp_path, monkeypatch, presses):
    """Pressed once, Ctrl-C waits for the checkpoint; pressed again, it ends the write, and its beginning is cleared."""
    import orbax.checkpoint as ocp

    store, write = filled(tmp_path, (1,)), ocp.PyTreeCheckpointer.save

    def interrupted(self, path, *given, **options):
        begun = path.with_name(f"{path.name}.orbax-checkpoint-tmp-7")
        begun.mkdir()
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        begun.rmdir()
        write(self, path, *given, **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        store.save(2, arrays_of(2), {"seed": 7})
    assert signal.getsignal(signal.SIGINT) is handler
    newest = 2 if presses == 1 else 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"round-00000000{r}" for r in range(1, newest + 1)),
        "settings.json",
    ]
    np.testing.assert_array_equal(store.load().arrays["a"], arrays_of(newest)["a"])


def test_another_handler_of_interrupts_runs_after_the_write(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    store, write, heard = Checkpoints(tmp_path), ocp.PyTreeCheckpointer.save, []

    def interrupted(self, *given, **options):
        signal.raise_signal(signal.SIGINT)
        assert not heard
        write(self, *given, **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", interrupted)
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(store.rounds()))
    try:
        store.save(1, arrays_of(1), {})
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [[1]]


SAVE_FOREVER = """
import sys
import numpy as np
from fedstrata.engine.checkpoint import Checkpoints
for round in range(1, 10_000):
    print(round, flush=True)
    Checkpoints(sys.argv[1]).save(round, {"a": round + np.random.default_rng(round).random(200_000)}, {})
"""


def test_a_kill_while_writing_loses_at_most_that_checkpoint(tmp_path):
    with python(SAVE_FOREVER, str(tmp_path), stderr=subprocess.DEVNULL) as child:
        started = [next(int(line) for line in child.stdout) for _ in range(4)][-1]  # it is now writing this one
        child.kill()
    saved = Checkpoints(tmp_path).load()
    assert saved.round >= started - 1
    np.testing.assert_array_equal(saved.arrays["a"], saved.round + np.random.default_rng(saved.round).random(200_000))


def test_empty_arrays_are_saved_too(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(1, {"none": np.zeros((0, 3), np.float32), "some": np.ones(2)}, {})
    assert store.load().arrays["none"].shape == (0, 3)


def test_after_a_fall_back_there_are_again_two_good_checkpoints(tmp_path):
    store = filled(tmp_path, (1, 2))
    damage(tmp_path / "round-000000002", "flip")
    assert store.load().round == 1
    store.save(3, arrays_of(3), {})  # the resumed run's next
    damage(tmp_path / "round-000000003", "flip")
    assert store.load().round == 1


def test_what_a_killed_writer_left_is_cleared_by_the_next_run(tmp_path):
    (tmp_path / "round-000000009.orbax-checkpoint-tmp").mkdir()
    Checkpoints(tmp_path).prepare(10)
    assert list(tmp_path.iterdir()) == []
