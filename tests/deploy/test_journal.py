"""The lines of a site's log have the entries that the guide to security lists."""

import re
from pathlib import Path

import numpy as np
from cases import task_of

import fedstrata as fs
from fedstrata.deploy.data_summary import DataSummary
from fedstrata.deploy.journal import Journal
from fedstrata.deploy.messages import Message, Stage
from fedstrata.deploy.site_log import SiteLog, lines_of
from fedstrata.deploy.terms import Terms

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
ALWAYS = {"n", "time", "prev", "kind", "site", "hash"}


def listed():
    """By kind of line, the entries in the guide's table. What stands in brackets explains them."""
    text = GUIDE.read_text().split("## A site's log")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", entries))) for kind, entries in rows}


def test_the_guide_lists_the_entries_of_every_kind_of_line(tmp_path):
    file, own = tmp_path / "log.jsonl", DataSummary.of("north", task_of(fs.FedAvg(0.1)).federation.select([0]))
    log = SiteLog(file, "north")
    journal = Journal(log)
    journal.write_policy("defaults", {"rounds": 3})
    journal.write_summary(own, {"mark": "0"})
    journal.write_terms(Terms("first", (own,), "1", 3, 1), "0", new=True)
    call = Message("first", Stage(0, 0), "north", {"x": np.zeros(2)})
    journal.write_answer(call, call, call.encode())
    journal.write_refusal("first", [1, 0, 0, 0], "too many rounds")
    log.close()
    with file.open("ab") as lines:
        lines.write(b'{"bytes":1')
    SiteLog(file, "north").close()
    written = {line["kind"]: line.keys() - ALWAYS for line in lines_of(file)}
    assert written == listed()
