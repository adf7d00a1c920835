"""Writes a new app: its code, a file for the server and one for each site, and example data for a local run."""

import re
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np

CODE = ("__init__", "task", "server_app", "client_app")
# Measurements of the Wisconsin tumours on which methods differ; with those of size the task is too easy.
MEASUREMENTS = ("texture", "smoothness", "compactness", "concavity", "symmetry", "fractal dimension")
SERVER = """\
# The server's machine. `fedstrata deploy server` starts the SuperLink from this.
address = "127.0.0.1:9092" # host:port for the sites; the certificate must be made for this host
listen = "127.0.0.1" # "0.0.0.0" for sites on other machines
keys = "keys"
# behind = "127.0.0.1:9192" # the SuperLink listens here alone, behind nginx: see `fedstrata deploy server --behind`
# largest_message = 64 # MB of one request that nginx accepts
"""
SITE = """\
# {site}'s machine. `fedstrata deploy check` and `fedstrata deploy site` read this.
site = "{site}"
server = "127.0.0.1:9092"
state = "{site}" # this site's state in a run, readable by its owner only: keep it, and keep it private
authority = "../keys/authority.crt" # from the server; verifies its certificate
key = "../keys/{site}.key"
approved = "../approved.txt" # versions of the app that may run here
port = {port} # for programs on this machine

[settings] # the argument of `load` in task.py; relative paths start at this file's folder
data = "../example/{site}.csv"
# tells = "scores" # send patients' scores, for the AUC over all sites together; "nothing": not even measures

[policy] # what this site agrees to, checked before any work; all but runs_at_most hold for each run
sites_at_least = {least} # a run of fewer sites is refused: the others could compute what this site sent
# rows_at_least = 5 # of every split that this site has: a mean over fewer reveals them
# rows_at_most = 10_000_000 # that another site may report: memory is reserved here for as many
# runs = ["*"] # names of runs; * stands for any text
# runs_at_most = 20 # that may begin here
# rounds = 1000
# evaluations = 100
# parameters = 0 # different calls that are answered; 0: as many as the run needs, a quarter more, and ten
# fields = ["means"] # that may leave: those merged by a mean; name others, which the server sees one by one
# bytes = 1_000_000_000 # that may leave
# call_bytes = 256_000_000 # of one call
# noise_at_least = 0.0 # that this site adds to its replies, in clips: the app needs fs.Privacy(…, where="sites")
"""


def write(folder: Path, sites: int) -> list[Path]:
    """Write all files of a new app; returns their paths.

    Args:
        folder: a new or empty folder; its name becomes the package's.
        sites: how many.
    """
    name = folder.absolute().name
    package = re.sub(r"\W", "_", name).lower()
    if not package.isidentifier():
        raise ValueError(f"{name!r} cannot name a package; choose a name that starts with a letter")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; choose a new folder")
    words: dict[str, str | int] = {"package": package, "name": package.replace("_", "-"), "sites": sites}
    text = {f"{package}/{name}.py": _template(f"{name}.py", words) for name in CODE}
    text |= {name: _template(name, words) for name in ("pyproject.toml", "README.md")}
    text |= {"server.toml": SERVER, ".gitignore": ".flwr/\nexample/\nkeys/\nout/\nsites/*/\n"}
    for number in range(1, sites + 1):
        text[f"sites/site-{number}.toml"] = SITE.format(site=f"site-{number}", port=9093 + number, least=min(3, sites))
        text[f"example/site-{number}.csv"] = _example(number - 1, sites)
    for name, content in text.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600 if path.parent.name == "sites" else 0o666)
        path.write_text(content)
    return [folder / name for name in text]


def _template(name: str, words: dict[str, str | int]) -> str:
    return Template((files("fedstrata.deploy.flower") / "template" / f"{name}.txt").read_text()).substitute(words)


def _example(number: int, sites: int) -> str:
    """One site's share of real tumours: mostly malignant at the first site, mostly benign at the last."""
    from fedstrata.data import load

    data = load("breast_cancer")
    names = data.features or ()
    columns = [names.index(f"mean {m}") for m in MEASUREMENTS]
    x, malignant = data.train["x"][:, columns], data.train["y"] == 0
    rows = []
    for kind, shares in ((malignant, np.arange(sites, 0, -1)), (~malignant, np.arange(1, sites + 1))):
        order = np.random.default_rng(0).permutation(np.flatnonzero(kind))
        cuts = np.round(np.cumsum(shares)[:-1] / shares.sum() * len(order)).astype(int)
        rows.append(np.split(order, cuts)[number])
    lines = [",".join(f"{v:.6g}" for v in x[row]) + f",{int(malignant[row])}" for row in np.concatenate(rows)]
    return "\n".join([",".join([*MEASUREMENTS, "malignant"]), *lines]) + "\n"
