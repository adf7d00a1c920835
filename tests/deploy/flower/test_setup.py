"""Before a run: keys, commands, the app template, approval, and the preflight check of a site."""

import json
import os
import ssl
import stat
import subprocess
import threading
import tomllib
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.config import parse_config_args
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.routers.fleet import node_auth

from fedstrata.cli.main import main
from fedstrata.deploy.flower import app_template
from fedstrata.deploy.flower.approval import approve, bundle, fingerprint
from fedstrata.deploy.flower.config import ServerConfig, SiteConfig, environment
from fedstrata.deploy.flower.keys import days_left, server_keys, site_keys


@pytest.fixture
def app(tmp_path):
    """A new app, with a server's and a site's keys."""
    home = tmp_path / "hospitals"
    app_template.write(home, 2)
    server_keys(home / "keys", ["127.0.0.1", "localhost"])
    site_keys(home / "keys", "site-1")
    return home


@pytest.fixture
def server(app):
    """A web server with the server's certificate; its Date header is `server.date()`."""
    found = HTTPServer(("127.0.0.1", 0), _Clock)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(app / "keys" / "server.crt", app / "keys" / "server.key")
    found.socket = context.wrap_socket(found.socket, server_side=True)
    found.date, found.known = lambda: datetime.now(UTC), [site_key(app)]
    threading.Thread(target=found.serve_forever, daemon=True).start()
    path = app / "sites" / "site-1.toml"
    path.write_text(path.read_text().replace("127.0.0.1:9092", f"127.0.0.1:{found.server_port}"))
    yield found
    found.shutdown()
    found.server_close()


def site_key(app):
    key = load_ssh_public_key((app / "keys" / "site-1.pub").read_bytes())
    return public_key_to_bytes(key)


class _Clock(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    def do_POST(self):
        """As Flower activates a node: its own check of the signature, then of the interval if it knows the key."""
        sent = ActivateNodeRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        code, status = 2003, 400
        try:
            node_auth.authenticate_node(SimpleNamespace(headers=headers, state=SimpleNamespace(protobuf_request=sent)))
        except node_auth.HTTPException as error:
            code, status = None, error.status_code
        else:
            assert sent.heartbeat_interval == 0  # no node is activated with it
            if sent.public_key not in self.server.known:
                code, status = 2004, 412
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"code": code, "detail": "as Flower says"}).encode())

    def date_time_string(self, timestamp=None):
        return self.server.date().strftime("%a, %d %b %Y %H:%M:%S GMT")

    def log_message(self, *_):
        pass


def findings(app, capsys):
    """The findings of `deploy check` on the first site, by subject."""
    code = main(["deploy", "check", str(app / "sites" / "site-1.toml"), "--app", str(app), "--json"])
    found = {row["what"]: (row["good"], row["found"]) for row in json.loads(capsys.readouterr().out)["findings"]}
    assert code == (0 if all(good for good, _ in found.values()) else 1)
    return found


def test_private_keys_are_for_their_owner_and_never_overwritten(tmp_path):
    _, _, key = server_keys(tmp_path, ["127.0.0.1"])
    private, _ = site_keys(tmp_path, "north")
    for path in (key, private):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError, match="never overwritten"):
        site_keys(tmp_path, "north")
    with pytest.raises(FileExistsError, match="never overwritten"):
        server_keys(tmp_path, ["127.0.0.1"])


def test_the_server_is_verified_by_its_authority_and_by_no_other(tmp_path):
    """With OpenSSL as the reference."""
    mine, theirs = (server_keys(tmp_path / who, ["127.0.0.1", "example.org"]) for who in ("mine", "theirs"))
    verify = lambda authority, host: subprocess.run(
        ["openssl", "verify", "-CAfile", str(authority), *host, str(mine[1])], capture_output=True, text=True
    )
    assert verify(mine[0], ["-verify_hostname", "example.org"]).returncode == 0
    assert verify(mine[0], ["-verify_ip", "127.0.0.1"]).returncode == 0
    assert verify(mine[0], ["-verify_hostname", "example.com"]).returncode != 0
    assert verify(theirs[0], []).returncode != 0
    assert 364 < days_left(mine[1]) <= 365


def test_openssh_reads_a_sites_key(tmp_path):
    private, public = site_keys(tmp_path, "north")
    found = subprocess.run(["ssh-keygen", "-y", "-f", str(private)], capture_output=True, text=True)
    assert found.stdout.split()[:2] == public.read_text().split()[:2]


def test_programs_use_tls_and_registered_nodes(app):
    link, node = (
        ServerConfig.read(app / "server.toml").command(),
        SiteConfig.read(app / "sites" / "site-1.toml").command(),
    )
    assert {"--enable-supernode-auth", "--ssl-certfile", "--disable-runtime-dependency-installation"} <= set(link)
    assert {"--root-certificates", "--auth-supernode-private-key"} <= set(node)
    assert "--insecure" not in link + node
    found = environment(app)
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")


@pytest.mark.parametrize("address", ["example.org:9092", "192.168.1.7:9092", "[2001:db8::1]:9092"])
def test_insecure_is_for_loopback(tmp_path, address):
    path = tmp_path / "file.toml"
    path.write_text(f'site = "north"\nserver = "{address}"\ninsecure = true\n')
    with pytest.raises(ValueError, match="loopback only"):
        SiteConfig.read(path)
    path.write_text(f'address = "{address}"\nlisten = "127.0.0.1"\ninsecure = true\n')
    with pytest.raises(ValueError, match="loopback only"):
        ServerConfig.read(path)
    path.write_text('address = "127.0.0.1:9092"\ninsecure = true\n')  # it would listen on all addresses
    with pytest.raises(ValueError, match="loopback only"):
        ServerConfig.read(path)


def test_a_mistake_in_a_sites_file_is_named(tmp_path):
    path = tmp_path / "north.toml"
    path.write_text('site = "north"\nserver = "127.0.0.1:9092"\nautority = "keys/authority.crt"\n')
    with pytest.raises(ValueError, match="authority"):
        SiteConfig.read(path)
    path.write_text('site = "north"\n')
    with pytest.raises(ValueError, match="lacks server"):
        SiteConfig.read(path)
    path.write_text('site = "north"\nserver = "127.0.0.1:9092"\n[settings]\ndata = ["a", "b"]\n')
    with pytest.raises(TypeError, match=r"setting data must be a string, a number, true or false, not list"):
        SiteConfig.read(path).keep()


def test_settings_reach_flower_as_they_are_and_stand_in_no_command(tmp_path):
    """All users of a machine can read the commands of its processes."""
    given = {
        "data": 'a "quoted" \\ path\n\x7f é',
        "rows": 3,
        "share": 0.1,
        "huge": 1e300,
        "fast": True,
        "two words": "x",
    }
    site = SiteConfig(tmp_path, "north", "127.0.0.1:9092", state="north", insecure=True, settings=given)
    site.environment()
    assert not (tmp_path / "north" / "settings.toml").exists()  # a command that is only shown changes no setting
    site.keep()
    command = site.command()
    assert not any(str(value) in word for word in command for value in ("two words", "quoted", "1e+300"))
    path = command[command.index("--node-config") + 1]
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert parse_config_args([path]) == site.node_config == {**given, "site": "north", "state": str(tmp_path / "north")}


def test_a_new_app_sends_its_code_and_nothing_else(app):
    names = _inside(bundle(app))
    assert {name for name in names if "example" in name or "keys" in name or "sites" in name} == set()
    assert "hospitals/task.py" in names
    before = fingerprint(app)
    (app / "sites" / "site-1.toml").write_text("# changed")
    assert fingerprint(app) == before


def _inside(data):
    import io
    import zipfile

    return zipfile.ZipFile(io.BytesIO(data)).namelist()


def test_a_new_app_needs_an_empty_folder_and_a_name(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    with pytest.raises(FileExistsError, match="not empty"):
        app_template.write(tmp_path / "there", 3)
    with pytest.raises(ValueError, match="name"):
        app_template.write(tmp_path / "3 sites", 3)


def test_every_tumour_of_the_example_is_at_one_site(tmp_path):
    from sklearn.datasets import load_breast_cancer

    app_template.write(tmp_path / "app", 3)
    tables = [np.genfromtxt(p, delimiter=",", skip_header=1) for p in sorted((tmp_path / "app/example").glob("*.csv"))]
    data = load_breast_cancer()
    assert sum(len(t) for t in tables) == len(data.target)
    assert sum(t[:, -1].sum() for t in tables) == (data.target == 0).sum()
    texture = np.sort(np.concatenate([t[:, 0] for t in tables]))
    np.testing.assert_allclose(texture, np.sort(data.data[:, 1]), rtol=1e-5)


def test_a_ready_site_passes_all_checks(app, server, capsys):
    approve(app, app / "approved.txt")
    found = findings(app, capsys)
    assert all(good for good, _ in found.values()), found
    rows = len((app / "example" / "site-1.csv").read_text().splitlines()) - 1
    counts = dict(part.split(": ") for part in found["data"][1].split(", "))
    assert int(counts["train"].split()[0]) + int(counts["test"].split()[0]) == rows


def test_all_mistakes_of_a_site_are_found_at_once(app, server, capsys):
    """No approval, a key that others can read, a missing value in the data, a clock that is ahead."""
    data = app / "example" / "site-1.csv"
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:-1], "," + lines[-1].partition(",")[2]]) + "\n")
    (app / "keys" / "site-1.key").chmod(0o644)
    server.date = lambda: datetime.now(UTC) - timedelta(days=2)
    found = findings(app, capsys)
    wrong = {what: text for what, (good, text) in found.items() if not good}
    assert {"app", "private key", "data", "clock"} <= set(wrong)
    assert "deploy approve" in wrong["app"]
    assert "chmod 600" in wrong["private key"]
    assert "NaN" in wrong["data"]
    assert "ahead" in wrong["clock"]
    assert found["server"][0]


def test_an_unregistered_key_is_not_ready(app, server, capsys):
    approve(app, app / "approved.txt")
    server.known = []
    found = findings(app, capsys)
    assert [what for what, (good, _) in found.items() if not good] == ["registered"]
    assert "deploy register site-1.pub" in found["registered"][1]


def test_a_refused_signature_is_not_taken_for_an_unregistered_key(app, server, capsys, monkeypatch):
    monkeypatch.setattr(node_auth, "verify_signature", lambda *_: False)
    good, text = findings(app, capsys)["registered"]
    assert not good
    assert "refuses this site's signature" in text
    assert "private key" in text
    assert "deploy register" not in text


@pytest.mark.parametrize("seconds", [-600, -60, 60, 600])
def test_a_wrong_clock_is_not_taken_for_a_wrong_key(app, server, capsys, monkeypatch, seconds):
    """The clock is checked first, and corrected. Here the server's is the wrong one, which looks the same."""
    monkeypatch.setattr(node_auth, "now", lambda: datetime.now(UTC) + timedelta(seconds=seconds))
    server.date = node_auth.now
    found = findings(app, capsys)
    assert found["registered"][0]
    assert ("behind" if seconds > 0 else "ahead of") in found["clock"][1]
    assert "set it" in found["clock"][1]


def test_the_certificate_of_another_server_is_refused(app, server, capsys):
    (app / "keys" / "authority.crt").unlink()
    server_keys(app / "other", ["127.0.0.1"])
    os.rename(app / "other" / "authority.crt", app / "keys" / "authority.crt")
    good, text = findings(app, capsys)["server"]
    assert not good
    assert "is not the server" in text


def test_a_command_is_shown_and_not_started(app, capsys):
    assert main(["deploy", "server", "--app", str(app), "--print"]) == 0
    assert " -P -m fedstrata.deploy.flower.superlink " in capsys.readouterr().out
    assert main(["deploy", "run", "--app", str(app), "--print", "--name", "second", "--rounds", "5"]) == 0
    said = capsys.readouterr().out
    assert 'run="second"' in said
    assert "rounds=5" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["deploy", "initt"], "init"),
        (["deploy", "init"], "needs the name of a new folder"),
        (["deploy", "server", "north"], "takes no argument"),
        (["deploy", "server", "--insecure"], "is for `fedstrata deploy local`"),
        (["deploy", "local", "--app", "nowhere"], "no Flower app"),
        (["deploy", "register", "north.pub"], "deploy keys"),
    ],
)
def test_mistakes_are_reported_in_one_line(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_new_app_is_a_flower_app(app):
    about = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert about["components"]["clientapp"] == "hospitals.client_app:app"
    assert about["fab-include"] == ["hospitals/*.py"]
    assert Path(app / "hospitals" / "client_app.py").exists()
