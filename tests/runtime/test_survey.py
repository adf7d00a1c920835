"""Before a run: what sites say of their data, and what is refused."""

import json

import jax
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.runtime.run import prepare
from fedstrata.runtime.survey import Survey, described, terms_of, with_data


def data(rows, columns=3, dtype=np.float32, **more):
    return fs.Federation.from_clients([{"x": np.ones((rows, columns), dtype), "y": np.zeros(rows, np.int32), **more}])


PROBLEM = fs.Average(lambda w, e: (w @ e["x"] - e["y"]) ** 2)
OPTIONS = {"params": np.zeros(3, np.float32), "batch_size": 2}


def terms(*surveys, problem=PROBLEM, algorithm=None, **options):
    return terms_of("run", problem, algorithm or fs.FedAvg(0.1), list(surveys), **{**OPTIONS, **options})


def test_a_survey_is_sizes_and_shapes_and_travels_as_json():
    survey = Survey.of("Ulm", data(5))
    assert survey.counts == {"train": 5}
    text = json.dumps(survey)
    assert "1.0" not in text  # no value of the data
    again = json.loads(text)
    assert again[1:] == [{"train": 5}, {"train": {"x": ["float32", [3]], "y": ["int32", []]}}]


def test_sites_together_are_a_federation_that_takes_no_memory():
    whole = described([Survey.of("Ulm", data(5)), Survey("Aalen", {"train": 10**9}, Survey.of("", data(1)).shapes)])
    assert list(whole.names) == ["Ulm", "Aalen"]
    np.testing.assert_array_equal(whole["train"].counts, [5, 10**9])
    assert whole["train"].examples["x"].strides == (0, 0)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (data(4, columns=2), "Aalen has other data than Ulm: in split 'train', column 'x' is .*2.* and not .*3"),
        (data(4, dtype=np.float64), "'float64'"),
        (data(4, z=np.ones(4, np.float32)), "column 'z'"),
    ],
)
def test_sites_whose_data_differ_are_named(other, why):
    with pytest.raises(ValueError, match=why):
        terms(Survey.of("Ulm", data(5)), Survey.of("Aalen", other))


def test_what_cannot_run_over_sites_is_refused_before_it_runs():
    pairs = fs.Pairwise(lambda w, e: w @ e["x"], fs.pair_losses.Square())
    ulm, aalen = Survey.of("Ulm", data(5)), Survey.of("Aalen", data(1))
    with pytest.raises(ValueError, match="two sites call themselves 'Ulm'"):
        terms(ulm, ulm)
    with pytest.raises(ValueError, match="a site is one client, and its data have 2"):
        Survey.of("Ulm", fs.Federation.from_clients([{"x": np.ones(2)}] * 2))
    with pytest.raises(ValueError, match="SOX is centralised"):
        terms(ulm, problem=pairs, algorithm=fs.SOX(0.1))
    with pytest.raises(ValueError, match="Aalen"):
        terms(ulm, aalen, sampling="epochs")
    with pytest.raises(ValueError, match="cohort of 3 clients cannot be drawn from 2"):
        terms(ulm, aalen, cohort=3)
    with pytest.raises(ValueError, match="Fair: give groups="):
        terms(ulm, problem=fs.Fair(lambda w, e: (w @ e["x"]) ** 2, "y"))


def test_a_site_has_its_own_data_and_the_room_of_the_largest():
    agreed = terms(Survey.of("Ulm", data(5)), Survey.of("Aalen", data(9)))
    own = with_data(agreed, data(5)).world.flat["train"]
    assert (int(own.count[0]), own.capacity, own.examples["x"].shape) == (5, 9, (5, 3))
    assert agreed.world.flat["train"].examples is None


@pytest.mark.parametrize("seed", [3, 2**32 + 3])
def test_a_seed_is_the_simulators_key_with_and_without_64_bit_numbers(seed):
    problem = fs.Average(lambda w, e: (w @ e["x"]) ** 2)
    for wide in (True, False):
        with jax.enable_x64(wide):
            agreed = terms(Survey.of("Ulm", data(5)), problem=problem, seed=seed)
            simulated = prepare(problem, fs.FedAvg(0.1), data(5), rounds=1, seeds=[seed], **OPTIONS).keys[0]
            assert np.array_equal(jax.random.key_data(agreed.key), [seed // 2**32, seed % 2**32])
            assert np.array_equal(jax.random.key_data(agreed.key), jax.random.key_data(simulated))
    with pytest.raises(ValueError, match="seed 18446744073709551616 must be"):
        terms(Survey.of("Ulm", data(5)), seed=2**64)
