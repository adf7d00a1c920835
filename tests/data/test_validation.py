import re

import numpy as np
import pandas as pd
import pytest

from fedstrata.data import IID, ByColumn, Dirichlet, Federation, federate

X, Y = np.ones((4, 2), np.float32), np.array([0, 1, 1, 0])


def hole(row, column, value=np.nan):
    x = X.copy()
    x[row, column] = value
    return x


def whole():
    return Federation.from_clients([{"x": X, "y": Y}])


def arrays(examples=None, clients=(0, 0, 1, 1), **options):
    return Federation.from_arrays({"x": X, "y": Y} if examples is None else examples, np.array(clients), **options)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: arrays({"x": hole(3, 1)}, names=["Ullevål", "Haukeland"]), "1 rows of client 'Haukeland'"),
        (lambda: arrays({"x": hole(0, 1, np.inf)}, features=["age", "bmi"]), "column 'bmi'"),
        (lambda: arrays({"x": hole([0, 1, 2], 0)}), "2 rows of client 'client 0' (leaf 'x', column 0), and in 1 other"),
        (lambda: arrays(test={"x": hole(0, 0)}), "split 'test': NaN or infinity in 1 rows of client 'pooled data'"),
        (lambda: arrays(clients=[0, 0, 2, 2]), "client 'client 1' has no training rows"),
        (lambda: arrays(names=["a", "b", "c"]), "client 'c' has no training rows"),
        (lambda: arrays(clients=[0, 0, 1]), "clients has shape (3,), the data have 4 rows"),
        (lambda: arrays(clients=[0, 0, -1, 1]), "client ids start at 0, got -1"),
        (lambda: arrays(clients=[0, 0, 10**12, 1]), "there are only 4 rows; ByColumn"),
        (lambda: arrays(names=["a"]), "client id 1, but there are 1 clients"),
        (lambda: arrays(names=["a", "a"]), "two clients are called 'a'"),
        (lambda: arrays({"x": X, "y": Y[:3]}), "x 4, y 3"),
        (lambda: arrays({"x": X, "y": 3}), "leaf 'y' is a single number"),
        (lambda: arrays({}), "there are no arrays"),
        (lambda: arrays(classes=1), "client 'client 0' has labels 1, outside 0 to 0; set classes=2"),
        (lambda: arrays({"y": Y - 1}, classes=2), "has labels -1, outside 0 to 1"),
        (lambda: arrays({"y": Y / 2}, classes=2), "there is a label 0.5"),
        (lambda: arrays({"y": Y * 2**40}), "does not fit 32 bits"),
        (lambda: arrays().with_split("train", {"x": X}), "there is a split 'train' already"),
        (lambda: arrays().with_split("test", {"x": X[:, :1]}), "has shape (1,), in the train split it has (2,)"),
        (lambda: arrays().with_split("test", {"y": [7, 0]}), "labels 7, outside 0 to 1"),
        (lambda: arrays().with_split("test", {"x": X}, IID(3)), "IID makes 3 clients, there are 2"),
        (lambda: arrays().hold_out("train"), "there is a split 'train' already"),
        (lambda: arrays().hold_out(fraction=1.0), "fraction must lie between 0 and 1"),
        (lambda: arrays().standardize("z"), "unknown leaf 'z'"),
        (lambda: arrays().select([0, 0]), "named twice"),
        (lambda: arrays().select([2]), "ids must lie in 0 to 1"),
        (lambda: arrays()["tset"], "unknown split 'tset'"),
        (lambda: Federation({}), "a 'train' split is needed"),
        (lambda: Federation.from_clients([]), "the list of clients is empty"),
        (lambda: Federation.from_clients([{"x": X}, {"x": X[:, :1]}]), "client 1 has leaves"),
        (lambda: Federation.from_clients([{"x": X}, {"x": X[:0]}]), "client 'client 1' has no training rows"),
        (lambda: Federation.from_offsets({"x": X}, [0, 3]), "rising from 0 to the number of rows, 4"),
        (lambda: Federation.from_offsets({"x": X}, [0, 3, 2, 4]), "rising from 0"),
        (lambda: Federation.from_offsets({"x": X}, [0, 4, 4]), "client 'client 1' has no training rows"),
        (lambda: Federation.from_files("one.csv"), "needs client='column'"),
        (lambda: Federation.from_files(["one.txt"]), "one.txt is none of .csv"),
        (lambda: Federation.from_files([]), "the list of files is empty"),
        (lambda: arrays({"x": [[1, 2], [3]]}), "leaf 'x' has rows of different lengths"),
        (lambda: arrays(clients=2), "or a partition, e.g. fs.data.IID(5)"),
        (lambda: Federation.from_clients([{"x": X}] * 3, test=(X, Y)), "a tuple of 2 for 3 clients"),
        (
            lambda: Federation({**arrays().splits, "valid": whole()["train"]}),
            "'valid' has 1 clients, the train split 2",
        ),
        (lambda: Federation(arrays().splits, names=["a"]), "1 names for 2 clients"),
        (lambda: arrays().hold_out("test", "20%"), "fraction must lie between 0 and 1 (both excluded), got '20%'"),
        (lambda: arrays().select(["client 0"]), "federation.names.index(name)"),
        (lambda: arrays()[0], "unknown split 0; Known: train"),
        (lambda: ByColumn(np.array(["a", None, float("nan")], object)), "2 rows have no value"),
        (lambda: Dirichlet(3, "strong"), "alpha must be a positive number, got 'strong'"),
        (lambda: federate("digits", IID(3), test="yes"), "test must be True, False or a fraction"),
    ],
)
def test_values_are_named_with_the_remedy(build, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build()


SHARED = "make a federation with fs.Federation.from_clients([{"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Federation({"train": {"x": X, "y": Y}}), "'train' is a dict, not a Split"),
        (lambda: Federation({"train": [{"x": X, "y": Y}]}), SHARED),
        (lambda: Federation({"north": {"x": X, "y": Y}}), SHARED),
        (lambda: Federation([{"x": X, "y": Y}]), SHARED),
        (lambda: Federation(X), SHARED),
        (lambda: Federation(None), SHARED),
        (lambda: Federation.from_clients({"a": {"x": X}}), "names=list(d)"),
        (lambda: Federation.from_clients(X), "clients is a ndarray; give a list with one data set per client"),
        (lambda: Federation.from_clients(None), "clients is a NoneType"),
        (lambda: Federation.from_clients("digits"), "clients is a str"),
        (lambda: Federation.from_clients([pd.DataFrame(X)]), "client 0: the examples are a DataFrame"),
        (lambda: arrays(pd.DataFrame(X)), "use Federation.from_frame"),
        (lambda: arrays({"x": X, "y": None}), "leaf 'y' is None; leave it out"),
        (lambda: arrays("digits"), "the examples are 'digits'"),
        (lambda: arrays(test=(X, Y)), "split 'test': the examples are a tuple, those of the train split a dict"),
        (lambda: arrays().with_split("test", (X, Y)), 'give both alike, e.g. {"x": X, "y": y}'),
        (lambda: arrays().hold_out(0.2), "name=0.2 must be a string; the part is fraction=0.2"),
        (lambda: Federation.from_frame("a.csv", client="a", label="b"), "a pandas DataFrame is needed, got a str"),
        (lambda: Federation.from_frame(pd.DataFrame(X), client=0, label=1, features="2"), "features='2' is one string"),
        (lambda: Federation.from_frame(pd.DataFrame(X), client=0, label=[1]), "label=[1] must name one column"),
        (lambda: Federation.from_files(None), "give a path, a folder or a list of paths, not a NoneType"),
        (lambda: federate({"x": X}, IID(2)), "data is a dict; give a name from fs.data.available()"),
        (lambda: federate("digits", 5), "partition=5 is no partition; give e.g. fs.data.IID(10)"),
    ],
)
def test_things_of_another_kind_are_named_with_what_is_needed(build, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        build()


def test_frames_with_true_and_false_are_numbers():
    frame = pd.DataFrame({"age": [1.5, 2.0], "smokes": [True, False], "n": pd.array([3, 4], "Int64")})
    built = arrays({"x": frame, "y": [0, 1]}, clients=[0, 1])["train"].examples["x"]
    np.testing.assert_array_equal(built, [[1.5, 1, 3], [2, 0, 4]])
    with pytest.raises(TypeError, match="leaf 'x': columns job are not numbers"):
        arrays({"x": frame.assign(job="cook"), "y": [0, 1]}, clients=[0, 1])


def test_text_is_refused():
    with pytest.raises(TypeError, match="leaf 'y' has dtype <U3, numbers are needed"):
        arrays({"y": np.array(["yes", "no", "no", "yes"])})


def test_a_missing_shard_is_an_index_error():
    with pytest.raises(IndexError, match="no client 2; this split has clients 0 to 1"):
        arrays()["train"].shard(2)


def test_tables_name_their_columns(tmp_path):
    frame = pd.DataFrame({"site": ["a", "b"], "age": [1.0, np.nan], "job": ["cook", "vet"], "sick": [0, 1]})
    build = lambda **options: Federation.from_frame(frame, **{"client": "site", "label": "sick"} | options)
    with pytest.raises(TypeError, match="columns job are not numbers"):
        build()
    with pytest.raises(TypeError, match="label column 'job' is not numbers"):
        build(label="job", features=["age"])
    with pytest.raises(ValueError, match="there is no column 'sit'; there are site, age"):
        build(client="sit")
    with pytest.raises(ValueError, match=r"1 rows of client 'b' .*column 'age'"):
        build(features=["age"])
    frame[["age"]].to_csv(tmp_path / "a.csv", index=False)
    frame[["age", "sick"]].to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(ValueError, match="has other columns than"):
        Federation.from_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Federation.from_files([tmp_path / "c.csv"])
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Federation.from_files(tmp_path / "nowhere", client="site")
