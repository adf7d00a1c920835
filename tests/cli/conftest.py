"""Commands in this process: with a separate cache, and without files outside the test's folder."""

import json

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fedstrata.cli.main import main


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`command("run", "digits", ...)` gives the exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.delenv("FEDSTRATA_DEBUG", raising=False)

    def call(*words: str):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    yield call
    jax.config.update("jax_compilation_cache_dir", before)  # a command stores compiled programs in another folder
    compilation_cache.reset_cache()


@pytest.fixture
def answer(command):
    """The JSON of a command that must succeed."""

    def call(*words: str, code: int = 0):
        found, out, err = command(*words, "--json")
        assert found == code, err
        return json.loads(out)

    return call


@pytest.fixture
def mistake(command):
    """The error line of a command that must be refused."""

    def call(*words: str) -> str:
        code, out, err = command(*words)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert "Traceback" not in err
        return err

    return call
