"""Over real Flower, other server programs: an agent app, whose bundle sites would run unchecked; and bad calls."""

import json
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deployments import federation, finished, programs_or_skip, simulated, started, wait_until, write_app

ROUNDS = 1

AGENT = """
    import json
    import os
    from pathlib import Path

    from flwr.agentapp import AgentApp

    at_site = "FEDSTRATA_STATE" in os.environ
    if at_site:
        Path({mark!r}).write_text("unapproved code runs at a site")
    app = AgentApp()


    def asks(agent, name, **arguments):
        return json.loads(agent.grid.call({{"name": name, "call_id": "0", "arguments": arguments}})["output"])


    @app.main()
    def main(agent, context):
        if not at_site:
            to = [node["id"] for node in asks(agent, "get_nodes", sample_size=None)["nodes"]]
            sent = [{{"dst_node_id": i, "payload": "hello", "reply_to_message_id": None}} for i in to]
            asks(agent, "push_messages", messages=sent)
"""
PROJECT = """
    [project]
    name = "evil"
    version = "1.0.0"
    description = "a test"
    license = "Apache-2.0"
    dependencies = []
    [tool.flwr.app]
    publisher = "evil"
    fab-include = ["evil/*.py"]
    [tool.flwr.app.components]
    agentapp = "evil.agent:app"
    [tool.flwr.app.config]
    run = "first"
"""
START = """
import hashlib, sys
from pathlib import Path
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from fedstrata.deploy.flower.approval import bundle
from fedstrata.deploy.flower.config import ServerConfig
from fedstrata.deploy.flower.control import Control
home, address, app = sys.argv[1:]
data = bundle(Path(app))
fab = Fab(hash_str=hashlib.sha256(data).hexdigest(), content=data)
print(Control(ServerConfig(Path(home), address)).client.StartRun(StartRunRequest(fab=fab, user_prompt="go")).run_id)
"""
ACQUIRE = """
import sys
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
client = RuntimeHttpClient.from_server_address(
    server_address="127.0.0.1:" + sys.argv[1], insecure=True, root_certificates=None,
    interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")],
    retry_invoker=make_simple_http_retry_invoker(),
)
client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind.value for kind in TaskType]))
print("a task was asked for")
"""


CALLS = """
    import json
    import time
    from pathlib import Path

    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp

    from fedstrata.deploy.flower.client_app import record

    app = ServerApp()


    @app.main()
    def main(grid, context):
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.2)
        asks = lambda content: grid.send_and_receive([Message(content, nodes[0], "query.survey")], timeout=90)
        large = RecordDict({{"about": ConfigRecord({{"x": "a" * 1_300_000}})}})
        found = [asks(record({{"call": "first"}}, b"")), asks(large), asks(record({{"call": "last"}}, b""))]
        about = lambda reply: reply.error.reason if reply.has_error() else sorted(reply.content["about"])
        Path({out!r}).write_text(json.dumps([[about(reply) for reply in replies] for replies in found]))
"""


def script(flower, code, *words):
    command = [*flower.prefix, sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_site_runs_no_agent_app_and_gives_its_messages_to_no_other_user(tmp_path):
    programs_or_skip()
    app, evil, mark = write_app(tmp_path, "strangerapp", "FedAvg", ROUNDS), tmp_path / "evil", tmp_path / "mark"
    (evil / "evil").mkdir(parents=True)
    (evil / "evil" / "__init__.py").write_text("")
    (evil / "evil" / "agent.py").write_text(textwrap.dedent(AGENT).format(mark=str(mark)))
    (evil / "pyproject.toml").write_text(textwrap.dedent(PROJECT))
    with federation(tmp_path, app) as flower:
        asked = script(flower, ACQUIRE, flower.sites["site-0"].port)
        until = time.monotonic() + 60
        while "Connection refused" in asked.stderr and time.monotonic() < until:  # the SuperNode is starting
            asked = script(flower, ACQUIRE, flower.sites["site-0"].port)
        assert asked.returncode != 0
        assert "401" in asked.stderr
        done = script(flower, START, flower.home, flower.server.address, evil)
        assert done.returncode == 0, done.stderr
        refused = f"refused run {done.stdout.strip()}, which a flwr-agentapp leads"
        until = time.monotonic() + 120
        while refused not in flower.log("site-0", 200) and time.monotonic() < until:
            time.sleep(0.5)
        assert refused in flower.log("site-0", 200), flower.log("superlink")
        found = finished(started(flower, tmp_path / "out"), tmp_path / "out" / "first")
    assert not mark.exists()
    np.testing.assert_allclose(found, simulated("FedAvg", ROUNDS).solution(), rtol=1e-12)


@pytest.mark.slow
def test_a_site_answers_after_a_call_that_it_cannot_open(tmp_path):
    """Its header is larger than a message may have: the client app refuses it before it knows the message."""
    programs_or_skip()
    app, out = write_app(tmp_path, "badcalls", "FedAvg", ROUNDS, sites=1), tmp_path / "answers.json"
    (app / "badcalls" / "server_app.py").write_text(textwrap.dedent(CALLS).format(out=str(out)))
    with federation(tmp_path, app, sites=1) as flower:
        process = started(flower, tmp_path / "out")
        wait_until(out.exists, tmp_path / "out" / "run.log", process)
        process.wait(60)
        first, bad, last = json.loads(out.read_text())
    assert first == last == [["call", "mark", "survey"]]
    assert bad == ["ClientApp stopped responding."]
