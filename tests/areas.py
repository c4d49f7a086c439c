"""Which test files `make test` runs: the core always, and an area's own tests where a change touches that area.

The core is everything that is in no area: engine, cache, runner, models, conformance of the backends, the null tests, and end to
end. An area is a part of the tree that seldom changes what others do: a dialect of the server, a source of models, interpreted GPU
kernels. What counts as a change: uncommitted files, commits that the upstream branch does not have, and those since BASE if given.

    python -m tests.areas [--base REV] [--all] [FOLDER ...]     prints paths, for pytest
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Area(NamedTuple):
    """Tests that run when something below `code` changed, or they themselves did."""

    tests: tuple[str, ...]
    code: tuple[str, ...]


FAMILIES = ("mixtures", "families", "hf", "lora", "quantized_folders", "fuzz")
KERNEL_SETS = ("kernel_sets", "groups", "native_attention", "native_attention_kinds", "native_moe", "native_pool")
INTERPRETED = (
    "tests/unit/engine/test_deterministic_cuda.py",
    "tests/unit/engine/test_quantized_engine.py",
    "tests/unit/engine/construction/test_build_torch.py",
)
SERVER = ("quire/server/shared/", "quire/chat/tools/")
TENSORS = ("quire/backends/", "quire/layouts.py", "native/")
AREAS = (
    Area(("tests/unit/server/anthropic", "tests/e2e/test_anthropic.py"), ("quire/server/anthropic/", *SERVER)),
    Area(("tests/unit/server/kserve",), ("quire/server/kserve/", *SERVER)),
    Area(("tests/unit/server/llama_cpp", "tests/e2e/test_infill.py"), ("quire/server/llama_cpp/", *SERVER)),
    Area(("tests/unit/server/ollama", "tests/e2e/test_ollama.py"), ("quire/server/ollama/", *SERVER)),
    Area(("tests/unit/server/tgi", "tests/e2e/test_tgi.py"), ("quire/server/tgi/", *SERVER)),
    Area(("tests/unit/server/openai", "tests/e2e/test_openai_responses.py"), ("quire/server/openai/", *SERVER)),
    Area(("tests/unit/chat",), ("quire/chat/",)),
    # Tools and long conversations, with the default model behind every dialect.
    Area(("tests/e2e/test_tools.py", "tests/e2e/test_context.py"), ("quire/chat/", "quire/server/shared/")),
    Area(
        (
            "tests/unit/server/test_lenient.py",
            "tests/unit/server/test_fitting.py",
            "tests/unit/server/test_prefixes.py",
        ),
        ("quire/chat/", "quire/server/shared/", "quire/server/reading.py", "quire/server/ignored.py"),
    ),
    Area(("tests/e2e/test_launch.py",), ("quire/cli/launch.py", "quire/cli/agents/", "quire/cli/serve.py")),
    Area(("tests/unit/weights",), ("quire/weights/", "quire/formats/")),
    Area(("tests/unit/formats",), ("quire/formats/", "quire/layouts.py", "native/")),
    Area(("tests/unit/benchmarks",), ("benchmarks/",)),
    # Containers, charts, boards and units: what they name must be what Quire has.
    Area(
        ("tests/unit/deploy",),
        ("deploy/", "quire/cli/", "quire/observe/metrics.py", "docs/deploying.md", "pyproject.toml", ".dockerignore"),
    ),
    Area(("tests/fuzz",), ("quire/weights/", "quire/formats/", "quire/chat/tokenizers/", "quire/models/")),
    # Families of models, beside test_llama.py, which compares the default model with transformers on every backend.
    Area(
        tuple(f"tests/unit/models/test_{name}.py" for name in FAMILIES),
        ("quire/models/", "quire/weights/", *TENSORS),
    ),
    # Every kernel set of the CPU, and every type of keys and values: the fastest, the portable one and f16 are in the core.
    Area(
        (*(f"tests/unit/backends/test_{name}.py" for name in KERNEL_SETS), "tests/e2e/test_determinism_kv.py"), TENSORS
    ),
    Area(
        ("tests/unit/backends/cuda", "tests/gpu", "tests/unit/runner/device", *INTERPRETED),
        ("quire/backends/", "quire/runner/device/", "quire/formats/hub/"),
    ),
    # Grammars against their test suites; tests/e2e/test_structured.py is in the core.
    Area(("tests/unit/engine/constraints",), ("quire/engine/constraints/",)),
    # A whole run over a folder of safetensors; tests/unit/models/test_llama.py, which reads one, is in the core.
    Area(("tests/e2e/test_folder.py",), ("quire/weights/", "quire/formats/", "quire/models/")),
    # An engine process that hangs, dies or is cut off; tests/e2e/test_server_faults.py is in the core.
    Area(
        ("tests/unit/engine/transport",),
        ("quire/engine/engine.py", "quire/engine/types.py", "quire/engine/transport/", "quire/engine/construction/"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="commits since this one count as changes, too")
    parser.add_argument("--all", action="store_true", help="every area")
    parser.add_argument("under", nargs="*", default=["tests"], help="only tests below these folders")
    args = parser.parse_args()
    skipped = [] if args.all else [area for area in AREAS if not touched(area, changes(args.base))]
    print(*(name for folder in args.under for name in paths(skipped, folder)), sep="\n")


def touched(area: Area, changed: Iterable[str]) -> bool:
    """Whether one of these files is the area's, code or test."""
    own = (*area.code, *(test if test.endswith(".py") else f"{test}/" for test in area.tests))
    return any(name.startswith(own) for name in changed)


def changes(base: str) -> set[str]:
    """Files that differ from the upstream branch (or from the last commit, where there is none) and from `base`."""
    found = set(git("status", "--porcelain", "--untracked-files=all", "-z", cut=3))
    upstream = git("rev-parse", "--verify", "--quiet", "@{upstream}")
    for start in (*upstream, *([base] if base else [])):
        found.update(git("diff", "--name-only", "-z", f"{start}...HEAD"))
    return found


def git(*words: str, cut: int = 0) -> list[str]:
    """What git says, a line or a zero at a time; nothing where there is no git or it refuses."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return []
    return [part[cut:] for part in done.stdout.replace("\0", "\n").splitlines() if part] if not done.returncode else []


def paths(skipped: Iterable[Area], under: str = "tests") -> list[str]:
    """Every test file below `under`, but for those of the areas that are skipped."""
    out = tuple(test if test.endswith(".py") else f"{test}/" for area in skipped for test in area.tests)
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / under).rglob("test_*.py"))
    return [name for name in files if not name.startswith(out)] if out else files


if __name__ == "__main__":
    main()
