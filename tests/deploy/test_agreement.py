"""The agreement of a run: data summaries of sites, and what is refused before it starts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedstrata as fs
from fedstrata.deploy import data_summary
from fedstrata.deploy.agreement import agree, placeholder_federation, with_data
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.terms import Terms
from fedstrata.simulate.options import RunOptions
from fedstrata.simulate.run import prepare


def data(rows, columns=3, dtype=np.float32, **more):
    return fs.Federation.from_clients([{"x": np.ones((rows, columns), dtype), "y": np.zeros(rows, np.int32), **more}])


PROBLEM = fs.Average(lambda w, e: (w @ e["x"] - e["y"]) ** 2)
OPTIONS = {"params": np.zeros(3, np.float32), "batch_size": 2}


def agreement(*summaries, problem=PROBLEM, algorithm=None, **options):
    return agree("run", problem, algorithm or fs.FedAvg(0.1), list(summaries), **{**OPTIONS, **options})


def test_a_data_summary_has_sizes_and_shapes_and_travels_as_json():
    summary = DataSummary.of("Ulm", data(5))
    assert summary.counts == {"train": 5}
    text = json.dumps(summary)
    assert "1.0" not in text  # no value of the data
    again = json.loads(text)
    assert again[1:3] == [{"train": 5}, {"train": {"x": ["float32", [3]], "y": ["int32", []]}}]
    assert again[3:] == ["", "", {}]  # no secret, no key: nothing that identifies the data
    assert json.dumps(DataSummary.decode(text)) == text


def test_a_summary_changes_with_a_value_and_confirms_no_guess():
    """The hash of the data depends on a secret of the site: whoever guesses the data cannot check the guess."""
    first = DataSummary.of("Ulm", data(5), secret=b"1").data
    other = data(5)
    other["train"].examples["x"][4, 2] += 1
    assert first == DataSummary.of("Ulm", data(5), secret=b"1").data
    assert first != DataSummary.of("Ulm", other, secret=b"1").data
    assert first != DataSummary.of("Ulm", data(5), secret=b"2").data


def test_a_changed_source_of_the_library_is_another_version_of_it(tmp_path, monkeypatch):
    """A checkout keeps its version number while its sources change."""
    assert data_summary.versions()["fedstrata"] == data_summary.library()
    read, file = data_summary.library.__wrapped__, tmp_path / "core" / "step.py"
    monkeypatch.setattr(data_summary, "__file__", str(tmp_path / "deploy" / "data_summary.py"))
    file.parent.mkdir()
    file.write_text("STEP = 1\n")
    before = read()
    assert before == read()
    assert before.startswith(f"{fs.__version__} (")
    file.write_text("STEP = 2\n")
    assert read() != before
    file.write_text("STEP = 1\n")
    assert read() == before
    file.rename(file.with_name("stride.py"))
    assert read() != before


def test_the_terms_of_a_run_keep_the_order_of_splits():
    """An evaluation names splits by their places, so server and sites need the same order."""
    whole = data(8).hold_out("validation", 0.25).hold_out("again", 0.25)
    sites = tuple(DataSummary.of(name, whole) for name in ("Ulm", "Aalen"))
    at_site = Terms.decode(Terms("first", sites, "1", 3, 1).encode())
    assert list(agreement(*at_site.sites).shapes) == list(agreement(*sites).shapes) == ["train", "validation", "again"]


def test_the_placeholder_federation_of_all_sites_takes_no_memory():
    whole = placeholder_federation(
        [DataSummary.of("Ulm", data(5)), DataSummary("Aalen", {"train": 10**9}, DataSummary.of("", data(1)).shapes)]
    )
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
        agreement(DataSummary.of("Ulm", data(5)), DataSummary.of("Aalen", other))


def test_runs_that_are_impossible_over_sites_are_refused_before_they_start():
    pairs = fs.Pairwise(lambda w, e: w @ e["x"], fs.pair_losses.Square())
    ulm, aalen = DataSummary.of("Ulm", data(5)), DataSummary.of("Aalen", data(1))
    with pytest.raises(ValueError, match="two sites have the name 'Ulm'"):
        agreement(ulm, ulm)
    with pytest.raises(ValueError, match="a site is one client, and its data have 2"):
        DataSummary.of("Ulm", fs.Federation.from_clients([{"x": np.ones(2)}] * 2))
    with pytest.raises(ValueError, match="SOX is centralised"):
        agreement(ulm, problem=pairs, algorithm=fs.SOX(0.1))
    with pytest.raises(ValueError, match="Aalen"):
        agreement(ulm, aalen, sampling="epochs")
    with pytest.raises(ValueError, match="cohort of 3 clients cannot be drawn from 2"):
        agreement(ulm, aalen, cohort=3)
    with pytest.raises(ValueError, match="Fair: give groups="):
        agreement(ulm, problem=fs.Fair(lambda w, e: (w @ e["x"]) ** 2, "y"))


CLAIMS = {
    "one too many": (2**31 - 2**16 + 1, "Aalen, split 'train' has 2,147,418,113 rows; programs number at most"),
    "wraps to 5": (2**32 + 5, "Aalen, split 'train' has 4,294,967,301 rows"),
    "beyond 64 bits": (10**4200, "Aalen, split 'train' has more than 2\\^63 rows"),
    "in all": (2**31 - 2**16 - 3, "and with the sites before it 2,147,418,114"),
    "negative": (-1, "Aalen, split 'train': the number of rows must be a whole number >= 0"),
    "a fraction": (2.5, "must be a whole number"),
    "a truth": (True, "must be a whole number"),
    "a text": ("9" * 10**6, "must be a whole number"),
    "nothing": (None, "must be a whole number"),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_numbers_of_rows_that_would_wrap_are_refused_with_the_sites_name(claim, weights):
    rows, words = CLAIMS[claim]
    aalen = DataSummary("Aalen", {} if rows is None else {"train": rows}, DataSummary.of("", data(1)).shapes)
    with pytest.raises(ValueError, match=words) as error:
        agreement(DataSummary.of("Ulm", data(5)), aalen, weights=weights)
    assert len(str(error.value)) < 300


def test_the_share_of_positives_does_not_wrap():
    """All rows of both sets together are numbered in 32 bits, not 31."""
    problem = fs.Pairwise(lambda w, e: w @ e["x"], fs.pair_losses.Square())
    most = 2**31 - 2**16
    with jax.enable_x64(False):
        bound = dataclasses.replace(problem, counts=(jnp.array([most, 0], jnp.int32),) * 2, batches=(1, 1))
        assert bound.positive_share == 0.5


def test_a_split_without_rows_has_one_of_zeros_that_does_not_count():
    full = data(4)["train"].examples
    parts = lambda rows: fs.Federation.from_clients([full], test=[{c: a[:rows] for c, a in full.items()}])
    agreed = agreement(DataSummary.of("Ulm", parts(3)), DataSummary.of("Aalen", parts(0)))
    bare = agreed.context.data["train"]
    both = agreed._replace(context=agreed.context.with_data({"train": bare, "test": bare}))
    own = with_data(both, parts(0)).context.data["test"]
    assert (int(own.count[0]), own.examples["x"].shape, own.examples["x"].dtype) == (0, (1, 3), np.float32)


def test_a_site_has_its_data_and_the_capacity_of_the_largest_site():
    agreed = agreement(DataSummary.of("Ulm", data(5)), DataSummary.of("Aalen", data(9)))
    own = with_data(agreed, data(5)).context.data["train"]
    assert (int(own.count[0]), own.capacity, own.examples["x"].shape) == (5, 9, (5, 3))
    assert agreed.context.data["train"].examples is None


@pytest.mark.parametrize("seed", [3, 2**32 + 3])
def test_a_seed_is_the_simulators_key_with_and_without_64_bit_numbers(seed):
    problem = fs.Average(lambda w, e: (w @ e["x"]) ** 2)
    for wide in (True, False):
        with jax.enable_x64(wide):
            agreed = agreement(DataSummary.of("Ulm", data(5)), problem=problem, seed=seed)
            options = RunOptions(rounds=1, seeds=[seed], **OPTIONS)
            simulated = prepare(problem, fs.FedAvg(0.1), data(5), options).runs.keys[0]
            assert np.array_equal(jax.random.key_data(agreed.key), [seed // 2**32, seed % 2**32])
            assert np.array_equal(jax.random.key_data(agreed.key), jax.random.key_data(simulated))
    with pytest.raises(ValueError, match="seed 18446744073709551616 must be"):
        agreement(DataSummary.of("Ulm", data(5)), seed=2**64)
