"""The table in CONTRIBUTING.md that traces one request has the files that such a request enters, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.config import DEFAULT_MODEL
from tests.trace_request import trace

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "quire"
MOST = 43  # Python files that one request may enter: it shall become fewer, and never more
EXEMPT = ("*once, at load*", "*now and then*")


def table(page: str) -> tuple[set[str], set[str]]:
    """Python files of the package that the table names: those of every request, and those of exempt rows."""
    part = page.partition("## One request, traced")[2].partition("\n## ")[0]
    always: set[str] = set()
    exempt: set[str] = set()
    for row in re.findall(r"^\| \d+ \|.*$", part, re.M):
        _, _, files, what, _ = row.split("|")
        found = {name for name in re.findall(r"`([^`]+)`", files) if name.endswith(".py")}
        (exempt if any(mark in what for mark in EXEMPT) else always).update(found)
    return always, exempt - always


@pytest.fixture(scope="module")
def entered(model_path: Path) -> set[str]:
    return set().union(*trace(DEFAULT_MODEL))


def test_the_table_names_files_that_are_there():
    always, exempt = table((ROOT / "CONTRIBUTING.md").read_text())
    assert len(always) > 30
    assert not [name for name in always | exempt if not (PACKAGE / name).is_file()]


def test_every_file_that_is_entered_is_in_the_table_and_the_other_way_round(entered: set[str]):
    always, exempt = table((ROOT / "CONTRIBUTING.md").read_text())
    assert not entered - always - exempt, "entered, and not in the table"
    assert not always - entered, "in the table, and not entered"


def test_a_request_enters_few_files(entered: set[str]):
    assert len(entered) <= MOST
