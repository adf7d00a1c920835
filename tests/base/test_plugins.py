"""Code from outside the library: real files, and real entry points of an installed package."""

import subprocess
import sys
import warnings

import pytest

from fedstrata.base.plugins import PluginWarning, defined, from_path, load_file, plugins, plugins_of


def install(folder, files, **groups):
    """A package with entry points in a folder, as pip leaves it: modules, and a .dist-info beside them."""
    for name, text in files.items():
        (folder / name).write_text(text)
    info = folder / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """`outside(files, group={name: value})` installs a package on the search path until the end of the test."""

    def make(files, groups):
        install(tmp_path, files, **groups)
        monkeypatch.syspath_prepend(str(tmp_path))

    before = set(sys.modules)
    yield make
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_entry_points_are_loaded_by_name(outside):
    outside({"outside_one.py": "VALUE = 3\n"}, {"fedstrata.test": {"b": "outside_one:VALUE", "a": "outside_one"}})
    found = plugins("fedstrata.test")
    assert list(found) == ["a", "b"]
    assert found["b"] == 3
    assert found["a"].VALUE == 3
    assert plugins("fedstrata.nobody") == {}


def test_a_broken_entry_point_warns_and_the_others_are_loaded(outside):
    files = {"outside_two.py": "VALUE = 3\n", "outside_broken.py": "1 / 0\n"}
    entries = {
        "good": "outside_two:VALUE",
        "raises": "outside_broken:x",
        "gone": "outside_nowhere",
        "no": "outside_two:y",
    }
    outside(files, {"fedstrata.test": entries})
    with pytest.warns(PluginWarning) as caught:
        assert plugins("fedstrata.test") == {"good": 3}
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 3
    assert any("raises = outside_broken:x" in text and "ZeroDivisionError" in text for text in texts)
    assert any("outside_nowhere" in text for text in texts)


def test_objects_of_a_class_come_from_entry_points_and_modules(outside):
    files = {"outside_three.py": "THING = 'one'\nTHINGS = ('two', 'three')\nNUMBER = 4\n"}
    entries = {"direct": "outside_three:THING", "module": "outside_three", "wrong": "outside_three:NUMBER"}
    outside(files, {"fedstrata.test": entries})
    with pytest.warns(PluginWarning, match="wrong of fedstrata.test must be a str, or a module that defines THING"):
        found = plugins_of("fedstrata.test", str, "THING")
    assert found == ["one", "one", "two", "three"]


def test_an_object_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "outside_here.py").write_text("class Thing: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert from_path("outside_here:Thing").__module__ == "outside_here"
    assert from_path("outside_here.py:Thing").__name__ == "Thing"
    assert from_path(f"{tmp_path}/outside_here.py:Thing") is from_path("outside_here.py:Thing")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("FedAvg", "must have the form"),
        ("outside_nowhere:Thing", "no module 'outside_nowhere'"),
        ("fedstrata.base.errors:Thing", "fedstrata.base.errors has no 'Thing'"),
        (":x", "must have the form"),
    ],
)
def test_a_wrong_import_path_is_explained(words, expected):
    with pytest.raises(ValueError, match=expected):
        from_path(words)


def test_a_file_is_loaded_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("EXPERIMENT = object()\n")
    first = load_file(path)
    assert load_file(str(path)) is first
    assert defined(first, "EXPERIMENT") == [first.EXPERIMENT]


def test_a_folder_imports_its_files_relatively(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .part import VALUE\n")
    (folder / "part.py").write_text("VALUE = 5\n")
    assert load_file(folder).VALUE == 5


def test_a_file_that_fails_can_be_mended_and_loaded_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_file(path)
    path.write_text("VALUE = 10 * 1000\n")  # another length: the cache of compiled files looks at it
    assert load_file(path).VALUE == 10_000
    with pytest.raises(FileNotFoundError, match="no such Python file"):
        load_file(tmp_path / "nowhere.py")


def test_the_name_of_a_loaded_file_is_the_same_in_every_process(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("VALUE = 1\n")
    script = f"from fedstrata.base.plugins import load_file; print(load_file({str(path)!r}).__name__)"
    names = {subprocess.check_output([sys.executable, "-c", script], text=True) for _ in range(2)}
    assert names == {f"{load_file(path).__name__}\n"}


def test_a_plugin_is_loaded_once_and_warns_once(outside):
    outside({"outside_four.py": "VALUE = 3\n"}, {"fedstrata.once": {"gone": "outside_gone"}})
    with pytest.warns(PluginWarning):
        plugins("fedstrata.once")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plugins("fedstrata.once") == {}
