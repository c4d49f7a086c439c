"""`quire serve` without a server: what its options become, and what is refused before anything is started."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quire.cli import serve
from quire.cli.app import app
from quire.cli.arguments.engine_options import HIDDEN
from quire.cli.arguments.served_models import Wanted
from quire.config import EngineConfig, ServerConfig


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def start(store: Any, models: list[Wanted], server: ServerConfig, engines: list[EngineConfig]) -> int:
        if len(models) == 1:
            found.extend((models[0].model, server, engines[0]))
        else:
            found.extend((models, server, engines))
        return 0

    monkeypatch.setattr(serve, "_serve", start)
    for name in ("QUIRE_API_KEY", "QUIRE_ISA", "QUIRE_THREADS", "QUIRE_KV_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return found


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["serve", *args])


def test_without_options_it_is_the_defaults(started: list[Any], tmp_path: Path):
    assert run().exit_code == 0
    model, server, engine = started
    assert model == "smollm2:135m"
    assert engine == EngineConfig(path="", name="smollm2:135m")
    assert dataclasses.replace(server, state_dir=None) == ServerConfig()
    assert str(server.state_dir).startswith(str(tmp_path / "home"))


def test_every_option_reaches_its_setting(started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_API_KEY", "k")
    monkeypatch.setenv("QUIRE_ISA", "avx2")
    template, adapter = tmp_path / "t.jinja", tmp_path / "a.gguf"
    template.write_text("{{ messages }}")
    adapter.touch()
    own = "--host ::1 --port 7 --name mine --task generate --max-waiting 9 --ttft-slo 700 --runtime-lora --max-loras 3 --max-lora-rank 5 "
    own += "--drain-seconds 1.5 --hang-seconds 2.5 --max-body 1MiB --allowed-host a --allowed-host b --cors-origin c "
    own += f"--no-log-requests --state-dir none --max-file 2MiB --batch-lines 4 --chat-template {template} --lora x={adapter} "
    own += "--backend torch --device cpu --dtype float32 --quantize int8 --deterministic --threads 6 --kv-memory 3MiB "
    own += "--kv-dtype int8 --context 64 --max-seqs 8 --max-batch-tokens 16 --no-prefix-cache --speculate ngram --draft-tokens 2 --itl-slo 40"
    done = run("smollm2", *own.split())
    assert done.exit_code == 0, done.output
    _, server, engine = started
    assert engine == EngineConfig(
        path="", name="mine", task="generate", max_waiting=9, runtime_lora=True, max_loras=3, max_lora_rank=5, isa="avx2",
        loras=(("x", str(adapter)),), backend="torch", device="cpu", dtype="float32", quantize="int8", deterministic=True, threads=6,
        kv_memory=3 << 20, kv_dtype="int8", context=64, max_seqs=8, max_batch_tokens=16, prefix_cache=False,
        speculate="ngram", draft_tokens=2, itl_slo=40, ttft_slo=700,
    )  # fmt: skip
    assert server == ServerConfig(
        host="::1", port=7, api_key="k", max_body=1 << 20, chat_template=str(template), drain_seconds=1.5, hang_seconds=2.5,
        log_requests=False, allowed_hosts=("a", "b"), cors_origins=("c",), state_dir=None, max_file=2 << 20, batch_lines=4,
        runtime_lora=True,
    )  # fmt: skip
    untouched = {f.name for f in dataclasses.fields(EngineConfig) if getattr(engine, f.name) == f.default}
    assert untouched <= HIDDEN | {"load_format"}  # a setting that is new has an option, or a reason


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--context", "0"], 2, "--context"),
        (["--kv-memory", "lots"], 2, "is not a size"),
        (["--lora", "x"], 2, "is not NAME=PATH"),
        (["--lora", "x=/no/where"], 2, "does not exist"),
        (["--name", "caf\udce9"], 2, "cannot be sent"),
        (["--name", " "], 2, "cannot be sent"),
        (["--chat-template", "/no/where"], 1, "--chat-template takes a file"),
        (["--chat-template", os.devnull], 1, "--chat-template takes a file"),
        (["--api-key", ""], 2, "the key is empty"),
        (["./no-such.gguf"], 1, "there is no file no-such.gguf"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(started: list[Any], args: list[str], code: int, says: str):
    done = run(*args)
    assert done.exit_code == code and says in done.output and not started


def test_a_path_is_served_by_its_last_name(started: list[Any], tmp_path: Path):
    (tmp_path / "Some-Model").mkdir()
    (tmp_path / "Some-Model" / "config.json").write_text("{}")
    (tmp_path / "file.v1.gguf").write_bytes(b"GGUF")
    assert run(str(tmp_path / "Some-Model")).exit_code == 0
    assert run(str(tmp_path / "file.v1.gguf")).exit_code == 0
    assert (started[2].name, started[5].name) == ("Some-Model", "file.v1")


def test_an_empty_template_is_refused(started: list[Any], tmp_path: Path):
    (tmp_path / "t.jinja").touch()
    done = run("--chat-template", str(tmp_path / "t.jinja"))
    assert done.exit_code == 2 and "is empty" in done.output and not started


def test_several_models_and_their_names(started: list[Any], tmp_path: Path):
    (tmp_path / "a=b.gguf").write_bytes(b"GGUF")  # a path, not an alias
    done = run("chat,default=smollm2:135m", str(tmp_path / "a=b.gguf"), "qwen2.5-coder:1.5b")
    assert done.exit_code == 0, done.output
    models, server, engines = started
    assert [one.names for one in models] == [("chat", "default"), ("a=b",), ("qwen2.5-coder:1.5b",)]
    assert models[0].model == "smollm2:135m"
    assert [one.source for one in models] == ["smollm2:135m", "", "qwen2.5-coder:1.5b"]
    assert [e.name for e in engines] == ["chat", "a=b", "qwen2.5-coder:1.5b"]
    assert [e.memory_share for e in engines] == [1 / 3] * 3
    assert server.state_dir is not None and server.state_dir.name == "chat"


def test_names_in_order(started: list[Any]):
    assert run("smollm2:135m", "qwen2.5-coder:1.5b", "--name", "one,uno").exit_code == 0
    assert [one.names for one in started[0]] == [("one", "uno"), ("qwen2.5-coder:1.5b",)]
    assert run("smollm2:135m", "--name", "only").exit_code == 0
    assert started[5].name == "only" and started[5].memory_share == 1.0


def test_adapters_of_several_models(started: list[Any], tmp_path: Path):
    (tmp_path / "x.gguf").touch()
    path = str(tmp_path / "x.gguf")
    done = run("a=smollm2:135m", "b,c=smollm2:135m", "--lora", f"sql@c={path}", "--lora", f"poems@a={path}")
    assert done.exit_code == 0, done.output
    assert [e.loras for e in started[2]] == [(("poems", path),), (("sql", path),)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["smollm2:135m", "smollm2:135m"], "two models would be called"),
        (["x=smollm2:135m", "x=qwen2.5-coder:1.5b"], "OTHER=qwen2.5-coder:1.5b"),
        (["smollm2:135m", "--name", "a", "--name", "b"], "2 names for 1 models"),
        (["x=smollm2:135m", "--name", "a"], "says already what it is called"),
        (["a,,b=smollm2:135m"], "cannot be sent"),
        (["a=smollm2:135m", "b=smollm2:135m", "--lora", f"sql={os.devnull}"], "write sql@MODEL=PATH"),
        (["a=smollm2:135m", "b=smollm2:135m", "--lora", f"sql@z={os.devnull}"], "one of a, b"),
        (["a=smollm2:135m", "b=smollm2:135m", "--lora", f"b@a={os.devnull}"], "is taken"),
    ],
)
def test_several_models_that_cannot_be(started: list[Any], args: list[str], says: str):
    done = run(*args)
    assert done.exit_code == 2 and says in " ".join(done.output.replace("│", " ").split()) and not started
