"""The options of a run: one declaration, one signature, and the nearest name for a wrong one."""

import dataclasses
import inspect

import numpy as np
import pytest
from references import least_squares

import fedstrata as fs
from fedstrata.simulate.options import RUN_ONLY, RunOptions

TASK = least_squares()
OPTIONS = {"rounds": 2, "params": np.zeros(3)}


def test_fs_run_names_every_option_with_its_type_and_default():
    found = inspect.signature(fs.run).parameters
    shared = {f.name: f for f in dataclasses.fields(RunOptions)}
    named = [n for n, p in found.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(named) == sorted([*shared, *RUN_ONLY])
    for name, field in shared.items():
        missing = field.default is dataclasses.MISSING
        assert found[name].default == (inspect.Parameter.empty if missing else field.default), name
        assert found[name].annotation is not inspect.Parameter.empty, name
        assert name == "mesh" or found[name].annotation == field.type, name


@pytest.mark.parametrize("function", [fs.estimate, fs.profile, fs.tune])
def test_the_others_show_the_options_they_share(function):
    shared = {f.name for f in dataclasses.fields(RunOptions)}
    assert shared <= set(inspect.signature(function).parameters)
    assert inspect.signature(function).parameters["rounds"].default is inspect.Parameter.empty


@pytest.mark.parametrize("function", [fs.run, fs.estimate, fs.profile])
def test_an_unknown_option_is_answered_with_the_nearest(function):
    with pytest.raises(
        ValueError, match=rf"unknown option of fs\.{function.__name__} 'bach_size'; did you mean batch_size"
    ):
        function(TASK.problem, fs.FedAvg(0.1), TASK.federation, bach_size=3, **OPTIONS)


def test_a_run_needs_rounds():
    with pytest.raises(TypeError, match="rounds"):
        fs.run(TASK.problem, fs.FedAvg(0.1), TASK.federation)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"fs\.estimate needs rounds"):
        fs.estimate(TASK.problem, fs.FedAvg(0.1), TASK.federation)
