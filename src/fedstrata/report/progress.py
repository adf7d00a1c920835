"""The progress of a run: a bar in a terminal, a few plain lines in a log file."""

import math
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fedstrata.report.format import human_bytes, human_number, human_seconds

if TYPE_CHECKING:
    import rich.console

_LINES = 10  # plain lines of a run, at most


class Progress:
    """Shows the round, the objective, the bytes sent and the time left while a run runs.

    Writes to standard error, so that standard output holds only results.

    Args:
        total_rounds: of the run.
        label: the name of the run.
        start: the round from which a resumed run continues.
        quiet: whether to show nothing.
        console: the rich console; None: standard error.

    >>> with Progress(100, "FedAvg", quiet=True) as progress:
    ...     progress.update(10, objective=0.69, bytes=1_600)
    """

    def __init__(
        self,
        total_rounds: int,
        label: str = "",
        *,
        start: int = 0,
        quiet: bool = False,
        console: "rich.console.Console | None" = None,
    ) -> None:
        if total_rounds < 0 or not 0 <= start <= total_rounds:
            raise ValueError(f"Progress: start={start} must lie between 0 and total_rounds={total_rounds}")
        self.total_rounds, self.label, self.start, self.quiet = total_rounds, label, start, quiet
        self._console = console
        self._bar: Any = None
        self._written = 0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self.quiet:
            return self
        from rich.console import Console

        self._console = self._console or Console(stderr=True)
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total_rounds, completed=self.start, news="")
        return self

    def update(self, round: int, objective: float | None = None, bytes: float | None = None) -> None:
        """Show the progress.

        Args:
            round: the rounds that are done.
            objective: its last value.
            bytes: sent so far, up and down.
        """
        if self.quiet:
            return
        news = [] if objective is None else [f"objective {human_number(objective)}"]
        news += [] if bytes is None else [f"{human_bytes(bytes)} sent"]
        if self._bar is not None:
            self._bar.update(self._task, completed=round, news=", ".join(news))
            return
        tenth = round * _LINES // self.total_rounds if self.total_rounds else _LINES
        if self._console is None or tenth <= self._written:
            return
        self._written = tenth
        left = self._left(round)
        news += [f"{human_seconds(left)} left"] if left else []
        head = f"{self.label}: " if self.label else ""
        line = head + ", ".join([f"round {round}/{self.total_rounds}", *news])
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _left(self, round: int) -> float:
        done = round - self.start
        return (time.monotonic() - self._began) * (self.total_rounds - round) / done if done > 0 else math.inf

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(console: "rich.console.Console") -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("round"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
    )
