"""Short forms that tests share: a run laid out from options by name, and the ledger of a bare state."""

from typing import Any

from fedstrata.engine.exchange import exchanges
from fedstrata.engine.ledger import Ledger, ledger_of
from fedstrata.simulate import run
from fedstrata.simulate.executable import Executable
from fedstrata.simulate.options import RunOptions


def prepare(problem: Any, algorithm: Any, federation: Any, **options: Any) -> Executable:
    """What `fs.run` would run with these options."""
    return run.prepare(problem, algorithm, federation, RunOptions(**options))


def ledger(algorithm: Any, problem: Any, template: Any, cohort: int, clients: int | None = None) -> Ledger:
    """The ledger of an algorithm whose state looks like `template`."""
    return ledger_of(algorithm, exchanges(algorithm, problem), template, cohort, clients)
