"""The catalogue's real models: greedy continuations are those of transformers with the same weights, dequantized, in float32.

Each token is held against transformers' logits given the tokens before it, so that one near tie does not hide what follows it.

The weights go to transformers through a configuration made here from the file's metadata, dequantized by the gguf package: neither side uses
the other's reading of the file. A model that is not in the store is skipped, saying how to pull it; nothing is downloaded here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.observe.errors import QuireError
from quire.weights.gguf import GGUF
from quire.weights.store import Store

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
transformers = pytest.importorskip("transformers", reason="needs transformers: the test extra")
gguf = pytest.importorskip("gguf", reason="needs gguf: the test extra")

TOKENS = 24
TIE = 0.25  # how far behind the best a token may be that the native backend takes, in logits
TIES = 3  # how many of them may be


@dataclass(frozen=True)
class Real:
    name: str
    prompt: str
    backend: str = "native"


MODELS = (
    Real("smollm2:135m", "The three primary colours are"),
    Real("tinyllama:1.1b", "The three primary colours are"),
    Real("qwen2.5-coder:1.5b", "def fibonacci(n):\n    "),
    Real("gemma3:270m", "The three primary colours are", backend="torch"),
)


def found(name: str) -> Path:
    from quire.models import supported

    try:
        path = Store().resolve(name)
    except QuireError as e:
        pytest.skip(f"needs the model {name}, which is {e.message.removeprefix(name).strip()}: {e.cure}")
    with GGUF.open(path) as file:
        if file.architecture not in supported():
            pytest.skip(f"needs a family for {file.architecture}: there are {', '.join(supported())}")
    return path


class File:
    """A GGUF as the gguf package reads it."""

    def __init__(self, path: Path):
        self.reader = gguf.GGUFReader(str(path))
        self.architecture: str = self["general.architecture"]
        self.tensors = {t.name: t for t in self.reader.tensors}

    def __getitem__(self, key: str) -> Any:
        return self.reader.fields[key].contents()

    def of(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(f"{self.architecture}.{key}")
        return default if field is None else field.contents()

    def weight(self, name: str) -> Any:
        t = self.tensors[name]
        values = gguf.quants.dequantize(t.data, t.tensor_type)
        return torch.from_numpy(np.array(values, np.float32).reshape([int(n) for n in reversed(t.shape)]))


def configuration(file: File) -> Any:
    heads, width = file.of("attention.head_count"), file.of("embedding_length")
    common = {
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": width,
        "intermediate_size": file.of("feed_forward_length"),
        "num_hidden_layers": file.of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.of("attention.head_count_kv"),
        "head_dim": file.of("attention.key_length", width // heads),
        "max_position_embeddings": file.of("context_length"),
        "rms_norm_eps": file.of("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attn_implementation": "eager",
    }
    theta = file.of("rope.freq_base", 10000.0)
    if file.architecture == "gemma3":
        kinds = {"sliding_attention": 10000.0, "full_attention": theta}
        return transformers.Gemma3TextConfig(
            **common,
            sliding_window=file.of("attention.sliding_window"),
            query_pre_attn_scalar=common["head_dim"],
            rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in kinds.items()},
        )
    make = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[file.architecture]
    return make(**common, rope_parameters={"rope_type": "default", "rope_theta": theta})


LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def weights(file: File, config: Any) -> Iterator[tuple[str, Any]]:
    """(transformers' name, tensor) of everything in the file."""
    gemma = file.architecture == "gemma3"
    layer = LAYER | GEMMA if gemma else LAYER
    for name in file.tensors:
        stem, _, kind = name.rpartition(".")
        value = file.weight(name)
        if gemma and stem.endswith("norm"):
            value = value - 1  # the file has what the norm multiplies by, transformers what it adds to one
        if not stem.startswith("blk."):
            yield f"{TOP[stem]}.{kind}", value
            continue
        _, number, role = stem.split(".")
        if file.architecture == "llama" and role in ("attn_q", "attn_k"):
            # The file's rows are paired for rotation as neighbours; transformers pairs the halves of a head.
            heads = config.num_attention_heads if role == "attn_q" else config.num_key_value_heads
            value = value.reshape(heads, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
        yield f"model.layers.{number}.{layer[role]}.{kind}", value


def gaps(path: Path, ids: list[int], made: list[int]) -> list[float]:
    """How far each made token's logit is behind the best one's, given all before it; 0 is the greedy choice."""
    from transformers.initialization import no_init_weights

    file = File(path)
    config = configuration(file)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    state = dict(model.named_parameters())  # each once, tied ones too
    for name, value in weights(file, config):
        state.pop(name).data.copy_(value)
    assert not state, f"weights that the file does not have: {list(state)[:5]}"
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, *made[:-1]]]), use_cache=False).logits[0, len(ids) - 1 :]
        behind = logits.max(-1).values - logits[torch.arange(len(made)), torch.tensor(made)]
    assert torch.isfinite(behind).all()
    return behind.tolist()


@pytest.mark.parametrize(
    "real", [pytest.param(m, id=m.name, marks=[] if m is MODELS[0] else pytest.mark.large) for m in MODELS]
)
def test_greedy_continuations_are_those_of_transformers(real: Real) -> None:
    path = found(real.name)
    options = {"dtype": "float32", "device": "cpu"} if real.backend == "torch" else {}
    with LLM(str(path), backend=real.backend, context=256, kv_memory="256MiB", **options) as llm:  # type: ignore[arg-type]
        answer = llm.generate(real.prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))[0]
        ids, made = list(answer.prompt_tokens), list(answer.outputs[0].tokens)
    gc.collect()
    assert len(made) == TOKENS
    behind = gaps(path, ids, made)
    if real.backend == "torch":
        assert not any(behind), behind
    # The native backend rounds activations to 8 bits: two tokens that are nearly as likely may change places, no others.
    assert max(behind) < TIE and sum(gap > 0 for gap in behind) <= TIES, (answer.text, behind)
