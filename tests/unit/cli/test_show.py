"""`quire show`: what a model takes to run is what a load says it takes, and what does not run says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from typer.testing import CliRunner

from quire.cli import show, show_needs
from quire.cli.app import app
from quire.config import EngineConfig, Environment, available_cores
from quire.engine.construction.build import build_engine
from quire.engine.construction.memory import size
from quire.machine import Memory
from quire.weights.store.store import Store


def test_the_memory_that_is_shown_is_the_memory_that_a_load_takes(model_path: Path):
    facts = show.gather(Store(), str(model_path))
    needs = facts["memory"]
    config = EngineConfig(path=str(model_path), backend="native", threads=available_cores(), max_seqs=64)
    engine, info = build_engine(config, Environment.read())
    engine.close()
    (told,) = [line for line in info.decisions if line.startswith("memory:")]
    assert f"weights {size(needs['weights'])}, " in told and f"working memory {size(needs['working'])}, " in told
    assert needs["kv_per_token"] == info.kv_bytes // (info.pages * info.page_size)
    assert needs["kv_of_one_context"] == needs["kv_per_token"] * facts["context_length"]
    assert needs["weights_in_bfloat16"] == 2 * facts["parameters"]
    parts = ("weights", "working", "overhead", "kv_of_one_context")
    assert needs["total"] == sum(needs[p] for p in parts)
    pairs = dict(show.lines(facts))
    assert pairs["format"] == "GGUF, version 3" and pairs["made to"] == "write text"
    assert pairs["memory"].startswith(f"{size(needs['total'])} on a CPU: weights ") and "runs here" not in pairs
    assert show_needs.told(None) is None


def test_a_model_that_does_not_fit_says_so(model_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(show_needs, "look_at_memory", lambda: Memory(100 << 20, "the container's limit"))
    pairs = dict(show.lines(show.gather(Store(), str(model_path))))
    assert pairs["runs here"].startswith("no: the model needs ") and "100 MiB are available" in pairs["runs here"]
    assert "100 MiB are available here" in pairs["memory"]


def test_a_model_that_is_not_supported_is_shown_all_the_same(tmp_path: Path):
    path = tmp_path / "odd.gguf"
    writer = GGUFWriter(path, "oddity")
    writer.add_context_length(128)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = CliRunner().invoke(app, ["show", str(path)])
    assert done.exit_code == 0 and "128 tokens" in done.stdout
    assert "runs here" in done.stdout and "no: the architecture 'oddity' is not supported" in done.stdout
    assert "not stated here" in done.stdout  # its licence
    assert json.loads(CliRunner().invoke(app, ["show", str(path), "--json"]).stdout)["refused"].startswith("the arch")


def test_a_template_that_cannot_be_looked_at_says_why():
    assert show.told({"format": None, "failed": ["no such pre-tokenizer"]}) == "not looked at: no such pre-tokenizer"
