"""Apps that `fedstrata deploy init` wrote before the folders moved, and what they exchange with Flower."""

import hmac
import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.task_identity import TaskIdentity

import fedstrata as fs
from fedstrata.deploy.flower import grid_link
from fedstrata.deploy.flower.client_app import opened, record
from fedstrata.deploy.flower.deployment import Deployment, resolve
from fedstrata.deploy.flower.worker import Worker
from fedstrata.deploy.messages import Message, Stage, proof

OLD_APP = {
    "__init__": "",
    "task": """
        import numpy as np

        import fedstrata as fs
        from fedstrata.runtime.flower import Deployment

        problem = fs.Average(lambda w, example: (w - example["x"]) @ (w - example["x"]))
        load = lambda settings: fs.Federation.from_clients([{"x": np.ones((5, 3))}])
        deployment = Deployment(problem, fs.FedAvg(0.1), load, rounds=1, sites=1)
    """,
    "server_app": """
        from fedstrata.runtime.flower.server import server_app

        app = server_app("oldapp.task:deployment")
    """,
    "client_app": """
        from fedstrata.runtime.flower.client import client_app

        app = client_app("oldapp.task:deployment")
    """,
}


@pytest.fixture
def old_app(tmp_path, monkeypatch):
    (tmp_path / "oldapp").mkdir()
    for name, text in OLD_APP.items():
        (tmp_path / "oldapp" / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "oldapp"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "place", "kind"),
    [("server_app", "server_app.server_app", ServerApp),
     ("client_app", "client_app.client_app", ClientApp)],
)  # fmt: skip
def test_an_old_app_works_and_warns_of_the_new_place(old_app, module, place, kind):
    with pytest.warns(DeprecationWarning, match=f"is now fedstrata.deploy.flower.{place}"):
        found = __import__(f"oldapp.{module}", fromlist=["app"])
    assert isinstance(found.app, kind)


def test_an_old_task_is_a_deployment(old_app):
    with pytest.warns(DeprecationWarning, match=r"is now fedstrata\.deploy\.flower\.Deployment"):
        found = resolve("oldapp.task:deployment")
    assert type(found) is Deployment
    assert isinstance(found.algorithm, fs.FedAvg)


def test_an_old_client_app_does_not_import_jax(old_app):
    """It starts for every message, and passes it on to the worker."""
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); import oldapp.client_app; print('jax' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=old_app, capture_output=True, text=True)
    assert found.stdout.strip() == "False", found.stderr


def test_names_on_the_wire_are_those_of_the_format(tmp_path, monkeypatch):
    """A worker of another release reads these names, and a server of another release reads the reply's."""
    for name in ("run_id", "node_id", "task_id"):  # Flower sets them in a server app
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    call = Message("first", Stage(-1, 0), "Ulm", {})
    sent = grid_link._outgoing(call, 7, {"terms": "{}"}, "12", "34")
    assert (sent.metadata.message_type, sent.metadata.group_id) == ("query.begin0", "-1")
    made = hmac.new(b"34", b'fedstrata call 1 15 {"terms": "{}"}' + call.encode(), "sha256").hexdigest()
    assert dict(sent.content["about"]) == {"terms": "{}", "proof": made, "call": "12"}
    assert sent.content["body"]["letter"].numpy().tobytes() == call.encode()
    later = grid_link._outgoing(call._replace(stage=Stage(3, 1, 2)), 7, {"digest": "ab"}, "12", "34")
    assert (later.metadata.message_type, later.metadata.group_id) == ("train.phase2", "3")

    load = lambda settings: fs.Federation.from_clients([{"x": np.ones((5, 3))}])
    problem = fs.Average(lambda w, example: (w - example["x"]) @ (w - example["x"]))
    deployment = Deployment(problem, fs.FedAvg(0.1), load, 1, 1, {"params": np.zeros(3)})
    worker = Worker(deployment, tmp_path, "1")
    about, _ = worker.answer({"kind": "query.survey", "settings": {"site": "Ulm"}, "about": {}}, b"")
    row = json.loads(about["survey"])
    assert row[:3] == ["Ulm", {"train": 5}, {"train": {"x": ["float64", [3]]}}]
    assert about["mark"] == (tmp_path / "mark").read_text()
    (tmp_path / "policy.json").write_text('{"sites_at_least": 1}')
    terms = {"run": "first", "sites": [row], "program": "1", "rounds": 1, "evaluations": 1, "origin": "0f"}
    header = {"terms": json.dumps(terms)}
    header["proof"] = proof(about["mark"], header, call.encode())
    request = {"kind": "query.begin0", "settings": {"site": "Ulm"}, "about": header}
    worker.answer(request, call.encode())
    assert json.loads((tmp_path / "runs" / "first" / "terms.json").read_text()) == terms
    assert (tmp_path / "runs" / "first" / "-1_0.state").exists()
    reply = SimpleNamespace(has_content=lambda: True, content=record({"error": "no data", "call": "12"}, b""))
    assert opened(reply.content) == ({"error": "no data", "call": "12"}, b"")
    assert grid_link._reply(reply, "12") == 'reported "no data"'
