"""The catalogue's real models: greedy continuations are those of transformers with the same weights, dequantized, in float32.

In float32 token for token. On the native backend each place is held against transformers' logits given the tokens before
it, so that one near tie does not hide what follows it.

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
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import QuireError
from quire.weights.gguf.file import GGUF
from quire.weights.store.store import Store
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
transformers = pytest.importorskip("transformers", reason="needs transformers: the test extra")
gguf = pytest.importorskip("gguf", reason="needs gguf: the test extra")

TOKENS = 24


@dataclass(frozen=True)
class Real:
    """tie: how far behind transformers' best a token may be that the native backend holds for the best, in logits; ties: at how
    many of the places it does, of TOKENS for each prompt. Both are what was found here, rounded up: a change shows."""

    name: str
    prompts: tuple[str, ...]
    tie: float
    ties: int


ENGLISH = ("The three primary colours are", "Once upon a time there was a", "Water boils at")
CODE = ("def fibonacci(n):\n    ", "# Read a file and count its words\nimport ", "SELECT name, count(*) FROM users ")
MODELS = (
    Real("smollm2:135m", ENGLISH, 0.2, 4),
    Real("tinyllama:1.1b", ENGLISH, 0.1, 2),
    Real("qwen2.5-coder:1.5b", CODE, 0.05, 1),
    Real("gemma3:270m", ENGLISH, 0.05, 2),
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
        from tests.readers import Reader

        self.reader = Reader(path)
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


@dataclass
class Continued:
    """What transformers says after a prompt, and its logits where it chose each token: [TOKENS, vocabulary]."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray[Any, Any]


def oracle(path: Path) -> Any:
    """The file in transformers, in float32."""
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
    return model.eval()


def continued(model: Any, prompt: list[int]) -> Continued:
    """Greedy, with transformers' own cache."""
    tokens: list[int] = []
    rows: list[Any] = []
    given, past = prompt, None
    with torch.no_grad():
        for _ in range(TOKENS):
            out = model(input_ids=torch.tensor([given]), past_key_values=past, use_cache=True)
            past, row = out.past_key_values, out.logits[0, -1]
            rows.append(row.numpy())
            given = [int(row.argmax())]
            tokens += given
    logits = np.stack(rows)
    assert np.isfinite(logits).all()
    return Continued(prompt, tokens, logits)


def prompts_of(path: Path, real: Real) -> list[list[int]]:
    with GGUF.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    return [tokenizer.encode(text, add_special=True, parse_special=False) for text in real.prompts]


# The default model has shorter tests: what transformers says after prompts, in test_torch_backend, and how far the native
# backend is from its logits, in test_llama.
@pytest.mark.large
@pytest.mark.parametrize("real", MODELS, ids=lambda m: m.name)
def test_greedy_continuations_are_those_of_transformers(real: Real) -> None:
    """Exactly, where products are computed in float32. The native backend rounds what goes into a product to 8 bits: given
    transformers' own continuation it takes the same token at every place, unless transformers' two best are nearly as likely."""
    path = found(real.name)
    model = oracle(path)
    theirs = [continued(model, ids) for ids in prompts_of(path, real)]
    del model
    gc.collect()
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    exact = {"backend": "torch", "dtype": "float32", "device": "cpu"}
    with LLM(str(path), context=256, kv_memory="256MiB", **exact) as llm:
        answers = llm.generate([c.prompt for c in theirs], greedy)
    assert [list(a.outputs[0].tokens) for a in answers] == [c.tokens for c in theirs]
    gc.collect()
    loaded = Loaded(path, "native", most=128)
    behind: list[float] = []
    for c in theirs:
        chosen = loaded.logits([*c.prompt, *c.tokens[:-1]])[len(c.prompt) - 1 :].argmax(-1)
        behind += (c.logits.max(-1) - c.logits[np.arange(TOKENS), chosen]).tolist()
    ties = sorted(gap for gap in behind if gap > 0)
    print(f"{real.name}: {len(ties)} of {len(behind)} places are ties: {[round(gap, 3) for gap in ties]}")
    assert len(ties) <= real.ties and max(ties, default=0.0) < real.tie, (len(behind), ties)
