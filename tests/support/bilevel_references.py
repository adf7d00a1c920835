"""A small quadratic bilevel problem with derivatives by hand, and the listings of its methods as plain NumPy loops."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import fedstrata as fs
from fedstrata.problems.bilevel import Bilevel

STREAMS = ("upper", "lower", "cross", "hessian")


def lower(x, y, e):
    return 0.5 * y @ e["A"] @ y - y @ (e["B"] @ x + e["b"])


def upper(x, y, e):
    return 0.5 * jnp.sum((y - e["t"]) ** 2) + 0.5 * jnp.sum((x - e["c"]) ** 2)


class Quadratic(NamedTuple):
    """g = ½ yᵀA y − yᵀ(B x + b) and f = ½|y − t|² + ½|x − c|², with other A, B, b, t, c in every example."""

    shards: list
    federation: fs.Federation
    problem: Bilevel

    def mean(self, m, name, rows=None):
        values = self.shards[m][name]
        return values.mean(axis=0) if rows is None else values[rows].mean(axis=0)

    def lower_grad(self, m, x, y, rows=None):
        return self.mean(m, "A", rows) @ y - self.mean(m, "B", rows) @ x - self.mean(m, "b", rows)

    def hypergradient(self, m, x, y, rows=None):
        """∂_x f − ∂²_xy g (∂²_yy g)⁻¹ ∂_y f; ∂²_xy g = −Bᵀ. rows: of every stream."""
        rows = dict.fromkeys(STREAMS) if rows is None else rows
        by_y = y - self.mean(m, "t", rows["upper"])
        v = np.linalg.solve(self.mean(m, "A", rows["hessian"]), by_y)
        return x - self.mean(m, "c", rows["upper"]) + self.mean(m, "B", rows["cross"]).T @ v

    def solution(self, m, x):
        return np.linalg.solve(self.mean(m, "A"), self.mean(m, "B") @ x + self.mean(m, "b"))

    def gradient(self, x, clients=None):
        """∇h, the lower level being each client's own."""
        clients = range(len(self.shards)) if clients is None else clients
        return np.mean([self.hypergradient(m, x, self.solution(m, x)) for m in clients], axis=0)

    def optimum(self):
        """∇h is affine in x: one linear system."""
        size = self.mean(0, "c").size
        at_zero = self.gradient(np.zeros(size))
        columns = [self.gradient(e) - at_zero for e in np.eye(size)]
        return np.linalg.solve(np.stack(columns, axis=1), -at_zero)


def quadratic(clients=3, sizes=(3, 2), rows=5, spread=1.0, seed=0, lower_level="client", **options) -> Quadratic:
    """Clients that differ by `spread`; with rows=1 there is no noise."""
    d, p = sizes
    rng = np.random.default_rng(seed)
    shapes = {"A": (d, d), "B": (d, p), "b": (d,), "t": (d,), "c": (p,)}
    common = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    shards = []
    for _ in range(clients):
        own = {name: common[name] + 0.5 * spread * rng.normal(size=shape) for name, shape in shapes.items()}
        shard = {name: own[name] + (rows > 1) * 0.3 * rng.normal(size=(rows, *shapes[name])) for name in shapes}
        shard["A"] = np.einsum("nij,nkj->nik", shard["A"], shard["A"]) / d + 0.7 * np.eye(d)
        shards.append({name: np.broadcast_to(a, (rows, *shapes[name])) + 0.0 for name, a in shard.items()})
    split = fs.Federation.from_clients(shards)["train"]
    federation = fs.Federation({"train": split, "valid": split})
    return Quadratic(shards, federation, Bilevel(upper, lower, jnp.zeros(d), lower_level=lower_level, **options))


def indices(rounds, steps, clients, rows, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    return {stream: rng.integers(0, rows, (rounds, steps, clients, batch)) for stream in STREAMS}


def fedbio(task, x, table, eta, gamma, tables_at):
    """Algorithm 1; returns x after every round."""
    rounds, steps, clients = table["upper"].shape[:3]
    y, out = np.zeros((clients, task.mean(0, "b").size)), []
    for r in range(rounds):
        ends = []
        for m in range(clients):
            own = x.copy()
            for s in range(steps):
                rows = tables_at(table, r, s, m)
                omega = task.lower_grad(m, own, y[m], rows["lower"])
                nu = task.hypergradient(m, own, y[m], rows)
                y[m], own = y[m] - gamma * omega, own - eta * nu
            ends.append(own)
        x = np.mean(ends, axis=0)
        out.append(x)
    return np.stack(out)


def fedbioacc(task, x, table, eta, gamma, tables_at, *, c_nu, c_omega, alpha, anchored):
    """Algorithm 2, all clients side by side; `anchored` takes ω's correction at the client's own last point."""
    rounds, steps, clients = table["upper"].shape[:3]
    xs = np.stack([x] * clients)
    y = np.zeros((clients, task.mean(0, "b").size))
    omega, nu, old_y = np.zeros_like(y), np.zeros_like(xs), y.copy()
    capital, own, out, t = xs.copy(), xs.copy(), [], 0
    for r in range(rounds):
        for s in range(steps):
            t += 1
            new_omega, new_nu = np.zeros_like(omega), np.zeros_like(nu)
            for m in range(clients):
                rows = tables_at(table, r, s, m)
                new_omega[m] = task.lower_grad(m, xs[m], y[m], rows["lower"])
                new_nu[m] = task.hypergradient(m, xs[m], y[m], rows)
                if t > 1:
                    before = own[m] if anchored else capital[m]
                    a, b = c_omega * alpha(t - 1) ** 2, c_nu * alpha(t - 1) ** 2
                    new_omega[m] += (1 - a) * (omega[m] - task.lower_grad(m, before, old_y[m], rows["lower"]))
                    new_nu[m] += (1 - b) * (nu[m] - task.hypergradient(m, capital[m], old_y[m], rows))
            ahead = xs - eta * alpha(t) * new_nu
            capital, own, nu, omega, old_y = xs.copy(), xs.copy(), new_nu, new_omega, y.copy()
            y = y - gamma * alpha(t) * omega
            if s == steps - 1:  # the server averages x_t, ν̂_t and x̂_{t+1}
                capital, nu, ahead = (np.broadcast_to(v.mean(axis=0), v.shape) + 0.0 for v in (capital, nu, ahead))
            xs = ahead
        out.append(xs[0])
    return np.stack(out)


def tracked(task, x, table, eta, gamma, tables_at, momentum, first):
    """TrackedBiO; `first`: the rows of the start, per client, or None for no memory."""
    rounds, steps, clients = table["upper"].shape[:3]
    y = np.zeros((clients, task.mean(0, "b").size))
    c, nu, omega = np.zeros((clients, x.size)), np.zeros((clients, x.size)), np.zeros_like(y)
    old_x, old_y, out = np.stack([x] * clients), y.copy(), []
    if momentum is not None:
        for m in range(clients):
            nu[m] = task.hypergradient(m, x, y[m], first[m])
            omega[m] = task.lower_grad(m, x, y[m], first[m]["lower"])
    for r in range(rounds):
        ends = []
        for m in range(clients):
            own = x.copy()
            for s in range(steps):
                rows = tables_at(table, r, s, m)
                new_nu = task.hypergradient(m, own, y[m], rows)
                new_omega = task.lower_grad(m, own, y[m], rows["lower"])
                if momentum is not None:
                    new_nu += (1 - momentum) * (nu[m] - task.hypergradient(m, old_x[m], old_y[m], rows))
                    new_omega += (1 - momentum) * (omega[m] - task.lower_grad(m, old_x[m], old_y[m], rows["lower"]))
                nu[m], omega[m], old_x[m], old_y[m] = new_nu, new_omega, own.copy(), y[m].copy()
                y[m], own = y[m] - gamma * new_omega, own - eta * (new_nu + c[m])
            ends.append(own)
        x, c = np.mean(ends, axis=0), nu.mean(axis=0) - nu
        out.append(x)
    return np.stack(out)
