"""An evaluation harness through the completions API: multiple choice, which is scored by `echo` and the older logprobs shape.

`test_what_it_sends` needs nothing: it sends the bodies of lm-eval's `local-completions` and reads the answers as it does. `test_the_harness` runs
the harness itself, where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server

QUESTIONS: list[tuple[str, list[str], int]] = [
    ("The capital of France is", [" Paris", " Rome", " Oslo"], 0),
    ("Two plus two equals", [" seven", " four", " none"], 1),
    ("The opposite of hot is", [" blue", " fast", " cold"], 2),
    ("Water freezes into", [" ice", " fire", " sand"], 0),
]


def ask(server: Server, prompts: list[Any]) -> list[dict[str, Any]]:
    """A batch as `local-completions` sends it."""
    body = {
        "model": DEFAULT_MODEL,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    r = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert r.status_code == 200, r.text
    return sorted(r.json()["choices"], key=lambda choice: choice["index"])


def read(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """The log likelihood of what follows the context, and whether each of its tokens was the likeliest, as the harness reads them."""
    told = choice["logprobs"]["token_logprobs"][context:-1]
    tops = choice["logprobs"]["top_logprobs"][context:-1]
    return sum(told), all(p == max(top.values()) for p, top in zip(told, tops, strict=True))


def tokens(server: Server, text: str) -> list[int]:
    return httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=10).json()["tokens"]


def test_what_it_sends(server: Server):
    prompts: list[list[int]] = []
    contexts: list[int] = []
    for question, answers, _ in QUESTIONS:
        before = tokens(server, question)
        for answer in answers:
            prompts.append(tokens(server, question + answer))
            contexts.append(len(before))
            assert prompts[-1][: len(before)] == before
    found = [read(c, n) for c, n in zip(ask(server, prompts), contexts, strict=True)]
    alone = [read(ask(server, [p])[0], n) for p, n in zip(prompts, contexts, strict=True)]
    assert found == alone  # whatever the batch
    with LLM(DEFAULT_MODEL, progress=False) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        outputs = llm.generate(prompts, params, progress=False)
    for (total, greedy), output, n in zip(found, outputs, contexts, strict=True):
        entries = output.prompt_logprobs[n - 1 :]  # nothing predicts the first token
        assert total == pytest.approx(sum(e.logprob for e in entries), abs=1e-6)
        assert greedy == all(e.rank == 1 for e in entries)
    scores = [total for total, _ in found]
    right = 0
    for i, (_, answers, best) in enumerate(QUESTIONS):
        mine = scores[i * len(answers) : (i + 1) * len(answers)]
        right += mine.index(max(mine)) == best
    assert right >= 3, scores
    texts = [
        read(c, n)
        for c, n in zip(
            ask(server, [question + a for question, a_s, _ in QUESTIONS for a in a_s]), contexts, strict=True
        )
    ]
    assert texts == found  # text in is tokens in


TASK = """\
task: quire_tiny
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: best
doc_to_choice: answers
target_delimiter: ""
metric_list:
  - metric: acc
metadata:
  version: 1.0
"""


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval: pip install lm_eval[api]")
def test_the_harness(server: Server, tmp_path: Path):
    rows = [{"question": q, "answers": a, "best": b} for q, a, b in QUESTIONS]
    data = tmp_path / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    options = f"model={DEFAULT_MODEL},base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=1"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", options]
    command += ["--tasks", "quire_tiny", "--include_path", str(tmp_path), "--batch_size", "4"]
    command += ["--output_path", str(tmp_path / "out")]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OPENAI_API_KEY": "unused"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(result.read_text())["results"]["quire_tiny"]["acc,none"] >= 0.75
