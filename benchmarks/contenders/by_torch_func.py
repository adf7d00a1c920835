"""PyTorch with torch.func: the gradients of all clients in one vectorised call for each local step."""

# pyright: reportMissingImports=false
import child
import jobs
import torch
import torch_models
from torch import func


class Vectorised(child.Rounds):
    def __init__(self, job):
        self.job, self.data = job, jobs.load(job)
        self.device = torch_models.device()
        self.x, self.y = (torch.from_numpy(a).to(self.device) for a in (self.data.x, self.data.y))
        self.y = self.y.long()
        model = torch_models.make(job["model"], self.data.start).to(self.device)
        self.shared = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params, x, y):
            return torch.nn.functional.cross_entropy(func.functional_call(model, params, (x,)), y)

        self.gradients = func.vmap(func.grad(loss))
        self.steps = self.rows = 0
        threads = torch_models.threads(lambda: self._round(self.shared))
        self.steps = self.rows = 0
        self.note = f"{child.versions('torch')}, {self.device.type}, threads: {threads}"

    def _round(self, shared):
        clients, examples, batch = (self.job[name] for name in ("clients", "examples", "batch"))
        params = {name: p.expand(clients, *p.shape) for name, p in shared.items()}
        order = torch.rand(clients, examples, device=self.device).argsort(dim=1)
        who = torch.arange(clients, device=self.device)[:, None]
        for step in range(self.job["steps"]):
            rows = order[:, step * batch : (step + 1) * batch]
            slopes = self.gradients(params, self.x[who, rows], self.y[who, rows])
            params = {name: p - self.job["step_size"] * slopes[name] for name, p in params.items()}
            self.steps, self.rows = self.steps + clients, self.rows + rows.numel()
        return {name: p.mean(dim=0) for name, p in params.items()}

    @torch.no_grad()
    def advance(self, rounds):
        for _ in range(rounds):
            self.shared = self._round(self.shared)
        torch_models.wait(self.device)

    def params(self):
        return [p.cpu().numpy() for p in self.shared.values()]

    def counted(self):
        return self.steps, self.rows


if __name__ == "__main__":
    child.serve(Vectorised)
