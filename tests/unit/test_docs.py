"""What the pages say is there: links and anchors lead somewhere, commands and their options exist, files and modules that are named
are there, and Python examples are Python."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "benchmarks" / "notes").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
IDS = [str(p.relative_to(ROOT)) for p in PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
NAMED = re.compile(r"(?<![\w/])(?:quire|tests|docs|benchmarks|native)/[\w./-]*\w")
MADE_UP = {"native/build"}  # what a build makes


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", re.sub(FENCE, "", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path):
    for target in LINK.findall(re.sub(FENCE, "", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(there), f"{target}: there is no such heading"


def test_every_page_is_reached_from_the_front():
    front = (ROOT / "README.md").read_text()
    assert not [p.name for p in (ROOT / "docs").glob("*.md") if f"(docs/{p.name}" not in front]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_files_and_modules_that_are_named_are_there(page: Path):
    text = page.read_text()
    for name in {n for code in CODE.findall(text) for n in NAMED.findall(code)}:
        assert name in MADE_UP or (ROOT / name).exists() or "…" in name, f"there is no {name}"
    for module in set(re.findall(r"python -m ((?:benchmarks|tests|quire)[\w.]*)", text)):
        assert importlib.util.find_spec(module.rstrip(".")), f"there is no module {module}"


@cache
def options(verb: str) -> frozenset[str]:
    """Every option of a verb, those of its own verbs included."""
    from quire.cli.app import load

    def of(command: object) -> set[str]:
        own = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        return own.union(*(of(c) for c in getattr(command, "commands", {}).values()))

    return frozenset(of(load(verb)) | {"-h", "--help"})


def commands(page: Path) -> list[list[str]]:
    """Every `quire …` of a page, in words: in a block of shell, or between backticks."""
    from quire.cli.verbs import VERBS

    text = page.read_text()
    lines = [line for kind, body in FENCE.findall(text) if kind in ("sh", "bash", "") for line in body.splitlines()]
    lines += [code for code in CODE.findall(re.sub(FENCE, "", text)) if code.startswith("quire ")]
    found = []
    for line in lines:
        match = re.search(r"(?:^|[|;&=…] *)\bquire (.*)$", line.strip())
        if match is None:
            continue
        words = shlex.split(match[1].replace("'[", "[").replace("\\|", "/"), comments=True)
        if words and words[0] in VERBS:
            found.append(words)
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_have_the_options_they_are_given(page: Path):
    for verb, *words in commands(page):
        for word in words:
            if word == "--":
                break
            if word.startswith("--"):
                assert word.partition("=")[0].rstrip(",.") in options(verb), f"quire {verb} has no {word}"


def test_every_verb_and_every_variable_has_its_place():
    from quire.cli.verbs import VERBS

    page = (ROOT / "docs" / "cli.md").read_text()
    assert not [verb for verb in VERBS if f"| `{verb}" not in page]
    table = (ROOT / "docs" / "install.md").read_text()
    read = set(re.findall(r'get\("([A-Z_]+)"', (ROOT / "quire" / "config.py").read_text()))
    assert not [name for name in read if f"`{name}`" not in table], "a variable that install.md does not know"


def test_every_option_of_the_library_is_described():
    from quire.llm import Options

    page = (ROOT / "docs" / "library.md").read_text()
    assert not [name for name in Options.__annotations__ if f"`{name}`" not in page]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_examples_are_python(page: Path):
    for kind, body in FENCE.findall(page.read_text()):
        if kind == "python":
            ast.parse(body.replace("=…", "=x").replace("[…]", "[]").replace("{…}", "{}"))
