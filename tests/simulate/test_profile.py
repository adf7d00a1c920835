"""Where time goes: parts are found again in a trace, and add up to what the rounds take."""

import json

import numpy as np
import pytest

import fedstrata as fs
from fedstrata.cli.main import main
from fedstrata.simulate.profile import PARTS, _parts


def task(clients=4, rows=200):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(clients * rows, 20)), rng.integers(0, 2, clients * rows)
    federation = fs.Federation.from_offsets({"x": x, "y": y.astype(np.int32)}, np.arange(clients + 1) * rows)
    return fs.Average(fs.losses.Classification(fs.models.Linear(20, 2))), federation


@pytest.mark.parametrize("stream", [False, True])
def test_every_part_takes_some_time(stream, tmp_path):
    problem, federation = task()
    options = {"rounds": 30, "evaluate_every": 10, "cohort": 2, "stream": stream}
    found = fs.profile(problem, fs.FedAdam(0.1, 20), federation, folder=tmp_path, **options)
    assert list(found.seconds) == list(PARTS.values())
    assert (found.rounds, found.evaluations, found.traced) == (30, 3, 20)
    for part in ("drawing and looking up examples", "local steps", "server steps", "evaluation"):
        assert found.seconds[part] > 0
    assert found.data > 0
    assert found.compile > 0
    assert list(tmp_path.rglob("*.trace.json.gz"))
    table = found.rich()
    assert table.row_count == len(PARTS) + 3


def test_more_local_steps_are_seen_in_their_part():
    problem, federation = task()
    share = []
    for steps in (1, 200):
        options = {"rounds": 10, "evaluate_every": 10, "stationarity": False}
        found = fs.profile(problem, fs.FedAvg(0.01, steps), federation, **options)
        work = found.seconds["local steps"] + found.seconds["drawing and looking up examples"]
        share.append(work / sum(found.seconds.values()))
    assert share[1] > max(0.5, share[0])


def test_fusions_belong_to_what_is_inside():
    program = """
%fused (p: f32[2]) -> f32[2] {
  %a.1 = f32[2]{0} add(%p, %p), metadata={op_name="jit(f)/fs.local/fs.merge/add"}
}
ENTRY %main (x: f32[2]) -> f32[2] {
  %loop = f32[2]{0} while(%x), condition=%c, body=%b, metadata={op_name="jit(f)/fs.local/while"}
  %fusion.3 = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %copy.1 = f32[2]{0} copy(%fusion.3), metadata={op_name="jit(f)/transpose(jvp(fs.evaluation))/copy"}
}
"""
    assert dict(_parts(program)) == {"a.1": "merge", "fusion.3": "merge", "copy.1": "evaluation"}


@pytest.mark.slow
def test_the_command_prints_parts_and_keeps_the_trace(tmp_path, capsys):
    words = "run least_squares --algorithm FedAvg --rounds 3 --seeds 1 --quiet --profile --json"
    command = words.split()
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    found = json.loads(capsys.readouterr().out)["profiles"]["FedAvg"]
    assert found["seconds"]["local steps"] > 0
    assert list((tmp_path / "run" / "profile" / "FedAvg").rglob("*.trace.json.gz"))
