"""all-MiniLM-L6-v2: the embeddings that sentence-transformers gives, in the library and over HTTP.

Its definition is two lines of transformers: the mean of the last layer's rows, of length 1. The model is not downloaded here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.observe.errors import QuireError
from quire.weights.store.store import Store

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
transformers = pytest.importorskip("transformers", reason="needs transformers: the test extra")

TEXTS = [
    "This is an example sentence",
    "Each sentence is converted",
    "",
    "naïve café, ÅNGSTRÖM: 東京 and Ελλάδα 😀 …",
    "A man is eating food. " * 9,
    "def f(x):\n    return x ** 2  # squares",
    "x",
    "word " * 250,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return Store().resolve("all-minilm:l6-v2")
    except QuireError:
        pytest.skip("needs the model all-minilm:l6-v2: `quire pull all-minilm:l6-v2` fetches it (92 MB)")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        for text in TEXTS:
            given = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
            hidden = model(**given).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(hidden.mean(dim=0), dim=0).numpy())
    return np.stack(rows)


def test_the_library_gives_those_of_sentence_transformers(folder: Path, wanted: np.ndarray):
    with LLM(str(folder), backend="native", threads=2) as llm:
        made = llm.embed(TEXTS)
        alone = np.concatenate([llm.embed(text) for text in TEXTS])
        backwards = llm.embed(TEXTS[::-1])[::-1]
        long = llm.embed("word " * 300, truncate=True)
        with pytest.raises(QuireError, match=r"302 tokens.*256"):
            llm.embed("word " * 300)
    cosines = (made.astype(np.float64) * wanted).sum(axis=1)
    assert cosines.min() > 0.99999
    np.testing.assert_allclose(made, wanted, atol=3e-6)
    assert made.tobytes() == alone.tobytes() == np.ascontiguousarray(backwards).tobytes()
    assert long.shape == (1, 384)


def test_the_server_gives_them_to_openais_client(folder: Path, wanted: np.ndarray):
    import openai

    from tests.e2e.conftest import launch

    server = launch("--name", "minilm", model=str(folder))
    try:
        client: openai.OpenAI = server.client()
        listed = client.embeddings.create(model="minilm", input=TEXTS)  # the client asks for base64
        made = np.array([d.embedding for d in listed.data])
        assert (made * wanted).sum(axis=1).min() > 0.99999
        floats = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
        assert np.allclose(floats.data[0].embedding, made[0], atol=0)
        with pytest.raises(openai.BadRequestError, match="cannot generate"):
            client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="minilm", input="x", dimensions=64)
    finally:
        assert server.stop() == 0


def test_the_command_line(folder: Path):
    def quire(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "quire.cli.main", "embed", str(folder), *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )

    lines = [json.loads(line) for line in quire("-", stdin="a cat\n\na dog\n").stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1] and all(len(line["embedding"]) == 384 for line in lines)
    ranked = quire("bread is food", "Paris is the capital of France", "--query", "What is the capital of France?")
    assert [json.loads(line)["index"] for line in ranked.stdout.splitlines()] == [1, 0]
    table = quire("a cat", "a kitten", "--similarity").stdout.splitlines()
    assert table[1].split()[1] == "1.0000" and len(table) == 3
    wrong = quire("x", "--dimensions", "5")
    assert wrong.returncode == 1 and "384 numbers" in wrong.stderr and "Traceback" not in wrong.stderr
