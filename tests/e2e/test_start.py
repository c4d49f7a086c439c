"""What a user waits for: the modules that must not be loaded on the way to the first token, or for a short answer.

Each was there once, and cost more than it gave. A module that comes back fails here by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = {"fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "prometheus_client", "zmq", "httpx"}
WORDS = {"typer", "click", "rich", "difflib", "argparse"}  # of the command line
NETWORK = {
    "urllib.request",
    "http.client",
    "zipfile",
    "configparser",
    "html.parser",
    "quire.weights.web",
    "quire.weights.fetch",
}
HEAVY = {
    "torch",
    "transformers",
    "triton",
    "safetensors",
    "huggingface_hub",
    "quire.backends.reference.backend",
}
MODEL = {
    "numpy",
    "tokenizers",
    "jinja2",
    "asyncio",
    "quire.engine.engine",
    "quire.chat.tokenizer",
    "quire.runner.runner",
}


def modules(*words: str, **environment: str) -> tuple[str, set[str]]:
    """What `quire` says to these words, and the modules it had loaded when it was done."""
    code = (
        "import json, sys\nfrom quire.cli.main import main\n"
        f"sys.argv = ['quire', *{list(words)!r}]\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "print('\\n' + json.dumps(sorted(sys.modules)), end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    said, _, listed = done.stdout.rpartition("\n")
    return said, set(json.loads(listed))


def test_one_answer_loads_nothing_that_it_does_not_need(model_path: Path):
    said, loaded = modules("run", str(model_path), "Say hello.", "--max-tokens", "2", "--context", "256")
    assert said.strip()
    assert sorted(loaded & (SERVER | WORDS | NETWORK | HEAVY)) == []
    assert loaded >= MODEL  # what is looked for is spelled as it is loaded


@pytest.mark.parametrize("words", [("list",), ("list", "--known"), ("version",), ("ps", "--json")])
def test_short_answers_load_no_model_code(words: tuple[str, ...], tmp_path: Path):
    said, loaded = modules(*words, QUIRE_HOME=str(tmp_path))  # `ps` asks the servers that it finds in the user's own
    assert said or words == ("list",)
    assert sorted(loaded & (SERVER | WORDS | NETWORK | HEAVY | MODEL)) == []
