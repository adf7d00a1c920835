"""Several processes on one machine, over loopback: one run, killed and resumed, equal to that of one process."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cases import CASES, START, task_of
from two_processes import OPTIONS, numbers

import fedstrata as fs
from fedstrata.simulate import multiprocess as processes

NAMES = ("FedX2",)  # it has pools, and memory by example


def in_two_processes(folder, *words, most=600.0):
    """Run the script in both, until they are done or one has failed; returns their exit codes and what they printed."""
    script = Path(__file__).parents[1] / "support" / "two_processes.py"
    printed = [folder / f"printed_{number}" for number in range(2)]
    both, ends = [], time.monotonic() + most
    with processes.local_coordinator() as address:
        try:
            for number, path in enumerate(printed):
                found = {processes.COORDINATOR: address, processes.COUNT: "2", processes.NUMBER: str(number)}
                command = [sys.executable, str(script), str(folder), *words]
                with path.open("w") as out:
                    both.append(
                        subprocess.Popen(command, env={**os.environ, **found}, stdout=out, stderr=subprocess.STDOUT)
                    )
            while None in (codes := [process.poll() for process in both]) and not any(codes):
                assert time.monotonic() < ends, "\n".join(path.read_text() for path in printed)
                time.sleep(0.05)
        finally:
            for process in both:
                process.kill()
                process.wait()
    return codes, "\n".join(path.read_text() for path in printed)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    codes, printed = in_two_processes(tmp_path, *NAMES)
    assert codes == [0, 0], printed
    for name in NAMES:
        task = task_of(CASES[name].algorithm)
        alone = fs.run(task.problem, CASES[name].algorithm, task.federation, **OPTIONS, params=START)
        for number in range(2):
            with np.load(tmp_path / f"{name}_{number}.npz") as file:
                for a, b in zip(file.values(), numbers(alone), strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_a_process_alone_leads_and_agrees_with_itself():
    assert processes.leads()
    assert processes.agreed(1.25) == 1.25
    processes.together("anything")


def test_what_the_first_process_cannot_do_fails_with_its_error():
    done = []
    processes.lead(lambda: done.append(1), RuntimeError("elsewhere"))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        processes.lead(lambda: 1 / 0, RuntimeError("elsewhere"))


def test_the_other_processes_learn_that_it_failed(monkeypatch):
    monkeypatch.setattr(processes, "leads", lambda: False)
    monkeypatch.setattr(processes, "agreed", lambda value: 1.0)
    with pytest.raises(RuntimeError, match="elsewhere"):
        processes.lead(lambda: pytest.fail("only the first process does the work"), RuntimeError("elsewhere"))


def test_a_local_coordinators_port_is_kept_for_it():
    with processes.local_coordinator() as address:
        host, port = address.split(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        with socket.socket() as coordinator:  # as gRPC binds it
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            coordinator.bind((host, int(port)))
            coordinator.listen()
            socket.create_connection((host, int(port)), timeout=5).close()


def test_no_processes_to_join(monkeypatch):
    monkeypatch.delenv(processes.COORDINATOR, raising=False)
    monkeypatch.setattr(processes, "_libraries_print_aside", lambda: None)
    monkeypatch.setattr(
        processes.jax.distributed, "initialize", lambda: (_ for _ in ()).throw(ValueError("coordinator_address"))
    )
    with pytest.raises(ValueError, match="FEDSTRATA_COORDINATOR"):
        processes.join()
