"""`quire bench` with the default model, as a process: figures that hang together, text prompts, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "quire.cli.main", "bench", *args]


def record(*args: str) -> dict[str, Any]:
    done = subprocess.run(command(*args, "--json", "-"), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


def test_latency_of_the_default_model(model_path: Path) -> None:
    size = ("--prompt-tokens", "64", "--output-tokens", "17", "--depth", "32", "--rounds", "2", "--context", "512")
    started = time.perf_counter()
    found = record("latency", str(model_path), *size)
    took = time.perf_counter() - started
    results, settings = found["results"], found["settings"]
    assert settings["depth"] == 32 and results["cached_prompt_tokens_per_round"] == 32
    first, gaps = results["first_token_seconds"], results["output_token_seconds"]
    assert (first["n"], gaps["n"]) == (2, 32)
    assert 0 < first["mean"] < took and first["mean"] + 16 * gaps["mean"] < took
    # A rate over rounds and the times it is made of are the same measurement: 64 tokens until the first.
    assert results["prefill_tokens_per_second"]["max"] == pytest.approx(64 / first["min"], rel=0.05)
    assert results["decode_tokens_per_second"]["min"] <= 1 / gaps["mean"] <= results["decode_tokens_per_second"]["max"]
    assert found["engine"]["context"] == 512 and found["model"]["bytes"] == os.path.getsize(model_path)
    assert found["peak_memory_bytes"] > found["engine"]["weight_bytes"] // 2


def test_throughput_of_text_prompts(model_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"The number {i} is", "output_tokens": 3 + i} for i in range(5)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = record("throughput", str(model_path), "--dataset", str(prompts), "--context", "256", "--max-seqs", "4")
    results = found["results"]
    assert results["requests"] == 5 and results["output_tokens"] == 3 + 4 + 5 + 6 + 7
    assert 5 * 4 <= results["prompt_tokens"] <= 5 * 8
    assert 1 < results["mean_batch"] <= 4
    assert results["requests_per_second"] == pytest.approx(5 / results["seconds"])


@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_control_c_prints_what_there_is(model_path: Path, tmp_path: Path, mode: str) -> None:
    size = ("--prompt-tokens", "16", "--output-tokens", "8", "--context", "256")
    many = ("--rounds", "1000000") if mode == "latency" else ("--requests", "20000", "--concurrency", "2")
    target = tmp_path / "cut.json"
    child = subprocess.Popen(
        command(mode, str(model_path), *size, *many, "-v", "--json", str(target)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:  # what was decided comes once it is loaded
        if line.startswith("loaded in"):
            break
    time.sleep(4.0)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130 and "Traceback" not in err and "interrupted: this is what" in err
    assert "per output token, ms" in out and " of " in out.splitlines()[1]
    assert json.loads(target.read_text())["complete"] is False
