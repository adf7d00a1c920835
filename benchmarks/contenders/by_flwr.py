"""Flower: its FedAvg strategy in its simulation on Ray, one worker with one PyTorch thread on each core.

Every call starts and stops Ray, so that no process of it runs beside other contenders. In the first round workers start
and load their data. It is not counted.
"""

# pyright: reportMissingImports=false, reportArgumentType=false
import os
import time

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.path.dirname(__file__)}

import child
import flower_client
import jobs
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


class Simulation(child.Rounds):
    def __init__(self, job):
        self.job, self.data = job, jobs.load(job)
        self.arrays = ArrayRecord([np.array(a) for a in self.data.start])
        self.steps = self.rows = 0.0
        self.seconds = 0.0
        self.note = f"{child.versions('flwr', 'ray', 'torch')}; {child.CORES} workers with one thread each"

    def advance(self, rounds):
        clients, ends = self.job["clients"], []
        server = ServerApp()

        @server.main()
        def main(grid, context):
            strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
            tell = lambda round, arrays: ends.append(time.perf_counter())  # after every round
            config = ConfigRecord({name: v for name, v in self.job.items() if isinstance(v, int | float | str)})
            found = strategy.start(grid, self.arrays, num_rounds=rounds + 1, train_config=config, evaluate_fn=tell)
            self.arrays = found.arrays
            for means in found.train_metrics_clientapp.values():
                self.steps += clients * float(means["steps"])
                self.rows += clients * float(means["rows"])

        resources = {"init_args": {"num_cpus": child.CORES}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, flower_client.app, num_supernodes=clients, backend_config=resources)
        self.seconds = ends[-1] - ends[1]

    def run(self, rounds):
        self.advance(rounds)
        return self.seconds

    def params(self):
        return self.arrays.to_numpy_ndarrays()

    def counted(self):
        return round(self.steps), round(self.rows)


if __name__ == "__main__":
    child.serve(Simulation)
