"""What a user waits for: the modules that must not be loaded on the way to the first token, or for a short answer.

Each was there once, and cost more than it gave. A module that comes back fails here by name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.models.index import NAMES

ROOT = Path(__file__).resolve().parents[2]
SERVER = {"fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "prometheus_client", "zmq", "httpx"}
WORDS = {"typer", "click", "rich", "difflib", "argparse"}  # of the command line
NETWORK = {
    "urllib.request",
    "http.client",
    "zipfile",
    "configparser",
    "html.parser",
    "quire.weights.download.web",
    "quire.weights.download.fetch",
}
HEAVY = {
    "torch",
    "transformers",
    "triton",
    "safetensors",
    "huggingface_hub",
    "quire.backends.reference.backend",
}
OTHERWISE = {  # for embeddings, folders, guided answers and other kinds of files
    "quire.engine.construction.pooled",
    "quire.runner.pooled",
    "quire.models.pooling",
    "quire.models.reranker",
    "quire.chat.embedder",
    "quire.chat.tools.detect",
    "quire.chat.tools.reader",
    "quire.runner.speculate.ngram",
    "quire.chat.hub",
    "quire.chat.tokenizers.tokenizer_json",
    "quire.chat.tokenizers.spm",
    "quire.weights.folder",
    "quire.weights.packed",
    "quire.weights.safetensors",
    "quire.weights.download.pull",
    "quire.formats.hub",
    "quire.cli.terminal.ui",
    "quire.cli.terminal.conversation",
    "llguidance",
}
MODEL = {
    "numpy",
    "tokenizers",
    "jinja2",
    "asyncio",
    "quire.engine.engine",
    "quire.chat.tokenizers.tokenizer",
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
    ours = sorted(name for name in OTHERWISE if name.startswith("quire."))
    assert [name for name in ours if importlib.util.find_spec(name) is None] == []  # spelled as they are
    assert sorted(loaded & (SERVER | WORDS | NETWORK | HEAVY | OTHERWISE)) == []
    families = {name for name in NAMES if f"quire.models.{name}" in loaded}
    assert families == {"llama", "mixtral"}  # both answer to the name in the file, and the second has to be asked
    assert loaded >= MODEL  # what is looked for is spelled as it is loaded


def test_an_engine_begins_to_load_before_what_only_answers_is_imported():
    code = "import json, sys, quire.llm; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(json.loads(done.stdout))
    assert sorted(loaded & {"asyncio", "jinja2", "tokenizers", "quire.chat.types", "quire.llm.loop"}) == []
    assert loaded >= {"numpy", "quire.engine.construction.build"}


@pytest.mark.parametrize("words", [("list",), ("list", "--known"), ("version",), ("ps", "--json")])
def test_short_answers_load_no_model_code(words: tuple[str, ...], tmp_path: Path):
    said, loaded = modules(*words, QUIRE_HOME=str(tmp_path))  # `ps` asks the servers that it finds in the user's own
    assert said or words == ("list",)
    assert sorted(loaded & (SERVER | WORDS | NETWORK | HEAVY | MODEL)) == []
