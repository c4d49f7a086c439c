"""LoRA adapters against transformers + peft, on every backend, whichever of the two kinds of file they and the model come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.observe.errors import BadModelFile, BadRequest
from tests.unit.models import adapters, families, folders, tiny
from tests.unit.models.adapters import EVERY, FUSED, Adapted

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")
pytest.importorskip("peft", reason="needs the test extra: peft is the independent implementation")

TOKENS = np.random.default_rng(5).integers(3, 120, 45).tolist()


def exact(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def close(got: np.ndarray, want: np.ndarray, share: float = 8e-3) -> None:
    """What is left is rounding keys and values to float16; adapters make them larger."""
    assert got.shape == want.shape
    assert np.abs(got - want).max() < share * want.std(), f"{np.abs(got - want).max() / want.std():.1e}"


def differs(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() > 0.1 * a.std(), "the adapter does nothing that could be seen"


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3"])
def test_logits_are_those_of_peft(name: str, backend: str, tmp_path: Path):
    """Whole prompts and chunks, with the adapter and without; phi3 keeps q, k and v in one matrix, and gate and up."""
    model = tiny.build() if name == "llama" else families.build(name)
    path = folders.save(model, tmp_path / "m")
    tuned = adapters.save(model, tmp_path / "a", FUSED if name == "phi3" else EVERY)
    loaded = Adapted(path, [tmp_path / "a"], backend)
    want, base = exact(tuned, TOKENS), exact(model, TOKENS)
    differs(want, base)
    close(loaded.logits(TOKENS, 0), want)
    close(loaded.logits(TOKENS, 0, chunk=7), want)
    close(loaded.logits(TOKENS, -1), base)


@pytest.mark.parametrize(
    ("targets", "settings"),
    [
        (("q_proj",), {}),
        (("k_proj", "up_proj"), {"use_rslora": True}),
        (("gate_proj", "o_proj"), {"rank_pattern": {"o_proj": 12}, "alpha_pattern": {"layers.1.mlp.gate_proj": 3}}),
        (("v_proj", "down_proj", "lm_head"), {"r": 20}),
        (EVERY, {"dtype": "bfloat16"}),
        (EVERY, {"dtype": "float16"}),
    ],
    ids=["q", "k and up, rslora", "patterns", "v, down and head", "bfloat16", "float16"],
)
def test_some_modules_and_other_scales(targets: tuple[str, ...], settings: dict[str, Any], tmp_path: Path):
    model = tiny.build(num_hidden_layers=2, tie_word_embeddings=False)
    path = folders.save(model, tmp_path / "m")
    dtype = settings.pop("dtype", None)
    tuned = adapters.save(model, tmp_path / "a", targets, **settings, dtype=dtype and getattr(torch, dtype))
    want = exact(tuned, TOKENS)
    differs(want, exact(model, TOKENS))
    close(Adapted(path, [tmp_path / "a"], "native").logits(TOKENS, 0), want)


@pytest.mark.parametrize("name", ["llama", "granite", "qwen3"])
@pytest.mark.parametrize("adapter", ["peft", "gguf"])
@pytest.mark.parametrize("base", ["folder", "gguf"])
def test_either_kind_of_adapter_fits_either_kind_of_model(name: str, adapter: str, base: str, tmp_path: Path):
    """A GGUF of the Llama kind has the rows of queries and keys in another order; one of Qwen3 has not."""
    model = tiny.build() if name == "llama" else families.build(name)
    tuned = adapters.save(model, tmp_path / "a")
    if base == "folder":
        path = folders.save(model, tmp_path / "m")
    elif name == "llama":
        path = tiny.write_gguf(model, tmp_path / "m.gguf")
    else:
        path = families.write_gguf(name, model, tmp_path / "m.gguf")
    given = tmp_path / "a"
    if adapter == "gguf":
        given = adapters.convert(model, tmp_path / "a", tmp_path / "a.gguf", name, pairs=name != "qwen3")
    close(Adapted(path, [given], "reference").logits(TOKENS[:20], 0), exact(tuned, TOKENS[:20]))


@pytest.mark.parametrize("quantize", [None, "Q8_0"])
def test_a_row_gets_the_same_bits_in_any_mixture(quantize: str | None, tmp_path: Path):
    """Three adapters of different ranks and none, prompts and single rows, in one step and alone, with one thread and two."""
    model = tiny.build(hidden_size=128, num_attention_heads=4, intermediate_size=192)
    path = tiny.write_gguf(model, tmp_path / "m.gguf", quantize)
    given = [tmp_path / f"a{i}" for i in range(3)]
    for i, (r, targets) in enumerate([(4, EVERY), (16, EVERY), (33, ("q_proj", "down_proj"))]):
        adapters.save(model, given[i], targets, r=r, seed=i)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(3, 120, n).tolist() for n in (20, 1, 33, 7, 17)]
    slots = [0, 2, -1, 1, 0]
    alone = []
    for threads in (1, 2):
        loaded = Adapted(path, given, "native", threads=threads)
        alone.append([loaded.logits(p, s) for p, s in zip(prompts, slots, strict=True)])
    for one, two in zip(*alone, strict=True):
        np.testing.assert_array_equal(one, two)
    pages = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(5)]
    first = loaded.mixed([(0, p[:-1], s, at) for p, s, at in zip(prompts, slots, pages, strict=True) if len(p) > 1])
    last = loaded.mixed([(len(p) - 1, p[-1:], s, at) for p, s, at in zip(prompts, slots, pages, strict=True)])
    begun = iter(first)
    for p, end, want in zip(prompts, last, alone[0], strict=True):
        got = np.concatenate([next(begun), end]) if len(p) > 1 else end
        np.testing.assert_array_equal(got, want)
    others = [loaded.logits(prompts[0], s) for s in (-1, 0, 1, 2)]
    for a in range(4):
        for b in range(a):
            differs(others[a], others[b])


def test_a_program_with_targets_gives_a_plain_row_the_bits_of_one_without(tmp_path: Path):
    from tests.unit.models.programs import Loaded

    path = tiny.write_gguf(tiny.build(hidden_size=128, num_attention_heads=4), tmp_path / "m.gguf", "Q8_0")
    with_targets = Adapted(path, [], "native", most=64).logits(TOKENS, -1, 9)
    np.testing.assert_array_equal(with_targets, Loaded(path, "native", most=64).logits(TOKENS, 9))


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_slots_are_filled_cleared_and_filled_again(backend: str, tmp_path: Path):
    model = tiny.build(num_hidden_layers=2)
    path = folders.save(model, tmp_path / "m")
    first = adapters.save(model, tmp_path / "a", r=4)
    second = adapters.save(model, tmp_path / "b", ("q_proj", "up_proj"), r=24, seed=1)
    loaded = Adapted(path, [tmp_path / "a"], backend)
    before = loaded.logits(TOKENS, -1)
    fit = loaded.targets.fit
    from quire.weights.adapters.read import open_adapter

    loaded.program.place(0, fit(open_adapter(tmp_path / "b")))  # other targets than before: what is left out is gone
    close(loaded.logits(TOKENS, 0), exact(second, TOKENS))
    loaded.program.place(0, {})
    np.testing.assert_array_equal(loaded.logits(TOKENS, 0), before)
    loaded.program.place(0, fit(open_adapter(tmp_path / "a")))
    close(loaded.logits(TOKENS, 0), exact(first, TOKENS))


def test_an_adapter_of_another_model_is_refused_with_the_numbers(tmp_path: Path):
    model, other = tiny.build(num_hidden_layers=2), tiny.build(num_hidden_layers=2, intermediate_size=160)
    path = folders.save(model, tmp_path / "m")
    adapters.save(other, tmp_path / "wide", ("up_proj",))
    with pytest.raises(BadModelFile, match=r"up_proj\.lora_B\.weight.* 160x4.*\d+ rows: \d+x4 is needed"):
        Adapted(path, [tmp_path / "wide"], "reference")
    adapters.save(tiny.build(num_hidden_layers=3), tmp_path / "deep", ("up_proj",))
    with pytest.raises(BadModelFile, match=r"layers\.2\.mlp\.up_proj.*no module of this model.*q_proj"):
        Adapted(path, [tmp_path / "deep"], "reference")
    adapters.save(model, tmp_path / "high", ("up_proj",), r=65)
    with pytest.raises(BadRequest, match=r"rank is 65, and at most 64.*--max-lora-rank 65"):
        Adapted(path, [tmp_path / "high"], "reference")
