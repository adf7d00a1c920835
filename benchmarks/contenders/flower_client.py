"""The client app of Flower's workers: the local steps of one client, in PyTorch."""

# pyright: reportMissingImports=false
import functools

import jobs
import torch
import torch_models
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
torch.set_num_threads(1)


@functools.cache
def _loaded(model, clients, examples):
    """Data and a model, loaded once per worker."""
    data = jobs.load({"model": model, "clients": clients, "examples": examples})
    return torch.from_numpy(data.x), torch.from_numpy(data.y).long(), torch_models.make(model, data.start)


@app.train()
def train(message, context):
    job = message.content["config"]
    x, y, model = _loaded(job["model"], job["clients"], job["examples"])
    client = int(context.node_config["partition-id"])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), message.content["arrays"].to_numpy_ndarrays(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    optimizer = torch.optim.SGD(model.parameters(), lr=job["step_size"])
    order = torch.randperm(job["examples"])
    for step in range(job["steps"]):
        rows = order[step * job["batch"] : (step + 1) * job["batch"]]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[client, rows]), y[client, rows]).backward()
        optimizer.step()
    arrays = ArrayRecord([p.detach().numpy() for p in model.parameters()])
    rows = job["steps"] * job["batch"]
    metrics = MetricRecord({"num-examples": rows, "rows": rows, "steps": job["steps"]})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
