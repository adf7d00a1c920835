"""A site that wants noise in all that leaves, and numbers of ε that must not be told where something has none."""

import io
import logging
import math

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import numpy as np
from attackers import RUN, VICTIM, Attacker, averaging, begin_call, log_of
from cases import CASES, START, task_of

import fedstrata as fs
from fedstrata.deploy.flower.config import SiteConfig
from fedstrata.deploy.flower.deployment import Deployment
from fedstrata.deploy.flower.worker import Worker
from fedstrata.deploy.in_process import advance, in_process_run
from fedstrata.deploy.messages import EVALUATE, Message, Stage
from fedstrata.deploy.policy import Policy

ROWS = {"FCFL": ("f", "df", "u", "du"), "FedX2": ("first", "second")}
NOISY = {"privacy": fs.Privacy(clip=1.0, noise=1.0, where="sites")}


@pytest.mark.parametrize("name", ROWS)
def test_no_epsilon_is_told_where_rows_leave_without_noise(name, tmp_path):
    """FCFL sends nothing but rows: no mean is released, and ε of the means would be zero."""
    task, method = task_of(CASES[name].algorithm), CASES[name].algorithm
    options = {"params": START, "batch_size": 3, "privacy": fs.Privacy(0.05, 1.0, accept=ROWS[name])}
    found = fs.run(task.problem, method, task.federation, rounds=2, stationarity=False, **options)
    server, sites, _ = in_process_run(task.problem, method, task.federation, **options)
    advance(server, 1)
    for spent in (found.privacy, server.privacy(), sites[0].privacy()):
        assert spent.epsilon == math.inf
        assert "no guarantee" in str(spent)
        assert all(repr(field) in str(spent) for field in ROWS[name])


@pytest.mark.parametrize("name", ROWS)
def test_a_site_that_wants_noise_refuses_rows_that_leave_without(name, tmp_path, worked):
    """Even if its policy names them."""
    task = task_of(CASES[name].algorithm)
    options = {"params": START, "privacy": fs.Privacy(1.0, 5.0, where="sites", accept=ROWS[name])}
    load = lambda settings: task.federation.select([1])
    Policy(noise_at_least=5.0, fields=("*",)).keep_in(tmp_path)
    attacker = Attacker.alone(tmp_path, Deployment(task.problem, CASES[name].algorithm, load, 1, 3, options))
    with pytest.raises(ValueError, match=r"rows without noise, and site-1 wants noise in all that leaves"):
        attacker.sends(begin_call())
    assert worked == []
    attacker.victim()[0].close()


@pytest.mark.parametrize("tells", ["measures", "scores"])
def test_a_site_that_wants_noise_lets_no_evaluation_leave(tells, tmp_path, worked):
    """Four losses at chosen points would give the exact mean of its rows."""
    Policy(noise_at_least=1.0).keep_in(tmp_path)
    attacker = Attacker.alone(tmp_path, averaging(**NOISY), tells=tells)
    with pytest.raises(ValueError, match=r"evaluations leave without noise, and noise_at_least in \[policy\] wants"):
        attacker.sends(begin_call())
    assert worked == []
    attacker.victim()[0].close()
    file = tmp_path / "north.toml"
    about = f'site = "north"\nserver = "127.0.0.1:1"\n[settings]\ntells = "{tells}"\n[policy]\n'
    file.write_text(about + "noise_at_least = 1.0\n")
    with pytest.raises(ValueError, match="noise_at_least = 0"):
        SiteConfig.read(file)
    file.write_text(about)
    assert SiteConfig.read(file).settings["tells"] == tells


def test_nothing_is_computed_again_for_a_reply_that_was_too_large(tmp_path, worked):
    attacker = Attacker.alone(tmp_path, averaging(), tells="measures")
    attacker.sends(begin_call())
    point = lambda x: Message(
        RUN, Stage(1, EVALUATE), VICTIM,
        {"x.tree": np.full(3, x), "splits": np.zeros(1, np.int32), "scores": np.zeros(0, np.int32)},
    )  # fmt: skip
    attacker.sends(point(0.0))
    done = attacker.victim()[0].guard.journal.answered(RUN).bytes
    Policy(bytes=done + 100).keep_in(tmp_path)
    before = len(worked)
    for i in range(1, 10):
        with pytest.raises(ValueError, match=r"more than the [\d,]+ that its policy allows"):
            attacker.sends(point(float(i)))
    assert len(worked) - before == 1
    assert [line["verdict"] for line in log_of(tmp_path)[-9:]] == ["refused"] * 9
    attacker.victim()[0].close()


def test_nobody_can_fill_the_log_of_a_site_whose_data_cannot_be_loaded(tmp_path, worked):
    """The error may quote rows; it is written a few times in a minute, and cut."""

    def load(settings):
        raise ValueError("row 17: " + "9" * 50_000)

    worker = Worker(averaging()._replace(load=load), tmp_path, "1")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("fedstrata").addHandler(handler)
    try:
        for _ in range(200):
            with pytest.raises(RuntimeError, match="cannot load its data"):
                worker.answer({"kind": "query.survey", "settings": {"site": VICTIM}, "about": {}}, b"")
    finally:
        logging.getLogger("fedstrata").removeHandler(handler)
        worker.close()
    assert "row 17" in stream.getvalue()
    assert len(stream.getvalue()) < 250_000
