"""The listings of the methods for f + φ as the papers print them: plain loops over clients, in NumPy."""

import numpy as np
from references import composite, soft

import fedstrata as fs

WEIGHT = 0.25
TASK = composite(weight=WEIGHT, clients=5, dimension=4, seed=3)
START = np.array([0.5, -1.0, 0.0, 2.0])
N = TASK.federation.clients
STEP, Q, SERVER = 0.04, 5, 0.8
WHOLE = STEP * Q * SERVER  # η̂
GRADIENTS = [lambda w, i=i: TASK.gradient(i, w) for i in range(N)]


def prox(z, step):
    return soft(z, step * WEIGHT)


def fednmap(rounds, gamma=1.5):
    """Algorithm 1, with (9) checked in every round."""
    z, c, y = START, np.zeros((N, 4)), np.zeros((N, 4))
    for t in range(rounds):
        if t > 0:
            c = c - y + y.mean(axis=0)
        x, taken = prox(z, gamma), []
        for i in range(N):
            z_i = z
            for _ in range(Q):
                taken.append(GRADIENTS[i](prox(z_i, gamma)))
                z_i = z_i - STEP * (taken[-1] + (z - x) / gamma + c[i])
            y[i] = (z - z_i) / (STEP * Q)
        np.testing.assert_allclose(y.mean(axis=0), np.mean(taken, axis=0) + (z - x) / gamma, rtol=1e-12, atol=1e-13)
        z = z - WHOLE * y.mean(axis=0)
    return prox(z, gamma)


def zhang(rounds, local_prox=True):
    """(30)–(32), with x the old one; without the local prox it is our reconstruction of FedCanon."""
    z, c = START, np.zeros((N, 4))
    x = prox(z, WHOLE)
    for _ in range(rounds):
        ends, means = [], []
        for i in range(N):
            z_i, x_i, taken = x, x, []
            for step in range(Q):
                taken.append(GRADIENTS[i](x_i))
                z_i = z_i - STEP * (taken[-1] + c[i])
                x_i = prox(z_i, (step + 1) * STEP) if local_prox else z_i
            ends.append(z_i)
            means.append(np.mean(taken, axis=0))
        z = x + SERVER * (np.mean(ends, axis=0) - x)
        c = (x - z) / WHOLE - np.array(means)
        x = prox(z, WHOLE)
    return x


def fedda(rounds):
    """With the counters of the docstring: round t and local step l, both from 0."""
    z = START
    for t in range(rounds):
        ends = []
        for i in range(N):
            z_i = z
            for step in range(Q):
                z_i = z_i - STEP * GRADIENTS[i](prox(z_i, SERVER * STEP * t * Q + STEP * step))
            ends.append(z_i)
        z = z + SERVER * (np.mean(ends, axis=0) - z)
    return prox(z, SERVER * STEP * rounds * Q)


def fedmid(rounds):
    x = prox(START, STEP)
    for _ in range(rounds):
        ends = []
        for i in range(N):
            x_i = x
            for _ in range(Q):
                x_i = prox(x_i - STEP * GRADIENTS[i](x_i), STEP)
            ends.append(x_i)
        x = prox(x + SERVER * (np.mean(ends, axis=0) - x), WHOLE)
    return x


def fast_fedda(rounds, mu=0.3, beta=20.0):
    """The public rule: t counts from 1, X starts as x0, and the last local point of a round is not added."""
    g, X, w = np.zeros(4), START.copy(), START
    point = lambda g, X, t: prox((-g + mu / 2 * X + beta * START) / (t * (mu / 2 + beta / t)), 1 / (mu / 2 + beta / t))
    for r in range(rounds):
        sums, points = [], []
        for i in range(N):
            g_i, X_i, w_i = g, X, w
            for k in range(1, Q + 1):
                g_i = g_i + GRADIENTS[i](w_i)
                w_i = point(g_i, X_i, r * Q + k)
                X_i = X_i + w_i if k < Q else X_i
            sums.append(g_i)
            points.append(X_i)
        g, X = np.mean(sums, axis=0), np.mean(points, axis=0)
        w = point(g, X, (r + 1) * Q)
        X = X + w
    return w


def naive(rounds, at_server):
    x = prox(START, STEP * Q if at_server else STEP)
    for _ in range(rounds):
        ends = []
        for i in range(N):
            x_i = x
            for _ in range(Q):
                x_i = x_i - STEP * GRADIENTS[i](x_i)
                x_i = x_i if at_server else prox(x_i, STEP)
            ends.append(x_i)
        x = np.mean(ends, axis=0)
        x = prox(x, STEP * Q) if at_server else x
    return x


LISTINGS = {
    "FedNMap": (fs.FedNMap(STEP, Q, 1.5, SERVER), fednmap),
    "Zhang2024": (fs.Zhang2024(STEP, Q, SERVER), zhang),
    "FedCanon": (fs.FedCanon(STEP, Q, SERVER), lambda rounds: zhang(rounds, local_prox=False)),
    "FedDA": (fs.FedDA(STEP, Q, SERVER), fedda),
    "FedMid": (fs.FedMid(STEP, Q, SERVER), fedmid),
    "FastFedDA": (fs.FastFedDA(0.3, 20.0, Q), fast_fedda),
    "FedAvgLocalProx": (fs.FedAvgLocalProx(STEP, Q), lambda rounds: naive(rounds, at_server=False)),
    "FedAvgServerProx": (fs.FedAvgServerProx(STEP, Q), lambda rounds: naive(rounds, at_server=True)),
}
