"""The architecture holds: imports go one way, there are no cycles, and what must not be imported is not.

Rooms are listed from the roof down; a file may import from its own room and from rooms below it.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "quire"
ROOMS = (
    "__main__",
    "cli",
    "llm",
    "fleet",
    "server",
    "chat",
    "engine",
    "cache",
    "runner",
    "models",
    "weights",
    "formats",
    "backends",
    "layouts",
    "observe",
    "config",
    "machine",
)
FILES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])  # a stub stands for an extension module


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@functools.cache  # many tests look at every file
def parsed(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> list[str]:
    """Modules that a file imports anywhere, lazily or for types alone, as full names."""
    found = []
    for node in parsed(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.append(full if full in MODULES else str(node.module))
    return found


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "quire" and len(parts) > 1 else None


def test_every_file_is_in_a_room():
    strays = [str(p.relative_to(ROOT)) for m, p in MODULES.items() if m != "quire" and room(m) not in ROOMS]
    assert not strays, f"not in a known room: {strays}"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "quire"])
def test_imports_go_down(module: str):
    here = ROOMS.index(room(module) or "")
    for target in imports(MODULES[module]):
        if target == "quire" or not target.startswith("quire."):
            continue
        there = ROOMS.index(room(target) or "")
        assert there >= here, f"{module} imports {target}, which is above it"


def test_no_import_cycles():
    graph = {m: [t for t in imports(p) if t in MODULES and t != m] for m, p in MODULES.items()}
    state: dict[str, int] = {}

    def visit(module: str, trail: list[str]) -> None:
        if state.get(module) == 2:
            return
        assert state.get(module) != 1, f"cycle: {' -> '.join([*trail[trail.index(module) :], module])}"
        state[module] = 1
        for target in graph[module]:
            visit(target, [*trail, module])
        state[module] = 2

    for module in graph:
        visit(module, [])


def test_the_server_s_core_names_no_dialect():
    """What only one dialect needs lives with it: neither the core nor another dialect knows it. And what a request chose is an argument."""
    server = PACKAGE / "server"
    dialects = {path.parent.name for path in server.glob("*/__init__.py") if "def register(" in path.read_text()}
    assert len(dialects) >= 7
    for path in sorted(server.rglob("*.py")):
        folder = path.relative_to(server).parts[0]
        for target in imports(path):
            used = target.split(".")[2:3] if target.startswith("quire.server.") else []
            assert not (set(used) & dialects) - {folder}, f"{path.relative_to(ROOT)} imports {target}"
            assert not target.startswith("contextvars"), (
                f"{path.relative_to(ROOT)} keeps what a request chose in its context"
            )


def test_rooms_are_small():
    """About 20 files side by side, but for registries: folders that have one file for each model, format or kernel."""
    registries = {"models", "formats", "chat/tools/formats", "backends/cuda/kernels"}
    for folder in {path.parent for path in FILES}:
        name = folder.relative_to(PACKAGE).as_posix()
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert name in registries or len(files) <= 20, f"{name} has {len(files)} files: give some a room of their own"


def test_the_environment_is_read_in_one_file():
    for path in FILES:
        if path == PACKAGE / "config.py":
            continue
        for node in parsed(path):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno} reads the environment")


def test_nothing_unpickles():
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "transformers"}
    for path in FILES:
        for target in imports(path):
            assert target.split(".")[0] not in banned, f"{path.relative_to(ROOT)} imports {target}"


def test_torch_stays_in_its_rooms():
    """Nothing above the runner knows torch, and no other backend does."""
    allowed = ("quire/backends/torch/", "quire/backends/cuda/", "quire/runner/")
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(allowed):
            used = {target.split(".")[0] for target in imports(path)} & {"torch", "triton"}
            assert not used, f"{name} imports {used}"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cpu_path_loads_no_torch_and_no_server():
    """What `quire run` loads before its first token."""
    out = run_python(
        "import sys, quire.engine.transport.inprocess, quire.engine.construction.build, quire.chat.completer, quire.models, quire.llm\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    loaded = set(out.split())
    assert not loaded & {"torch", "transformers", "fastapi", "uvicorn", "pydantic", "prometheus_client"}


def test_configuration_stays_small():
    """At most 60 fields and 10 environment variables."""
    tree = ast.parse((PACKAGE / "config.py").read_text())
    fields = [
        node
        for cls in tree.body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
    ]
    assert len(fields) <= 60
    from dataclasses import fields as dataclass_fields

    from quire.config import Environment

    assert len(dataclass_fields(Environment)) <= 10


# How a sentence begins that does not say what it is about: a reader who comes from elsewhere has to guess.
NO_SUBJECT = re.compile(
    r"(It|Its|They|Their|Them|Those|That|So many|So much|As|Of|Nothing|Who|Whom|Whoever|From now on|In place|On the|For people"
    r"|What became|What came|All of them|One more|One less|There is|There are|Here|Behind|Beside|Once|Until)\b"
)


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_have_a_subject(room: str):
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for path in FILES:
        if path.relative_to(PACKAGE).with_suffix("").parts[0] == room:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, kinds) and NO_SUBJECT.match(text := ast.get_docstring(node) or ""):
                    raise AssertionError(
                        f"{path.relative_to(ROOT)}: say what this is about: {text.partition(chr(10))[0]}"
                    )


def test_one_version():
    import tomllib

    from quire import __version__

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
