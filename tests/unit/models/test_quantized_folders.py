"""Folders with quantized weights, against transformers on the float32 numbers that the codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.backends.choose import open_backend
from quire.config import Environment
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.checkpoint import open_checkpoint, weight_bytes
from quire.weights.folder import describe
from tests.unit.formats import packers
from tests.unit.formats.test_hub import FP8, PACK, config, ct
from tests.unit.models import folders, mixtures
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 192, "num_hidden_layers": 2}
SMALL = {**PACK, "group_size": 32}
Pack = Callable[[np.ndarray], tuple[dict[str, Any], np.ndarray]]


def _rounded(tensors: dict[str, Any], means: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    return tensors, means.astype(np.float16)


WAYS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "gptq": (lambda w: packers.gptq(w), config("gptq", bits=4, group_size=128, desc_act=False, sym=True)),
    "gptq asym": (lambda w: packers.gptq(w, group=32, sym=False), config("gptq", bits=4, group_size=32)),
    "gptq 8": (lambda w: packers.gptq(w, bits=8, group=64, sym=False), config("gptq", bits=8, group_size=64)),
    "gptq act-order": (
        lambda w: _rounded(*packers.gptq(w, group=64, sym=False, moved=True)),
        config("gptq", bits=4, group_size=64, desc_act=True),
    ),
    "awq": (lambda w: packers.awq(w, group=64), config("awq", bits=4, group_size=64, version="gemm", zero_point=True)),
    "ct": (lambda w: packers.compressed(w, group=32, sym=False, bfloat=True), ct("pack-quantized", **SMALL)),
    "ct int8": (lambda w: packers.int_quantized(w), ct("int-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8 tiles": (
        lambda w: packers.fp8(w, tile=(128, 128), name="weight_scale_inv"),
        config("fp8", weight_block_size=[128, 128], activation_scheme="dynamic"),
    ),
    "fp8 rows": (
        lambda w: packers.fp8(w, tile=None, name="weight_scale"),
        ct("float-quantized", strategy="channel", **FP8),
    ),
}


def save(
    model: Any, path: Path, way: str, keep: tuple[str, ...] = ("lm_head", "embed_tokens", "mlp.gate.", "moe.gate.")
) -> Any:
    """The model as a folder with packed matrices; the model that transformers makes of what they mean comes back."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    pack, how = WAYS[way]
    folders.save(model, path)
    plain = load_file(path / "model.safetensors")
    packed: dict[str, Any] = {}
    for name, value in list(plain.items()):
        if value.dim() != 2 or any(part in name for part in keep):
            packed[name] = value
            continue
        tensors, means = pack(value.float().numpy())
        plain[name] = torch.from_numpy(means.astype(np.float32))
        base = name.removesuffix(".weight")
        for part, t in tensors.items():
            packed[f"{base}.{part}"] = torch.from_numpy(t) if isinstance(t, np.ndarray) else t
    exact = path.parent / f"{path.name}-exact"
    folders.save(model, exact)
    save_file(plain, exact / "model.safetensors", {"format": "pt"})
    save_file({n: t.contiguous() for n, t in packed.items()}, path / "model.safetensors")
    folders.edit(path / "config.json", quantization_config={**how, "modules_to_not_convert": ["lm_head"]})
    return AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32, attn_implementation="eager").eval()


def tokens_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 160, length).tolist()


def apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# What may lie between: keys and values in float16; int8 activations; weights rounded from FP8 to bfloat16.
CLOSE = {"reference": 1e-3, "torch": 1e-3}


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_the_exact_numbers(way: str, backend: str, tmp_path: Path) -> None:
    exact = save(folders.build("qwen2" if way == "awq" else "llama", **SIZES), tmp_path / "m", way)
    loaded, tokens = Loaded(tmp_path / "m", backend, most=64), tokens_of(40)
    with torch.no_grad():
        want = exact(torch.tensor([tokens])).logits[0].numpy()
    got = loaded.logits(tokens, 17)
    assert apart(got, want) < CLOSE.get(backend, 1e-2 if "fp8" in way else 4e-2)


@pytest.mark.parametrize("kind,way", [("qwen3moe", "gptq asym"), ("deepseek3", "fp8 tiles"), ("mixtral", "awq")])
def test_experts_are_packed_one_by_one(kind: str, way: str, tmp_path: Path) -> None:
    changes = {"q_lora_rank": 64, "v_head_dim": 32} if kind == "deepseek3" else {}
    exact = save(mixtures.build(kind, **changes), tmp_path / "m", way)
    tokens = tokens_of(30)
    got = Loaded(tmp_path / "m", "reference", most=64).logits(tokens, 11)
    assert apart(got, mixtures.exact_logits(exact, tokens)) < 1e-3
    native = Loaded(tmp_path / "m", "native", most=64).logits(tokens[:1])
    assert apart(native, mixtures.exact_logits(exact, tokens[:1])) < 6e-2


def test_a_packed_head_and_a_fused_matrix(tmp_path: Path) -> None:
    """Phi-3 keeps q, k and v in one matrix, whose rows are cut; here the head is packed too."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 160, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 512}
    model = Phi3ForCausalLM(Phi3Config(**{k: v for k, v in sizes.items() if k != "head_dim"})).eval()
    for way in ("awq", "fp8 rows"):
        exact = save(model, tmp_path / way, way, keep=("embed_tokens",))
        tokens = tokens_of(20)
        with torch.no_grad():
            want = exact(torch.tensor([tokens])).logits[0].numpy()
        assert apart(Loaded(tmp_path / way, "reference", most=32).logits(tokens), want) < 1e-3


@pytest.mark.parametrize("way", ["gptq", "awq", "fp8 rows", "fp8 tiles"])
def test_torch_keeps_codes_when_asked(way: str, tmp_path: Path) -> None:
    exact = save(folders.build("llama", **SIZES), tmp_path / "m", way)
    tokens = tokens_of(12)
    with torch.no_grad():
        want = exact(torch.tensor([tokens])).logits[0].numpy()
    model = models.load(open_checkpoint(tmp_path / "m"))
    backend = open_backend("torch", device="cpu", dtype="float32", quantize="keep")
    program = backend.compile(model.forward, kv=model.kv(4, 16), max_tokens=32, max_rows=32)
    from quire.backends.cases import single

    got = program.run(single(12, np.array(tokens, np.int32)))
    line = backend.told()[0]  # pyright: ignore[reportAttributeAccessIssue]
    assert "14 of 16 matrices" in line, line
    assert apart(got, want) < (1e-3 if "fp8" in way else 2e-3)  # codes and scales of FP8 are the file's, all of them


def test_what_is_shown_and_told(tmp_path: Path) -> None:
    from quire.config import EngineConfig
    from quire.engine.construction.build import build_engine

    model = folders.build("llama", **SIZES)
    save(model, tmp_path / "m", "fp8 tiles")
    folder = open_checkpoint(tmp_path / "m")
    assert not hasattr(folder, "metadata")
    shown = describe(folder)
    assert shown["parameters"] == sum(p.numel() for p in model.parameters())
    assert "FP8 (e4m3, tiles of 128x128)" in shown["types"]
    assert weight_bytes(folder) < 2 * sum(p.numel() for p in model.parameters())
    env = Environment(home=tmp_path)
    for backend, words in (("native", "held as bfloat16, which rounds"), ("torch", "--quantize keep")):
        made = EngineConfig(str(tmp_path / "m"), backend=backend, device="cpu", max_seqs=2, kv_memory=1 << 20)
        told = "\n".join(build_engine(made, env)[1].decisions)
        assert "weights in the files: FP8" in told and words in told


def test_pages_of_every_part_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.weights.safetensors import Safetensors

    save(folders.build("llama", **SIZES), tmp_path / "m", "gptq")
    given: list[str] = []
    monkeypatch.setattr(Safetensors, "release", lambda self, name: given.append(name))
    model = models.load(open_checkpoint(tmp_path / "m"))
    program = open_backend("native").compile
    program(
        model.forward, kv=model.kv(2, 16), max_tokens=16, max_rows=16, packed=lambda w, done, total: model.release(w)
    )
    parts = {name.rpartition(".")[2] for name in given if ".q_proj." in name}
    assert parts == {"qweight", "qzeros", "scales", "g_idx"} and len(given) == len(set(given))


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no scales": (lambda t: t.pop(f"{Q}.scales"), rf"model.safetensors: tensor '{Q}.scales' is missing"),
    "no codes": (lambda t: t.pop(f"{Q}.qweight"), rf"{Q}.weight' of shape 128x128 is missing"),
    "other rows": (
        lambda t: (
            t.update({f"{Q}.{p}": t[f"{Q}.{p}"][:, :64].contiguous() for p in ("qweight", "scales")})
            or t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:, :8].contiguous()})
        ),
        rf"{Q}.weight' has shape 64x128, but the configuration says 128x128",
    ),
    "a stranger": (lambda t: t.update({"model.extra.scales": torch.ones(2)}), "'model.extra.scales' is not one"),
    "a bias": (lambda t: t.update({f"{Q}.bias": torch.ones(128)}), "q_proj.bias' is not one"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_named(case: str, tmp_path: Path) -> None:
    save(folders.build("llama", **SIZES), tmp_path / "m", "gptq")
    change, words = WRONG[case]
    _edit(tmp_path / "m", change)
    with pytest.raises(BadModelFile, match=words):
        models.load(open_checkpoint(tmp_path / "m"))


def test_biases_of_zeros_are_left_alone_and_told(tmp_path: Path) -> None:
    exact = save(folders.build("llama", **SIZES), tmp_path / "m", "gptq")
    _edit(tmp_path / "m", lambda t: t.update({f"{Q}.bias": torch.zeros(128)}))
    loaded, tokens = Loaded(tmp_path / "m", "reference", most=32), tokens_of(9)
    assert any("1 biases in the file are zeros" in line for line in loaded.model.notes)
    with torch.no_grad():
        assert apart(loaded.logits(tokens), exact(torch.tensor([tokens])).logits[0].numpy()) < 1e-3


def test_settings_beside_the_configuration(tmp_path: Path) -> None:
    """Older GPTQ folders say how they are packed in a file of its own."""
    import json

    exact = save(folders.build("llama", **SIZES), tmp_path / "m", "gptq")
    folders.edit(tmp_path / "m" / "config.json", quantization_config=None)
    settings = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01}
    (tmp_path / "m" / "quantize_config.json").write_text(json.dumps(settings))
    tokens = tokens_of(9)
    with torch.no_grad():
        want = exact(torch.tensor([tokens])).logits[0].numpy()
    assert apart(Loaded(tmp_path / "m", "reference", most=32).logits(tokens), want) < 1e-3


def test_bitsandbytes_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folders.save(folders.build("llama", **SIZES), tmp_path / "m")
    folders.edit(
        tmp_path / "m" / "config.json", quantization_config={"load_in_4bit": True, "quant_method": "bitsandbytes"}
    )
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(Unsupported, match="quantization_config: bitsandbytes"):
        models.load(open_checkpoint(tmp_path / "m"))
