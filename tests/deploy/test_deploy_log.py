"""The page with the results of `make test-deploy`, from a report of pytest."""

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from deploy_log import page

CASES = """
<testcase classname="tests.deploy.flower.test_faults" name="test_a_killed_worker[0]" time="35.2" />
<testcase classname="tests.deploy.flower.test_faults" name="test_a_killed_worker[1]" time="96.1"><failure /></testcase>
<testcase classname="tests.deploy.flower.test_setup" name="test_a_new_app" time="0.4" />
<testcase classname="tests.deploy.flower.test_server_app" name="test_a_killed_worker[a|b]" time="1" />
<testcase classname="tests.attacks.test_floods" name="test_junk[0]" time="2" />
<testcase classname="tests.attacks.test_floods" name="test_junk[1]" time="3"><error /></testcase>
<testcase classname="tests.attacks.test_floods" name="test_junk[2]" time="1"><skipped /></testcase>
<testcase classname="tests.attacks.test_fuzz" name="test_mutated[0]" time="4" />
"""
AGAIN = """
<testcase classname="tests.deploy.flower.test_faults" name="test_a_killed_worker[1]" time="50" />
"""


def sections(tmp_path, *reports):
    paths = []
    for number, cases in enumerate(reports):
        paths.append(tmp_path / f"{number}.xml")
        paths[-1].write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return page([str(path) for path in paths]).split("\n## ")


def test_runs_over_flower_single_parts_and_attacks_have_a_table_each(tmp_path):
    head, flower, parts, attacks = sections(tmp_path, CASES)
    assert "5 passed, 2 failed, 1 skipped" in head
    assert flower.startswith("Over Flower")
    assert "1 passed, 1 failed, 0 skipped" in flower
    assert "| a killed worker | 1 | 1 | 35, 96 | 0, 1 |\n" in flower
    assert "start no SuperLink" in parts
    assert "| a new app | 1 | – | 0, 0 |  |\n" in parts
    assert r"| a killed worker | 1 | – | 1, 1 | a\|b |" in parts
    assert "2 passed, 1 failed, 1 skipped" in attacks
    assert "| floods | 1 | 1 (junk) | 6 |\n| fuzz | 1 | – | 4 |\n" in attacks


def test_a_case_counts_as_in_the_last_report(tmp_path):
    head, flower, *_ = sections(tmp_path, CASES, AGAIN)
    assert "6 passed, 1 failed, 1 skipped" in head
    assert "| a killed worker | 2 | – | 35, 50 | 0, 1 |\n" in flower
