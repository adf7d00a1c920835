"""Progress: a bar in a terminal, a few lines in a file, nothing when quiet."""

import io

import pytest
from rich.console import Console

from fedstrata.report import Progress


def drive(total: int, console: Console | None = None, **options) -> None:
    with Progress(total, "FedAvg", console=console, **options) as progress:
        for t in range(options.get("start", 0) + 1, total + 1):
            progress.update(t, objective=1.0 / t, bytes=1000 * t)


def test_a_log_file_gets_a_few_plain_lines():
    out = io.StringIO()
    drive(1000, Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("FedAvg: round 100/1000, objective 0.01, 100 kB sent, ")
    assert lines[0].endswith(" left")
    assert lines[-1] == "FedAvg: round 1000/1000, objective 0.001, 1 MB sent"


def test_few_rounds_give_a_line_each():
    out = io.StringIO()
    drive(3, Console(file=out))
    assert len(out.getvalue().splitlines()) == 3


def test_a_terminal_gets_a_bar():
    out = io.StringIO()
    drive(20, Console(file=out, force_terminal=True, width=120, color_system=None))
    text = out.getvalue()
    assert "20/20" in text
    assert "objective 0.05, 20 kB sent" in text
    assert "FedAvg" in text


def test_the_bar_is_taken_down_after_an_error():
    console = Console(file=io.StringIO(), force_terminal=True)
    for _ in range(2):  # a second live display would be refused if the first were still there
        with pytest.raises(RuntimeError, match="boom"), Progress(3, console=console):
            raise RuntimeError("boom")


def test_quiet_prints_nothing(capsys):
    drive(5, quiet=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_standard_output_stays_clean(capsys):
    drive(5)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "round 5/5" in captured.err


def test_a_resumed_run_counts_on_and_unknown_values_are_left_out():
    out = io.StringIO()
    with Progress(10, start=9, console=Console(file=out)) as progress:
        progress.update(10)
    assert out.getvalue() == "round 10/10\n"


def test_bad_totals():
    with pytest.raises(ValueError, match="start=5 must lie between 0 and total_rounds=3"):
        Progress(3, start=5)
