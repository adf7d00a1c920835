"""What strangers find on the server's disk and at its port."""

import http.client
import json
import os
import shlex
import shutil
import ssl
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedstrata.cli.main import main
from fedstrata.deploy.flower import app_template, supernode
from fedstrata.deploy.flower.config import ServerConfig
from fedstrata.deploy.flower.keys import server_keys, site_keys
from fedstrata.deploy.flower.local_federation import LocalFederation, free_ports
from fedstrata.deploy.policy import Policy

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@pytest.fixture
def app(tmp_path):
    mask = os.umask(0o022)
    app_template.write(tmp_path / "hospitals", 1)
    yield tmp_path / "hospitals"
    os.umask(mask)


def open_to_others(folder):
    """Files and folders that others can read, change or enter, as far as the folders above them let them."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if os.stat(os.path.join(parent, name)).st_mode & 0o077]
        found += [name for name in (*folders, *names) if os.stat(os.path.join(parent, name)).st_mode & 0o077]
    return sorted(found)


def test_the_servers_files_are_for_their_owner_also_those_that_exist(app):
    """The database has the code of all apps and all messages; `out` has the sites' names, reports and checkpoints."""
    (app / "out" / "first" / "checkpoints").mkdir(parents=True)
    for name in ("out/superlink.db", "out/superlink.db-wal", "out/first/sites.json", "out/first/reports.jsonl"):
        (app / name).write_text("")
    (app / ".flwr").mkdir()
    (app / ".flwr" / "config.toml").write_text("")
    server = ServerConfig.read(app / "server.toml")
    assert open_to_others(app / "out") != []
    server.command()
    server.connect()
    assert open_to_others(app / "out") == []
    assert open_to_others(app / ".flwr") == []
    assert not {"out", ".flwr"} & set(open_to_others(app))
    assert stat.S_IMODE((app / "out/superlink.db").stat().st_mode) == 0o600


def test_links_in_the_servers_folder_are_not_followed(app, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("")
    before = (tmp_path / "elsewhere" / "file").stat().st_mode
    (app / "out").mkdir()
    (app / "out" / "link").symlink_to(tmp_path / "elsewhere")
    (app / "out" / "other").symlink_to(tmp_path / "elsewhere" / "file")
    ServerConfig.read(app / "server.toml").command()
    assert (tmp_path / "elsewhere" / "file").stat().st_mode == before


def test_programs_write_for_their_owner(app, tmp_path):
    """The umask of every program that is started: the SuperLink, a SuperNode, a run."""
    federation = LocalFederation(app, tmp_path / "home", {}, secure=False)
    script = ["sh", "-c", "umask > seen; touch made"]
    federation._start("superlink", script, dict(os.environ))
    federation.processes["superlink"].wait(5)
    assert (tmp_path / "home" / "seen").read_text().strip() == "0077"
    assert open_to_others(tmp_path / "home") == []


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o666])
@pytest.mark.parametrize("action", ["site", "check"])
def test_a_sites_file_that_others_can_read_or_change_is_refused(app, capsys, mode, action):
    path = app / "sites" / "site-1.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(mode)
    words = ["deploy", action, str(path), "--app", str(app)]
    assert main([*words, "--print"] if action == "site" else words) == 2
    assert f"chmod 600 {path}" in capsys.readouterr().err


def test_a_site_does_not_start_with_a_private_key_that_others_can_read(app, capsys):
    site_keys(app / "keys", "site-1")[0].chmod(0o640)
    assert main(["deploy", "site", str(app / "sites" / "site-1.toml"), "--app", str(app), "--print"]) == 2
    assert "site-1.key: chmod 600" in capsys.readouterr().err


def test_a_service_that_starts_a_site_obeys_the_policy_that_its_file_has_now(app, capsys, monkeypatch):
    """`deploy site --print` is for a service file, which does not run `deploy site` again."""
    path, state = app / "sites" / "site-1.toml", app / "sites" / "site-1"
    assert main(["deploy", "site", str(path), "--app", str(app), "--print"]) == 0
    words = dict(word.split("=", 1) for word in shlex.split(capsys.readouterr().out) if word.startswith("FEDSTRATA_"))
    path.write_text(path.read_text().replace("# rounds = 1000", "rounds = 7"))
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", lambda: sys.exit(0))
    monkeypatch.setattr(sys, "argv", ["supernode"])
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    for name in ("short_sleeps", "short_pulls", "short_heartbeats", "sign_with_the_servers_time",
                 "persistent_activation", "persistent_connections", "only_runs_of_server_apps",
                 "bounded_messages"):  # fmt: skip
        monkeypatch.setattr(supernode.patches, name, lambda *_: None)
    monkeypatch.setattr(supernode, "start_superexec", lambda *_: None)
    with pytest.raises(SystemExit):
        supernode.main()
    assert Policy.kept_in(state).rounds == 7
    path.chmod(0o644)
    with pytest.raises(SystemExit, match="chmod 600"):
        supernode.main()


class _SuperLink(BaseHTTPRequestHandler):
    """Tells what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        about = {"path": self.path, "bytes": len(body), "headers": {k.lower(): v for k, v in self.headers.items()}}
        found = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    do_GET = do_PUT = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """nginx with the configuration of `deploy server --behind`, and a program behind it that answers everything."""
    folder = tmp_path_factory.mktemp("proxy") / "hospitals"
    app_template.write(folder, 1)
    server_keys(folder / "keys", ["127.0.0.1", "localhost"])
    outside, inside = free_ports(2)
    (folder / "server.toml").write_text(
        f'address = "127.0.0.1:{outside}"\nlisten = "127.0.0.1"\nbehind = "127.0.0.1:{inside}"\nlargest_message = 8\n'
    )
    behind = ThreadingHTTPServer(("127.0.0.1", inside), _SuperLink)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "keys" / "server.crt", folder / "keys" / "server.key")
    behind.socket = context.wrap_socket(behind.socket, server_side=True)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    written = ServerConfig.read(folder / "server.toml").write_proxy()
    process = subprocess.Popen(["nginx", "-c", str(written), "-g", "daemon off;"])
    trust = ssl.create_default_context(cafile=str(folder / "keys" / "authority.crt"))
    yield lambda *words, **more: asked(outside, trust, *words, **more)
    process.terminate()
    process.wait()
    behind.shutdown()
    behind.server_close()


def asked(port, trust, method, path, body=b"", headers=None):
    """Status and text of a response to a request whose path is sent as it is."""
    until = time.monotonic() + 5
    while True:
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=5)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.05)
        finally:
            connection.close()


@needs_nginx
def test_the_proxy_passes_what_sites_ask_unchanged(proxy):
    headers = {"flwr-signature": "abc=", "flwr-public-key": "def=", "flwr-timestamp": "2026-01-01T00:00:00+00:00"}
    status, text = proxy("POST", "/v1/fleet/pull-messages", b"x" * 6_000_000, headers)
    found = json.loads(text)
    assert (status, found["path"], found["bytes"]) == (200, "/v1/fleet/pull-messages", 6_000_000)
    assert headers.items() <= found["headers"].items()


@needs_nginx
@pytest.mark.parametrize(
    "path",
    [
        "/", "/v1/control/list-runs", "/v1/control/start-run", "/v1/control/stream-logs", "/v1/runtime/pull-task-input",
        "/v1/fleet", "/v1/fleet/", "/docs", "/openapi.json", "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs", "/v1/control/../fleet/get-run",
        "/v1/control/list-runs/../../fleet/get-run", "//v1/control/list-runs", "/v1//control/list-runs",
        "//v1/fleet/get-run", "/V1/CONTROL/list-runs", "/v1/fleet/get-run/../../control/list-runs",
        "/v1/control/list-runs?/v1/fleet/get-run", "/v1/control/list-runs#/v1/fleet/get-run",
        "/v1/fleet/get-run?x=/v1/control/list-runs", "/v1/fleet/get-run;/../control", "/v1/fleet/get%2drun",
    ],
)  # fmt: skip
def test_the_proxy_answers_404_to_all_else(proxy, path):
    assert proxy("POST", path)[0] == 404


@needs_nginx
def test_the_proxy_refuses_other_methods_and_larger_messages(proxy):
    assert proxy("GET", "/v1/fleet/get-run")[0] == 404
    assert proxy("PUT", "/v1/fleet/get-run")[0] == 404
    assert proxy("POST", "/v1/fleet/push-object", b"", {"content-length": "9000000"})[0] == 413


def test_a_superlink_behind_a_proxy_listens_on_loopback(app, capsys):
    path = app / "server.toml"
    assert main(["deploy", "server", "--app", str(app), "--behind"]) == 2
    assert "behind = " in capsys.readouterr().err
    path.write_text('address = "example.org:9092"\nlisten = "0.0.0.0"\nbehind = "127.0.0.1:9192"\n')
    server = ServerConfig.read(path)
    words = server.command()
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--port") + 1] == "9192"
    assert 'address = "127.0.0.1:9192"' in (server.connect() / "config.toml").read_text()
    assert main(["deploy", "server", "--app", str(app), "--behind", "--print"]) == 0
    said = capsys.readouterr().out
    assert "listen 0.0.0.0:9092 ssl;" in said
    assert "client_max_body_size 64m;" in said
    assert "proxy_ssl_verify on;" in said
    for wrong in ('behind = "0.0.0.0:9192"', 'behind = "example.org:9192"', "largest_message = 1"):
        path.write_text(f'address = "example.org:9092"\n{wrong}\n')
        with pytest.raises(ValueError, match=wrong.split()[0]):
            ServerConfig.read(path)


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "192.168.1.7", "127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("behind", ["", "127.0.0.1:9192"])
def test_a_superlink_that_others_can_reach_is_started_with_a_warning(listen, behind, app, capsys):
    (app / "server.toml").write_text(f'address = "example.org:9092"\nlisten = "{listen}"\nbehind = "{behind}"\n')
    assert main(["deploy", "server", "--app", str(app), "--print"]) == 0
    said = capsys.readouterr()
    assert "flower.superlink" in said.out
    open_to_others = not behind and listen not in ("127.0.0.1", "::1", "localhost")
    assert ("whoever reaches example.org:9092 can start and stop runs" in said.err) == open_to_others
