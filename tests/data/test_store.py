import gzip
import hashlib
import shutil
import subprocess
import sys

import pytest

from fedstrata.data.sources import available, store

GOOD = b"0 1\n"


@pytest.fixture
def one_file(monkeypatch, tmp_path):
    """A table with a single file, two empty places, and an official copy reached by a file:// address."""
    official = tmp_path / "official" / "toy.txt"
    official.parent.mkdir()
    official.write_bytes(GOOD)
    entry = {"bytes": 4, "sha256": hashlib.sha256(GOOD).hexdigest(), "url": official.as_uri()}
    table = {"toy": {"toy.txt": entry}}
    monkeypatch.setattr(store, "_table", lambda: table)
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path / "shared"))
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    return tmp_path, entry


def put(folder, content=GOOD, name="toy.txt"):
    (folder / "toy").mkdir(parents=True, exist_ok=True)
    (folder / "toy" / name).write_bytes(content)
    return folder / "toy" / name


def test_shared_folder_comes_before_cache_before_download(one_file):
    root, _ = one_file
    downloaded = store.find("toy", "toy.txt")
    assert downloaded == root / "cache" / "data" / "toy" / "toy.txt"
    assert list(downloaded.parent.iterdir()) == [downloaded]  # no temporary file is left
    (root / "official" / "toy.txt").unlink()
    assert store.find("toy", "toy.txt") == downloaded
    shared = put(root / "shared")
    assert store.find("toy", "toy.txt") == shared


def test_cache_default_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDSTRATA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache() == tmp_path / "fedstrata" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache() == tmp_path / ".cache" / "fedstrata" / "data"


def test_a_damaged_file_is_refused_even_if_an_intact_one_follows(one_file):
    root, entry = one_file
    put(root / "cache" / "data")
    damaged = put(root / "shared", b"0 2\n")
    with pytest.raises(ValueError, match="is not the expected file") as caught:
        store.find("toy", "toy.txt")
    for part in (str(damaged), entry["sha256"], hashlib.sha256(b"0 2\n").hexdigest(), "Delete it"):
        assert part in str(caught.value)
    damaged.write_bytes(GOOD)  # repaired within the same process: looked at again
    assert store.read("toy", "toy.txt") == GOOD


def test_a_damaged_download_is_thrown_away(one_file):
    root, _ = one_file
    (root / "official" / "toy.txt").write_bytes(b"<html>sorry</html>")
    with pytest.raises(ValueError, match="was discarded"):
        store.find("toy", "toy.txt")
    assert list((root / "cache" / "data" / "toy").iterdir()) == []


def test_offline_message_names_all_places_and_what_to_do(one_file, monkeypatch):
    root, entry = one_file
    (root / "official" / "toy.txt").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        store.find("toy", "toy.txt")
    for part in (
        str(root / "shared" / "toy"),
        str(root / "cache" / "data" / "toy"),
        entry["url"],
        entry["sha256"],
        "copy the file",
    ):
        assert part in str(caught.value)
    entry.pop("url")
    monkeypatch.delenv("FEDSTRATA_DATA")
    with pytest.raises(FileNotFoundError, match=r"\$FEDSTRATA_DATA \(not set\)(.|\n)*without an official address"):
        store.find("toy", "toy.txt")


def test_an_official_unpacked_file_is_as_good_as_ours(one_file):
    root, entry = one_file
    packed = gzip.compress(GOOD)
    forms = {"bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
    forms["unpacked"] = {"sha256": entry["sha256"], "url": entry["url"]}
    store._table()["toy"]["toy.txt.gz"] = forms
    assert store.read("toy", "toy.txt.gz") == GOOD  # downloaded unpacked
    (root / "cache" / "data" / "toy" / "toy.txt").unlink()
    put(root / "shared", packed, "toy.txt.gz")
    assert store.read("toy", "toy.txt.gz") == GOOD


def test_status_check_and_fetch(one_file):
    root, _ = one_file
    assert store.status() == [("toy", "toy.txt", "missing", 4, "unchecked")]
    path = put(root / "shared", b"bad!")
    assert store.status("toy") == [("toy", "toy.txt", str(path), 4, "unchecked")]
    assert store.check()[0].checksum == "bad"
    assert store.status()[0].checksum == "bad"
    path.unlink()
    assert store.fetch("toy") == [("toy", "toy.txt", str(root / "cache" / "data" / "toy" / "toy.txt"), 4, "ok")]
    with pytest.raises(ValueError, match="unknown data source with files 'toys'; did you mean toy"):
        store.fetch("toys")


def test_one_file_is_hashed_once(one_file, monkeypatch):
    put(one_file[0] / "shared")
    store.find("toy", "toy.txt")
    monkeypatch.setattr(store.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    store.find("toy", "toy.txt")


def test_table_is_whole_and_names_only_known_sources():
    table = store._table()
    assert set(table) <= set(available())
    for entries in table.values():
        for entry in entries.values():
            assert len(bytes.fromhex(entry["sha256"])) == 32
            assert entry["bytes"] > 0
            assert entry.get("url", "https://").startswith("https://")


def test_table_agrees_with_the_published_list(need):
    need("mnist")
    listing = store.shared() / "CHECKSUMS" if store.shared() else None
    if listing is None or not listing.is_file():
        pytest.skip("no CHECKSUMS list beside the data; set FEDSTRATA_DATA to the shared data folder")
    published = dict(reversed(line.split()) for line in listing.read_text().splitlines() if line.strip())
    ours = {
        f"{source}/{name}": e["sha256"] for source, entries in store._table().items() for name, e in entries.items()
    }
    assert ours == published


def test_a_damaged_copy_of_a_real_file_is_refused(need, monkeypatch, tmp_path):
    need("german_credit")
    real = store.find("german_credit", "german.data")
    copy = tmp_path / "german_credit" / "german.data"
    copy.parent.mkdir()
    shutil.copyfile(real, copy)
    monkeypatch.setenv("FEDSTRATA_DATA", str(tmp_path))
    assert store.find("german_credit", "german.data") == copy
    content = bytearray(copy.read_bytes())
    content[100] ^= 1
    copy.write_bytes(content)
    with pytest.raises(ValueError, match=r"german\.data is not the expected file"):
        store.find("german_credit", "german.data")


def test_looking_up_files_needs_no_jax():
    code = "import sys; from fedstrata.data.sources import store; store.status(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
