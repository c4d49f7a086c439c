"""The index of architecture names: it says what the modules say, and a family is found by it and without it."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire import models
from quire.models import index

ROOT = Path(__file__).resolve().parents[3]


def test_the_index_says_what_the_modules_say():
    found = {}
    for info in pkgutil.iter_modules(models.__path__):
        module = importlib.import_module(f"quire.models.{info.name}")
        if hasattr(module, "ARCHS"):
            found[info.name] = (*module.ARCHS, *module.HF_ARCHS)
    lines = "\n".join(f"    {name!r}: {names!r}," for name, names in found.items())
    assert found == index.NAMES, f"quire/models/index.py must hold:\n{lines}"


def test_one_name_imports_those_who_answer_to_it():
    code = (
        "import sys\nfrom quire.models import families\nfrom quire.models.index import NAMES\n"
        "found = families('qwen3')\n"
        "print([m.__name__ for m in found], [n for n in NAMES if f'quire.models.{n}' in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['quire.models.qwen3'] ['qwen3']"


def test_a_family_that_the_index_lacks_is_still_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "NAMES", {"llama": ("llama",)})
    assert "quire.models.qwen3" in [module.__name__ for module in models.families("qwen3")]
