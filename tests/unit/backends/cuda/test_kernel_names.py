"""Names that an argument of a kernel must not have: the function that Triton writes to launch one has locals of those names, and an
argument of such a name becomes the local. Its interpreter, which is all that tests have here, writes no such function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quire.backends.cuda.kernels

TAKEN = {"params", "options", "specialization", "args", "kwargs", "backend"}
FILES = sorted(Path(quire.backends.cuda.kernels.__path__[0]).glob("*.py"))


def jitted(tree: ast.Module) -> list[ast.FunctionDef]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [node for node in found if any("triton.jit" in ast.unparse(d) for d in node.decorator_list)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_argument_has_a_name_that_is_taken(path: Path):
    for function in jitted(ast.parse(path.read_text())):
        names = {a.arg for a in function.args.args}
        assert not names & TAKEN, f"{path.name}, {function.name}: {names & TAKEN}"


def test_kernels_are_found():
    assert sum(len(jitted(ast.parse(path.read_text()))) for path in FILES) > 60
