"""Start a command in several processes on this machine that share one run.

examples:
  fedstrata launch --processes 2 -- run digits --mesh all --out out/digits
  fedstrata launch --processes 2 --devices 2 -- run digits --mesh all     two devices in each process, on a CPU

Each process holds the data and the state of its share of the clients. Only the first one prints and writes. When one
fails the others are stopped. On a cluster its own launcher starts the processes: add --join to the command.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

from fedstrata.cli.parsing import Mistake, json_option, whole

_SHAPE = "what the started command prints with --json"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=whole(1), required=True, metavar="N", help="how many processes")
    parser.add_argument("--devices", type=whole(1), metavar="D", help="devices that each makes of this machine's CPU")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each of them runs")
    json_option(parser, _SHAPE)


def execute(options: argparse.Namespace) -> int:
    from fedstrata.simulate.multiprocess import COORDINATOR, COUNT, NUMBER, local_coordinator

    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if words[:1] != ["run"]:
        raise Mistake("launch starts `fedstrata run`; write: fedstrata launch --processes 2 -- run digits --mesh all")
    words = [*words, *(["--json"] if options.json and "--json" not in words else [])]
    shared = {**os.environ, COUNT: str(options.processes)}
    if options.devices:
        flag = f"--xla_force_host_platform_device_count={options.devices}"
        shared["XLA_FLAGS"] = f"{shared.get('XLA_FLAGS', '')} {flag}".strip()
    command = [sys.executable, "-c", "import sys; from fedstrata.cli.main import main; sys.exit(main())", *words]
    started: list[subprocess.Popen] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the processes end with this one
    with local_coordinator() as address:
        try:
            for number in range(options.processes):
                own = {**shared, COORDINATOR: address, NUMBER: str(number)}
                out = None if number == 0 else subprocess.DEVNULL
                started.append(subprocess.Popen(command, env=own, stdout=out))
            return _wait(started)
        finally:
            for process in started:
                process.kill()
                process.wait()


def _wait(started: list[subprocess.Popen]) -> int:
    """Until all are done, or one has failed."""
    while True:
        codes = [process.poll() for process in started]
        failed = [code for code in codes if code not in (None, 0, 3)]
        if failed or None not in codes:
            return failed[0] if failed else max(code or 0 for code in codes)
        time.sleep(0.05)
