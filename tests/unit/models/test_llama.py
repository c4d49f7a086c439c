"""The Llama family against transformers, on tiny random models and on the default model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.weights.gguf.file import GGUF
from tests.unit.models import recorded, tiny
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")

VARIANTS: dict[str, tuple[dict, dict]] = {
    "plain": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "no-sharing": ({"num_key_value_heads": 6}, {}),
    "one-kv-head": ({"num_key_value_heads": 1}, {}),
    "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, {}),
    "linear": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "yarn": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 10000.0,
            }
        },
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 128,
        },
    ),
}


def llama3_variant() -> tuple[dict, dict]:
    from quire.models.rope import Scaling, frequencies

    parameters = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    plain, _ = frequencies(10000.0, 16, Scaling())
    scaled, _ = frequencies(10000.0, 16, Scaling("llama3", 8.0, 64))
    return {"rope_parameters": parameters}, {"rope_freqs.weight": (plain / scaled).astype(np.float32)}


VARIANTS["llama3"] = llama3_variant()


def exact_logits(model, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_equal(name: str, backend: str, tmp_path: Path):
    """Prompts that cross pages and chunks; the only rounding left is float16 keys and values."""
    changes, extra = VARIANTS[name]
    model = tiny.build(**changes)
    loaded = Loaded(tiny.write_gguf(model, tmp_path / "m.gguf", extra=extra), backend, most=256)
    rng = np.random.default_rng(1)
    for length, chunk in ((1, None), (16, 5), (17, None), (100, 33), (200, 64)):
        tokens = rng.integers(0, 160, length).tolist()
        np.testing.assert_allclose(loaded.logits(tokens, chunk), exact_logits(model, tokens), atol=2e-2, rtol=2e-3)


def test_a_split_file_gives_the_same_logits(tmp_path: Path):
    """As the gguf package splits them."""
    model = tiny.build()
    whole = Loaded(tiny.write_gguf(model, tmp_path / "m.gguf"), "native", most=64)
    tiny.write_gguf(model, tmp_path / "s.gguf", split=9)
    first = sorted(tmp_path.glob("s-*.gguf"))
    assert len(first) == 4
    parts = Loaded(first[0], "native", most=64)
    tokens = np.random.default_rng(2).integers(0, 160, 40).tolist()
    assert parts.logits(tokens, 17).tobytes() == whole.logits(tokens, 17).tobytes()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantized_files_give_what_their_dequantized_weights_give(name: str, tmp_path: Path):
    """The gguf package quantizes and dequantizes; transformers runs the result; the reference backend must agree."""
    import gguf

    model = tiny.build()
    path = tiny.write_gguf(model, tmp_path / "m.gguf", quantize=name)
    kind = gguf.GGMLQuantizationType[name]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                packed = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind).copy()))
    tokens = np.random.default_rng(2).integers(0, 160, 70).tolist()
    expected = exact_logits(model, tokens)
    np.testing.assert_allclose(Loaded(path, "reference", most=128).logits(tokens), expected, atol=2e-2, rtol=2e-3)
    native = Loaded(path, "native", most=128).logits(tokens)
    assert np.abs(native - expected).mean() < 0.02 * expected.std()


def round_activations(model) -> list:
    """Make a transformers model round each product's input to int8 per 32 columns, as the native backend does."""

    def hook(module, args):
        x = args[0]
        grouped = x.reshape(*x.shape[:-1], -1, 32)
        step = grouped.abs().amax(-1, keepdim=True) / 127.0
        rounded = torch.where(step > 0, torch.round(grouped / torch.where(step > 0, step, 1.0)) * step, 0.0)
        return (rounded.reshape(x.shape),)

    return [m.register_forward_pre_hook(hook) for m in model.modules() if isinstance(m, torch.nn.Linear)]


PROMPTS = [
    "Hello",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a land far away, there lived",
    "Bonjour, je m'appelle",
    "こんにちは、世界。今日は",
    "Ω ≈ 3.14 — naïve café 🎉🎉",
    "<|im_start|>user\nWhat is the boiling point of water?<|im_end|>\n<|im_start|>assistant\n",
    "   leading and   doubled   spaces\n\n\n\tand tabs",
    "To be, or not to be, that is the question:",
    "SELECT name, count(*) FROM users WHERE age > 21 GROUP BY",
    "Dear Sir or Madam,\n\nI am writing to",
    '{"name": "Ada", "born": 1815, "fields": [',
    "A" * 50,
    "The quick brown fox jumps over the lazy dog. " * 4,
    "In mathematics, a prime number is a natural number greater than one. " * 4,
    "one two three four five six seven eight nine ten " * 8,
    "Water boils at 100 degrees Celsius at sea level, and freezes at zero. " * 5,
    "It was the best of times, it was the worst of times. " * 32,
    "x = x + 1; " * 20,
]


@pytest.fixture(scope="module")
def oracle(model_path: Path):
    """The default model in transformers, on weights dequantized by the gguf package."""
    return tiny.from_gguf(model_path)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    with GGUF.open(model_path) as gguf:
        return Tokenizer.from_gguf(gguf.metadata)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text, add_special=False, parse_special=True) for text in PROMPTS]


@pytest.fixture(scope="module")
def exact(oracle, prompts: list[list[int]]) -> list[np.ndarray]:
    """What transformers says of each prompt."""
    return [exact_logits(oracle, tokens) for tokens in prompts]


def test_default_model_reference_agrees_with_transformers(model_path: Path, exact, prompts):
    """Exact weights, float32 sums: only the float16 cache differs."""
    loaded = Loaded(model_path, "reference")
    for tokens, expected in list(zip(prompts, exact, strict=True))[:10:2]:
        error = np.abs(loaded.logits(tokens) - expected)
        assert error.max() < 0.05, f"{len(tokens)} tokens: {error.max()}"


@pytest.mark.large  # who uses them computes the same by other means, and would differ
def test_what_is_written_down_of_transformers_is_what_it_says(oracle, tokenizer: Tokenizer):
    for text, want in recorded.CONTINUATIONS.items():
        prompt = tokenizer.encode(text, add_special=False, parse_special=False)
        assert recorded.continuation(oracle, prompt) == want and len(want) == recorded.TOKENS
    tokens = tokenizer.encode(recorded.TEXT, add_special=False, parse_special=False)[: recorded.READ]
    found = recorded.perplexity(oracle, tokens, recorded.CONTEXT, recorded.STRIDE)
    assert found == pytest.approx(recorded.PERPLEXITY, rel=1e-4)


def test_default_model_native_agrees_with_transformers(model_path: Path, oracle, prompts, exact):
    """Over 21 prompts, the error is what rounding activations to int8 costs, measured on transformers itself.

    The two roundings part ways after a few layers (one flipped rounding makes more), so they are compared as noise:
    equal power over all prompts, and never far above it for one.
    """
    loaded = Loaded(model_path, "native")
    hooks = round_activations(oracle)
    try:
        rounded = [exact_logits(oracle, tokens) for tokens in prompts]
    finally:
        for hook in hooks:
            hook.remove()
    lengths = sorted({len(tokens) for tokens in prompts})
    assert len(prompts) >= 20 and lengths[0] == 1 and lengths[-1] > 400
    ours, explained, agreed, total = [], [], 0, 0
    for tokens, expected, noisy in zip(prompts, exact, rounded, strict=True):
        got = loaded.logits(tokens)
        ours.append(np.mean((got - expected) ** 2))
        explained.append(np.mean((noisy - expected) ** 2))
        agreed += int((got.argmax(-1) == expected.argmax(-1)).sum())
        total += len(tokens)
    for tokens, error, noise in zip(prompts, ours, explained, strict=True):
        # A short prompt is one throw of the dice for either rounding: its own noise may be small by luck.
        assert error < 4 * max(noise, np.mean(explained)), f"{len(tokens)} tokens: {error} against {noise}"
    assert np.mean(ours) < 1.3 * np.mean(explained)
    assert agreed / total > 0.98
