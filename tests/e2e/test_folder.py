"""A folder of safetensors by every way in: run, show, bench, serve and the library give what transformers gives."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")

from tests.unit.chat import hub_kit  # noqa: E402
from tests.unit.models import folders  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The quick brown fox"
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a tokenizer, a template and generation defaults, in bfloat16 and in shards."""
    path = tmp_path_factory.mktemp("folders") / "Tiny-1.5-Instruct"
    tokenizer = hub_kit.byte_level(path)
    tokenizer.chat_template = hub_kit.TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.save_pretrained(path)
    vocab = tokenizer.get_vocab()
    size = max(vocab.values()) + 1
    (path / "config.json").unlink()
    model = folders.build("qwen2", vocab_size=size + 8, eos_token_id=vocab["<|im_end|>"], bos_token_id=None)
    folders.save(model, path, shard="80KB", dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """Greedy continuations by transformers, in float32 on the weights of the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    found = {}
    for name, text in (("raw", PROMPT), ("chat", chat)):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        found[name] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return found


def quire(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "device", [["--device", "cpu"], ["--backend", "torch", "--device", "cpu", "--dtype", "float32"]]
)
def test_run(folder: Path, expected: dict[str, str], device: list[str]):
    flags = ["--temperature", "0", "--max-tokens", str(TOKENS), "--context", "128", *device]
    assert quire("run", *flags, "--raw", str(folder), PROMPT).rstrip("\n") == expected["raw"].rstrip("\n")
    assert quire("run", *flags, str(folder), PROMPT).rstrip("\n") == expected["chat"].rstrip("\n")


def test_show_and_bench(folder: Path):
    facts = json.loads(quire("show", "--json", str(folder)))
    assert facts["architecture"] == "Qwen2ForCausalLM" and facts["types"].keys() == {"BF16"} and facts["shards"] > 1
    assert facts["chat_template"] and facts["layers"] == 3 and facts["path"] == str(folder)
    assert "Qwen2ForCausalLM" in quire("show", str(folder))
    bench = (
        "bench",
        "latency",
        str(folder),
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "4",
        "--rounds",
        "1",
        "--json",
        "-",
    )
    record = json.loads(quire(*bench))
    assert "Tiny-1.5-Instruct" in json.dumps(record)


def test_the_library(folder: Path, expected: dict[str, str]):
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    with LLM(str(folder), context=128, device="cpu") as llm:
        assert llm.generate(PROMPT, params)[0].text == expected["raw"]
        assert llm.chat([{"role": "user", "content": PROMPT}], params)[0].text == expected["chat"]
        assert any(line.startswith("device: cpu (asked for)") for line in llm.info.decisions)


def test_serve(folder: Path, expected: dict[str, str]):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [sys.executable, "-m", "quire.cli.main", "serve", str(folder), "--port", str(port), "--context", "128"]
    server = subprocess.Popen([*words, "--device", "cpu"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert _ready(port, server), server.stderr and server.stderr.read()
        body: dict[str, Any] = {"model": "Tiny-1.5-Instruct", "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
        assert _post(port, "completions", body)["choices"][0]["text"] == expected["raw"]
        body = {
            "model": body["model"],
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "max_tokens": TOKENS,
        }
        assert _post(port, "chat/completions", body)["choices"][0]["message"]["content"] == expected["chat"]
    finally:
        os.kill(server.pid, signal.SIGTERM)
        _, said = server.communicate(timeout=30)
    assert re.search(r"Tiny-1.5-Instruct is ready", said)


def _ready(port: int, server: subprocess.Popen[str]) -> bool:
    for _ in range(300):
        if server.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
                return True
        except OSError:
            time.sleep(0.1)
    return False


def _post(port: int, route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())


def test_an_unknown_architecture_is_one_clear_line(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "run", str(tmp_path), "hi"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "'MambaForCausalLM' is not supported" in done.stderr and "LlamaForCausalLM" in done.stderr
