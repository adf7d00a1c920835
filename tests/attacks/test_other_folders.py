"""`deploy server` changes the rights of its own files alone, wherever its database lies."""

import os
import stat

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedstrata.deploy.flower import app_template
from fedstrata.deploy.flower.config import ServerConfig


@pytest.fixture
def app(tmp_path):
    """An app beside other things, as others can read it."""
    mask = os.umask(0o022)
    app_template.write(tmp_path / "hospitals", 1)
    for name in (".git/hooks/pre-commit", "run.sh", "out/first/reports.jsonl"):
        (tmp_path / "hospitals" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hospitals" / name).write_text("")
        (tmp_path / "hospitals" / name).chmod(0o755)
    yield tmp_path / "hospitals"
    os.umask(mask)


def server(app, database, more=""):
    (app / "server.toml").write_text(f'address = "127.0.0.1:9192"\ndatabase = "{database}"\n{more}')
    return ServerConfig.read(app / "server.toml")


def rights(folder):
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


BEHIND = 'behind = "127.0.0.1:9292"\n'


@pytest.mark.parametrize("start", [ServerConfig.command, ServerConfig.write_proxy])
def test_a_database_in_the_apps_folder_leaves_the_rights_of_the_app_alone(app, start):
    names = [f"superlink.db{end}" for end in ("", "-wal", "-shm", "-journal")]
    for name in (*names, "superlink.db-notes"):
        (app / name).write_text("")
    found = server(app, "superlink.db", BEHIND)
    before = rights(app)
    start(found)
    after = rights(app)
    assert {after[app / name] for name in names} == {0o600}
    own = {app / "out", *(app / "out").rglob("*"), *(app / name for name in names)}
    changed = {path for path in before if after[path] != before[path]}
    assert changed == own - {app / "out" / "nginx", app / "out" / "nginx.conf"}


def test_the_folder_of_the_runs_is_for_its_owner_wherever_the_database_lies(app):
    server(app, "superlink.db").command()
    assert {path for path, mode in rights(app / "out").items() if mode & 0o077} == set()


def test_a_new_folder_of_a_database_is_for_its_owner(app, tmp_path):
    server(app, tmp_path / "new" / "superlink.db").command()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o757])
@pytest.mark.parametrize("start", [ServerConfig.command, ServerConfig.write_proxy])
def test_a_database_in_a_folder_where_others_can_put_files_is_refused(app, tmp_path, start, mode):
    """Its journal would be played back, whoever wrote it; and the folder's rights are not changed, such as /tmp's."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "theirs").write_text("")
    shared.chmod(mode)
    before = rights(shared)
    with pytest.raises(ValueError, match=rf"others can put files into {shared}.*out/superlink\.db.*chmod go-w"):
        start(server(app, shared / "superlink.db", BEHIND))
    assert rights(shared) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can give a folder to another user")
def test_a_database_in_a_folder_of_another_user_is_refused_with_the_reason(app, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 1234, 1234)
    with pytest.raises(
        ValueError, match=rf"{folder}, which .* belongs to user 1234, and this is user 0: run the server"
    ):
        server(app, folder / "superlink.db").command()


def test_a_link_in_place_of_the_database_is_not_followed(app, tmp_path):
    (tmp_path / "theirs").write_text("")
    (app / "superlink.db").symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").chmod(0o644)
    server(app, "superlink.db").command()
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o644
