"""Engines with quantized weights and caches: tiny random Llamas on the torch backend and on the CUDA one (interpreted where
there is no GPU), held to one another; what is told and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.cases import ragged
from quire.backends.choose import open_backend
from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.types import Request
from quire.models.shapes import load_shape
from quire.observe.errors import BadRequest, Unsupported
from quire.runner.params import SamplingParams
from tests.unit.models import tiny

torch = pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("triton", reason="needs the cuda extra")

ENV = Environment(home=Path("/nowhere"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# ||difference|| / ||logits||. Weights are the same codes; what differs is the rounding of half floats (int4, and int8 up to
# 64 rows), and of rows to e4m3: three bits, 2.6% for each of the nine products in a row, most of it in the last few.
LOGITS = {"int8": 0.01, "int4": 0.01, "fp8": 0.1}


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture
def one_layer(tmp_path: Path) -> str:
    """Each product of every kind, once: in the interpreter a second layer costs as much again and multiplies nothing new."""
    path = tmp_path / "one.json"
    path.write_text(json.dumps({**SHAPE, "num_hidden_layers": 1}))
    return str(path)


def config(path: str, backend: str, **options: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "device": "cpu" if backend == "torch" else DEVICE,
        "dtype": "float16",
        "max_seqs": 4,
        "max_batch_tokens": 96,
        "context": 128,
        "kv_memory": 1 << 20,
    }
    return EngineConfig(path=path, backend=backend, **{"load_format": "dummy", **settings, **options})


def serve(made: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    engine, _ = made
    for i, tokens in enumerate(prompts):
        engine.add(Request(id=str(i), tokens=tokens, sampling=SamplingParams(temperature=0.0, max_tokens=count)))
    heard: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.busy:
        for event in engine.step():
            assert event.error is None, event.error
            heard[event.id] += event.tokens
    engine.close()
    return list(heard.values())


def prompts() -> list[list[int]]:
    return [[(7 * i + 11 * j) % 160 for j in range(n)] for i, n in enumerate((5, 70, 21))]


def logits_of(shape: str, quantize: str, tokens: list[int]) -> np.ndarray:
    """Of every position, by the torch backend, in one step."""
    model: Any = load_shape(shape)[0]
    program = open_backend("torch", device="cpu", dtype="float16", random=True, quantize=quantize).compile(
        model.forward, kv=model.kv(8, 16), max_tokens=128, max_rows=128
    )
    return program.run(ragged([(0, len(tokens), list(range(8)))], np.array(tokens))).copy()


@pytest.mark.parametrize(("kind", "kept"), [pytest.param("int4", "auto", marks=pytest.mark.large), ("fp8", "fp8")])
def test_quantized_engines_agree(one_layer: str, kind: str, kept: str):
    """Prompts of few and of many rows, then decode. A token may differ only where the oracle's logits nearly tie."""
    made = build_engine(config(one_layer, "cuda", quantize=kind, kv_dtype=kept), ENV)
    line = next(line for line in made[1].decisions if line.startswith("quantized"))
    assert f"{kind} (" in line and "MiB" in line and "8 of 9 matrices" in line
    assert made[1].weight_bytes < 0.85 * build_engine(config(one_layer, "torch"), ENV)[1].weight_bytes
    answers = serve(made, prompts(), 2)
    for prompt, answer in zip(prompts(), answers, strict=True):
        assert len(answer) == 2
        seen = logits_of(one_layer, kind, prompt + answer)[len(prompt) - 1 : -1]
        noise = (LOGITS[kind] + (0.05 if kept == "fp8" else 0.0)) * np.linalg.norm(seen, axis=1) / np.sqrt(160)
        for row, token, each in zip(seen, answer, noise, strict=True):
            assert row.max() - row[token] <= 6 * each  # a difference of two, three deviations of each


@pytest.mark.parametrize("kind", LOGITS)
def test_quantized_programs_agree(one_layer: str, kind: str):
    """Logits: a prompt of more than 64 rows, a chunk, and decode rows, over random codes that both have."""
    model: Any = load_shape(one_layer)[0]
    tokens = np.random.default_rng(2).integers(0, 160, 90)
    want = logits_of(one_layer, kind, tokens.tolist())
    program = open_backend("cuda", device=DEVICE, dtype="float16", random=True, quantize=kind).compile(
        model.forward, kv=model.kv(8, 16), max_tokens=128, max_rows=128
    )
    for start, n in ((0, 66), (66, 20), (86, 3), (89, 1)):
        got = program.run(ragged([(start, n, list(range(8)))], tokens[start : start + n]))
        error = np.linalg.norm(got - want[start : start + n]) / np.linalg.norm(want[start : start + n])
        assert error < LOGITS[kind], f"{n} rows: {error:g}"


def test_the_torch_engines_loss_is_the_codes(shape: str):
    """The oracle itself: quantized weights move logits by about the rounding of weights, and no more."""
    tokens = list(range(40, 80))
    plain = logits_of(shape, "none", tokens)
    # The plain engine draws its numbers otherwise, so the oracle is float32 with the codes' own numbers: here only that
    # each kind gives something of the same size, and other numbers than its neighbours.
    seen = {kind: logits_of(shape, kind, tokens) for kind in LOGITS}
    for logits in seen.values():
        assert 0.5 < np.linalg.norm(logits) / np.linalg.norm(plain) < 2.0
    gaps = [np.linalg.norm(seen[k] - seen["int8"]) / np.linalg.norm(seen["int8"]) for k in ("fp8", "int4")]
    assert 0.005 < gaps[0] < 0.15 and gaps[0] < gaps[1] < 0.6


@pytest.mark.parametrize("quantize", ["Q4_1"])
def test_a_files_four_bits_are_kept(tmp_path: Path, quantize: str):
    """Exactly: the same tokens as with the file dequantized, in a fraction of the memory."""
    pytest.importorskip("gguf", reason="needs the test extra: it writes the model file")
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_hidden_layers": 2}
    path = str(tiny.write_gguf(tiny.build(**sizes), tmp_path / "m.gguf", quantize))
    options = {"load_format": "auto", "dtype": "float32"}
    plain = build_engine(config(path, "torch", **options), ENV)
    want = serve(plain, prompts(), 6)
    made = build_engine(config(path, "torch", quantize="keep", **options), ENV)
    assert any("own four-bit codes" in line for line in made[1].decisions)
    # The embedding stays in full: it is no product's.
    assert made[1].weight_bytes < 0.4 * plain[1].weight_bytes
    assert serve(made, prompts(), 6) == want
    if quantize == "Q4_1":  # once is enough in the interpreter
        return
    halves = build_engine(config(path, "torch", **{**options, "dtype": "float16"}), ENV)
    packed = build_engine(config(path, "cuda", **{**options, "dtype": "float16"}, quantize="keep"), ENV)
    assert serve(packed, prompts()[:2], 3) == serve(halves, prompts()[:2], 3)


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_a_cache_of_codes(tmp_path: Path, kept: str):
    """The tokens of the reference engine with the same cache, in half the memory."""
    path = str(tiny.write_gguf(tiny.build(), tmp_path / "m.gguf"))
    sizes: dict[str, Any] = {"max_seqs": 4, "max_batch_tokens": 24, "context": 128, "kv_dtype": kept}
    want = serve(build_engine(EngineConfig(path=path, backend="reference", **sizes), ENV), prompts(), 12)
    made = build_engine(EngineConfig(path=path, backend="torch", device="cpu", **sizes), ENV)
    assert any(f"KV cache: {kept}" in line for line in made[1].decisions)
    assert serve(made, prompts(), 12) == want


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"quantize": "fp5"}, BadRequest, "none, fp8, fp8-block, int8, int4 or keep"),
        ({"quantize": "fp8", "backend": "native"}, Unsupported, "native backend keeps weights as the file has them"),
        ({"quantize": "int4", "backend": "reference"}, Unsupported, "reference backend keeps weights"),
        ({"quantize": "keep", "load_format": "dummy", "backend": "torch"}, Unsupported, "no four-bit codes"),
        ({"quantize": "int4", "backend": "cuda", "device": DEVICE, "deterministic": True}, Unsupported, "same bits"),
        ({"kv_dtype": "fp8", "backend": "cuda", "device": DEVICE, "deterministic": True}, Unsupported, "same bits"),
        ({"kv_dtype": "fp8", "backend": "native"}, Unsupported, "cannot keep K and V as fp8"),
        ({"kv_dtype": "fp9", "backend": "torch"}, BadRequest, "kv_dtype"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], error: type[Exception], why: str):
    path = str(tiny.write_gguf(tiny.build(), tmp_path / "m.gguf"))
    with pytest.raises(error, match=why):
        build_engine(EngineConfig(path=path, context=64, **options), ENV)
