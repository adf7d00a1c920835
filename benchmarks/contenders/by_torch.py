"""PyTorch, eager: one client after another, one step after another, the loop of most simulations."""

# pyright: reportMissingImports=false
import child
import jobs
import torch
import torch_models


class Loop(child.Rounds):
    def __init__(self, job, choose_threads=True):
        self.job, self.data = job, jobs.load(job)
        self.device = torch_models.device()
        self.x, self.y = (torch.from_numpy(a).to(self.device) for a in (self.data.x, self.data.y))
        self.y = self.y.long()
        self.model = torch_models.make(job["model"], self.data.start).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=job["step_size"])
        self.test = torch_models.test(self.data, self.device)
        self.steps = self.rows = 0
        threads = torch_models.threads(self._one_client) if choose_threads else torch.get_num_threads()
        self.done = self.steps = self.rows = 0
        self.note = f"{child.versions('torch')}, {self.device.type}, threads: {threads}"

    def _one_client(self):
        before = self._copy()
        self._local(0)
        self._set(before)

    def _copy(self):
        return [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def _set(self, values):
        for p, value in zip(self.model.parameters(), values, strict=True):
            p.copy_(value)

    def _local(self, client):
        batch, examples = self.job["batch"], self.job["examples"]
        order = torch.randperm(examples, device=self.device)
        for step in range(self.job["steps"]):
            rows = order[step * batch : (step + 1) * batch]
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(self.x[client, rows]), self.y[client, rows])
            loss.backward()
            self.optimizer.step()
            self.steps, self.rows = self.steps + 1, self.rows + len(rows)

    def sums(self, start, clients):
        """The sum of these clients' parameters after their local steps from `values`."""
        total = [torch.zeros_like(p) for p in start]
        for client in clients:
            self._set(start)
            self._local(client)
            with torch.no_grad():
                for t, p in zip(total, self.model.parameters(), strict=True):
                    t += p
        return total

    def advance(self, rounds):
        cohort = self.job.get("cohort") or self.job["clients"]
        for _ in range(rounds):
            total = self.sums(self._copy(), torch.randperm(self.job["clients"])[:cohort].tolist())
            self._set([t / cohort for t in total])
            self.done += 1
            if (every := self.job.get("evaluate_every")) and self.done % every == 0:
                self.evaluate()
        torch_models.wait(self.device)

    def evaluate(self):
        return torch_models.evaluate(self.model, self.test)

    def params(self):
        return [p.detach().cpu().numpy() for p in self.model.parameters()]

    def counted(self):
        return self.steps, self.rows


if __name__ == "__main__":
    child.serve(Loop)
