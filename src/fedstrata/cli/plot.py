"""Draw histories that `fedstrata run` wrote: one line per file, mean and band over seeds.

examples:
  fedstrata plot out/digits                                     every history of a run
  fedstrata plot out/digits/FedAvg.jsonl out/digits/SCAFFOLD.jsonl --y test/accuracy --x megabytes
  fedstrata plot out/digits --y stationarity --out stationarity.pdf
"""

import argparse
from pathlib import Path

from fedstrata.cli.output import print_json
from fedstrata.cli.parsing import Mistake, json_option


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="histories (.jsonl), or folders that hold them")
    parser.add_argument("--y", default="objective", metavar="COLUMN", help="what to draw (default: objective)")
    parser.add_argument("--x", default="round", metavar="AXIS", help="round (default), samples, megabytes or seconds")
    bands = "over seeds: std (default), ci (95 %% interval of the mean), quantiles or none"
    parser.add_argument("--band", default="std", metavar="BAND", help=bands)
    parser.add_argument("--log", action="store_true", help="logarithmic vertical axis (chosen by itself otherwise)")
    parser.add_argument("--out", default="plot.png", metavar="PICTURE", help=".png, .pdf or .svg (default: plot.png)")
    json_option(parser, '{"picture": path, "lines": [labels]}')


def execute(options: argparse.Namespace) -> int:
    from fedstrata.report import History, plot

    if Path(options.out).suffix not in (".png", ".pdf", ".svg"):
        raise Mistake(f"--out {options.out}: a picture ends in .png, .pdf or .svg")
    histories = {label: History.from_jsonl(path) for label, path in labelled(options.files).items()}
    plot(histories, y=options.y, x=options.x, path=options.out, band=options.band, log=options.log or "auto")
    if options.json:
        print_json({"picture": options.out, "lines": list(histories)})
    else:
        print(f"drew {', '.join(histories)} in {options.out}")
    return 0


def labelled(words: list[str]) -> dict[str, Path]:
    """Files by label: their names, with the folder in front where names repeat.

    Args:
        words: files, and folders of files.
    """
    paths: list[Path] = []
    for word in words:
        path = Path(word)
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise Mistake(f"{word}: this folder holds no history (.jsonl)")
        paths += inside
    for path in paths:
        if not path.is_file():
            raise Mistake(f"{path}: there is no such file; `fedstrata run EXPERIMENT --out DIR` writes histories")
    stems = [path.stem for path in paths]
    labels = [p.stem if stems.count(p.stem) == 1 else f"{p.resolve().parent.name}/{p.stem}" for p in paths]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in paths]
    return dict(zip(labels, paths, strict=True))
