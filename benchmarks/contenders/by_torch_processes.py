"""The eager PyTorch loop in one process on each core, every process with one thread and a share of the clients."""

# pyright: reportMissingImports=false
import multiprocessing

import child
import jobs
import torch
from by_torch import Loop


def work(pipe, job, share):
    """For every set of values received: the sum over a share of the clients."""
    torch.set_num_threads(1)
    loop = Loop(job, choose_threads=False)
    pipe.send(None)
    while (start := pipe.recv()) is not None:
        total = loop.sums([torch.from_numpy(a) for a in start], share)
        pipe.send(([t.numpy() for t in total], loop.counted()))


class Processes(child.Rounds):
    def __init__(self, job):
        self.job, self.data = job, jobs.load(job)
        self.shared, self.work = self.data.start, (0, 0)
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for core in range(child.CORES):
            ours, theirs = context.Pipe()
            share = range(core, job["clients"], child.CORES)
            context.Process(target=work, args=(theirs, job, share), daemon=True).start()
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()
        self.note = f"{child.versions('torch')}; {child.CORES} processes with one thread each"

    def advance(self, rounds):
        for _ in range(rounds):
            for pipe in self.pipes:
                pipe.send(self.shared)
            totals, counts = zip(*[pipe.recv() for pipe in self.pipes], strict=True)
            self.shared = [sum(parts) / self.job["clients"] for parts in zip(*totals, strict=True)]
            steps, rows = zip(*counts, strict=True)
            self.work = (sum(steps), sum(rows))

    def params(self):
        return self.shared

    def counted(self):
        return self.work


if __name__ == "__main__":
    child.serve(Processes)
