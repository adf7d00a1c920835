"""pfl-research: its FederatedAveraging on its simulated backend, with users' data kept as tensors.

It passes through a user's rows in order, without shuffling, and keeps the batches: it draws no samples.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import types

import child
import jobs
import torch
import torch_models
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

NEVER = 10**9


class Evaluation(CentralEvaluationCallback):
    """No evaluation at the start of a call: a run continues from the last one."""

    def on_train_begin(self, *, model):
        return Metrics()


class Simulation(child.Rounds):
    def __init__(self, job):
        self.job, self.data = job, jobs.load(job)
        device = self.device = torch_models.device()
        module = torch_models.make(job["model"], self.data.start).to(device)
        self.steps = self.rows = 0

        def loss(model, x, y):
            self.steps, self.rows = self.steps + 1, self.rows + len(y)
            return torch.nn.functional.cross_entropy(model(x), y)

        @torch.no_grad()
        def metrics(model, x, y):
            z = model(x)
            total = torch.nn.functional.cross_entropy(z, y, reduction="sum").item()
            return {"loss": Weighted(total, len(y)), "accuracy": Weighted((z.argmax(1) == y).sum().item(), len(y))}

        module.loss, module.metrics = types.MethodType(loss, module), types.MethodType(metrics, module)
        self.module = module
        self.model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
        x, y = (torch.from_numpy(a).to(device) for a in (self.data.x, self.data.y))
        users = [Dataset((x[i], y[i].long())) for i in range(job["clients"])]
        data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(job["clients"])))
        self.backend = SimulatedBackend(data, data)
        self.algorithm = FederatedAveraging()
        self.train = NNTrainHyperParams(
            local_batch_size=job["batch"], local_num_epochs=1, local_learning_rate=job["step_size"]
        )
        self.test = torch_models.test(self.data, device)
        self.callbacks = []
        if every := job.get("evaluate_every"):
            size = NNEvalHyperParams(local_batch_size=torch_models.EVALUATION)
            self.callbacks = [Evaluation(Dataset(self.test), size, frequency=every)]
        self.done = 0
        threads = torch_models.threads(lambda: self._some_steps(users[0]))
        self.steps = self.rows = 0
        self.note = f"{child.versions('pfl', 'torch')}, {device.type}, threads: {threads}"

    def _some_steps(self, user):
        before = self.model.get_parameters()
        for x, y in user.iter(self.job["batch"]):
            self.module.loss(x, y).backward()
            self.module.zero_grad()
        self.model.set_parameters(before)

    def advance(self, rounds):
        self.done += rounds
        cohort = self.job.get("cohort") or self.job["clients"]
        options = NNAlgorithmParams(self.done, evaluation_frequency=NEVER, train_cohort_size=cohort, val_cohort_size=0)
        self.algorithm.run(options, self.backend, self.model, self.train, callbacks=self.callbacks)
        torch_models.wait(self.device)

    def evaluate(self):
        return torch_models.evaluate(self.module, self.test)

    def params(self):
        return [p.detach().cpu().numpy() for p in self.module.parameters()]

    def counted(self):
        return self.steps, self.rows


if __name__ == "__main__":
    child.serve(Simulation)
