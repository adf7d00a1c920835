"""The command line. Each command is a file of `fedstrata/cli`; nothing heavy is imported before one runs."""

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from fedstrata import __version__
from fedstrata.base.errors import StateError, unknown
from fedstrata.cli.output import close_output
from fedstrata.cli.parsing import Mistake, Parser

COMMANDS = ("list", "explain", "run", "launch", "deploy", "reproduce", "plot", "data")

_ABOUT = """\
Federated optimisation: run experiments, compare methods, count what they send.

first steps:
  fedstrata list                            what there is
  fedstrata explain SCAFFOLD                one algorithm: its update, what it sends, what that reveals
  fedstrata run digits --out out/digits     compare five methods: table and picture in out/digits
"""

_FOOT = """\
Every command takes --json, for programs, and --help, with examples.
Exit codes: 0 done; 1 something is wrong with the files or the program; 2 a mistake in the command, reported in a line
that starts with "error:"; 3 a run of `fedstrata run` diverged; 130 interrupted. FEDSTRATA_DEBUG=1 shows the traceback
of an error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; by default those of the process.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old terminal without ∇ must not end a run
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with _plugin_warnings():
            options = parse(words)
            return options.execute(options)
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        again = "; `fedstrata run --out …` resumes with --resume" if words[:1] in (["run"], ["launch"]) else ""
        return _failed(f"interrupted{again}", 130)
    except BrokenPipeError:  # the reader of the output (such as `head`) has closed it
        close_output(sys.stdout)
        return 0
    except Exception as error:
        if _is_users(error):
            return _failed(str(error), 2)
        return _failed(
            f"unexpected {type(error).__name__}: {error} (FEDSTRATA_DEBUG=1 shows where; please report it)", 1
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; `options.execute(options)` runs it.

    Args:
        argv: its words.
    """
    parser, commands = _parsers()
    named = next((word for word in argv if not word.startswith("-")), None)
    if named is not None and named not in COMMANDS:
        raise unknown("command", named, COMMANDS)
    options, rest = parser.parse_known_args(list(argv))
    if options.command is None:
        parser.print_help()
        raise SystemExit(0)
    command = commands[options.command]
    for word in rest:
        if word.startswith("-"):
            raise unknown(f"option of `fedstrata {options.command}`:", word.partition("=")[0], command.option_names())
        raise Mistake(
            f"`fedstrata {options.command}` does not expect {word!r}; see `fedstrata {options.command} --help`"
        )
    return options


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="fedstrata", description=_ABOUT, epilog=_FOOT)
    parser.add_argument("--version", action="version", version=f"fedstrata {__version__}")
    under = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands = {}
    for name in COMMANDS:
        module = _module(name)
        about = (module.__doc__ or "").strip()
        commands[name] = under.add_parser(name, help=about.splitlines()[0], description=about)
        module.arguments(commands[name])
        commands[name].set_defaults(execute=module.execute)
    return parser, commands


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"fedstrata.cli.{name}")


def _is_users(error: Exception) -> bool:
    """Whether an error is one that the library raises for wrong input, and not a bug."""
    return isinstance(error, ValueError | TypeError | OSError | ImportError | StateError)


@contextlib.contextmanager
def _plugin_warnings() -> Iterator[None]:
    """Print an error of a plugin in one line, once; the command continues without it."""
    from fedstrata.base.plugins import PluginWarning

    with warnings.catch_warnings():
        warnings.simplefilter("always", PluginWarning)
        usual, told = warnings.showwarning, set()

        def show(message: Any, category: type[Warning], *rest: Any, **options: Any) -> None:
            if not issubclass(category, PluginWarning):
                usual(message, category, *rest, **options)
            elif str(message) not in told:
                told.add(str(message))
                print(f"warning: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield


def _failed(message: str, code: int) -> int:
    if os.environ.get("FEDSTRATA_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
