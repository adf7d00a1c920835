"""A whole run whose sites reach the SuperLink through nginx, with the configuration of `deploy server --behind`."""

import os
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import cases
from deployments import finished, programs_or_skip, simulated, started, write_app

from fedstrata.deploy.flower.local_federation import LocalFederation, free_ports
from fedstrata.deploy.policy import Policy

ROUNDS = 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_a_run_through_the_proxy_equals_the_simulated_one(tmp_path):
    programs_or_skip()
    app = write_app(tmp_path, "proxyapp", "FedAvg", ROUNDS)
    here = os.path.dirname(cases.__file__)
    given = {f"site-{i}": {"number": i} for i in range(3)}
    policy = Policy(sites_at_least=3)
    extra = {"PYTHONPATH": here, "JAX_ENABLE_X64": "1"}
    flower = LocalFederation(app, tmp_path / "home", given, extra=extra, policy=policy)
    [port] = free_ports(1)
    inside = flower.server.address
    flower.server = flower.server._replace(address=f"127.0.0.1:{port}", behind=inside, database="out/superlink.db")
    flower.sites = {name: site._replace(server=flower.server.address) for name, site in flower.sites.items()}
    starts, proxies = flower.start_link, []

    def behind_the_proxy():
        starts()
        command = ["nginx", "-c", str(flower.server.write_proxy()), "-g", "daemon off;"]
        proxies.append(subprocess.Popen(command))

    flower.start_link = behind_the_proxy
    try:
        with flower:
            found = finished(started(flower, tmp_path / "kept"), tmp_path / "kept" / "first")
            assert not (tmp_path / "home" / "out" / "nginx" / "access.log").exists()  # every poll would be a line
    finally:
        for proxy in proxies:
            proxy.terminate()
            proxy.wait()
    np.testing.assert_allclose(found, simulated("FedAvg", ROUNDS).solution(), rtol=1e-12)
    assert {site.server for site in flower.sites.values()} == {f"127.0.0.1:{port}"} != {inside}
