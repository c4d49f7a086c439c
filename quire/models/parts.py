"""What decoder families share: the numbers that each of them has, and its weights by role.

A family's file says what is its own: which roles it has, how its forward goes. From here it takes `Dims`, the names of roles in
the two kinds of file, and `Weights`, which asks for tensors by role and checks at the end that none was left over. How the
numbers are read is in `hf` (config.json) and in `metadata` (GGUF). Nothing here computes, and nothing here knows a family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.backends.outputs import FINAL
from quire.layouts import Dense, Layout, Rope
from quire.models.rope import Scaling, frequencies
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.gguf.file import GGUF

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 256
MAX_CONTEXT = 1 << 26

GGUF_NAMES: dict[str, str] = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "blk.{}.attn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "qkv": "blk.{}.attn_qkv",
    "q_norm": "blk.{}.attn_q_norm",
    "k_norm": "blk.{}.attn_k_norm",
    "o": "blk.{}.attn_output",
    "attn_post_norm": "blk.{}.post_attention_norm",
    "ffn_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "gate_up": "blk.{}.ffn_up",  # both in one matrix, gate first
    "down": "blk.{}.ffn_down",
    "ffn_post_norm": "blk.{}.post_ffw_norm",
}
HF_NAMES: dict[str, str] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "qkv": "model.layers.{}.self_attn.qkv_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "o": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "gate_up": "model.layers.{}.mlp.gate_up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Dims:
    """The numbers of every decoder: what the engine reads of a configuration, and the sizes of its tensors."""

    architecture: str
    vocab_size: int
    context: int  # the longest sequence it was made for
    layers: int
    width: int
    ffn: int  # 0 where no layer has a plain MLP
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """The factor of attention scores, where the family has no other."""
        return 1.0 / math.sqrt(self.head_dim)

    def kv(self, pages: int, page_size: int) -> KV:
        """The pool for keys and values of all its heads."""
        return KV(self.layers, pages, page_size, self.kv_heads, self.head_dim)


def check_heads(where: str, heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises where the heads do not share evenly, or have a size that no backend computes."""
    if heads % kv_heads:
        raise BadModelFile(f"{where}: {heads} heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise Unsupported(
            f"{where}: heads of {head_dim} numbers are not supported", cure=f"8, 16, … {MAX_HEAD_DIM} are"
        )


def rotation(base: float, dim: int, scaling: Scaling, *, pairs: bool, context: int = 0) -> Rope:
    """Rotary positions of the first `dim` columns of a head. context: the longest sequence, which longrope asks for."""
    freq, magnitude = frequencies(base, dim, scaling, context)
    return Rope(frequencies=freq, dim=dim, pairs=pairs, magnitude=magnitude)


class Weights:
    """A model's tensors by role: `names` says what a role is called in this kind of file."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]):
        self.tensors = tensors
        self.names = names
        whole = names["embedding"]
        # A model saved without its head has no `model.` before its names.
        self.bare = not tensors.has(f"{whole}.weight") and tensors.has(f"{whole.removeprefix('model.')}.weight")

    def name(self, role: str, layer: int = 0, kind: str = "weight") -> str:
        name = self.names[role].removeprefix("model.") if self.bare else self.names[role]
        return f"{name.format(layer)}.{kind}"

    def has(self, role: str, layer: int = 0, kind: str = "weight") -> bool:
        return self.tensors.has(self.name(role, layer, kind))

    def matrix(self, role: str, n: int, k: int, layer: int = 0) -> Layout:
        """A weight [n, k]."""
        return self.tensors.matrix(self.name(role, layer), n, k)

    def split(self, role: str, sizes: tuple[int, ...], k: int, layer: int = 0) -> tuple[Layout, ...]:
        """A weight [sum(sizes), k] as matrices of so many rows each: views of it."""
        return self.tensors.split(self.name(role, layer), sizes, k)

    def stack(self, role: str, count: int, n: int, k: int, layer: int = 0) -> tuple[Layout, ...]:
        """A weight [count, n, k] as that many matrices: views of it."""
        return self.tensors.stack(self.name(role, layer), count, n, k)

    def norm(self, role: str, n: int, layer: int = 0, plus: float = 0.0) -> Dense:
        """A norm's weight [n]; `plus` is added to it, where the file keeps what it is more than that."""
        kept = self.tensors.vector(self.name(role, layer), n)
        return kept if plus == 0.0 else Dense(kept.dequantize() + np.float32(plus), "f32")

    def norm_by_head(self, role: str, heads: int, head_dim: int, layer: int = 0) -> Dense:
        """A norm's weight [heads * head_dim] that the file keeps as [heads, head_dim]."""
        return Dense(self.matrix(role, heads, head_dim, layer).dequantize().reshape(-1), "f32")

    def bias(self, role: str, n: int, layer: int, biased: Collection[str] | None) -> Dense | None:
        """A bias [n] for roles in `biased`; without that, whenever the file has one."""
        name = self.name(role, layer, "bias")
        if biased is None:
            return self.tensors.optional_vector(name, n)
        return self.tensors.vector(name, n) if role in biased else None

    def head(self, dims: Dims, embedding: Layout, tied: bool | None) -> Layout:
        """The output matrix: the embedding where the two are tied. None: they are where the file has no other.

        A model saved without a head gets the embedding in its place; `tasks.headless` is how an engine knows not to use it.
        """
        if tied or (not self.has("head") and (tied is None or self.bare)):
            return embedding
        return self.matrix("head", dims.vocab_size, dims.width)


@dataclass(frozen=True, slots=True)
class Attention:
    """The projections of one block's attention."""

    q: Layout
    k: Layout
    v: Layout
    o: Layout
    q_bias: Dense | None = None
    k_bias: Dense | None = None
    v_bias: Dense | None = None
    o_bias: Dense | None = None


def attention_of(weights: Weights, layer: int, d: Dims, biased: Collection[str] | None) -> Attention:
    """q, k, v and o as four matrices. biased: see Weights.bias."""
    return Attention(
        q=weights.matrix("q", d.q_width, d.width, layer),
        k=weights.matrix("k", d.kv_width, d.width, layer),
        v=weights.matrix("v", d.kv_width, d.width, layer),
        o=weights.matrix("o", d.width, d.q_width, layer),
        q_bias=weights.bias("q", d.q_width, layer, biased),
        k_bias=weights.bias("k", d.kv_width, layer, biased),
        v_bias=weights.bias("v", d.kv_width, layer, biased),
        o_bias=weights.bias("o", d.width, layer, biased),
    )


def fused_attention_of(weights: Weights, layer: int, d: Dims, biased: bool | None = False) -> Attention:
    """q, k and v as parts of one matrix. biased: whether they have a bias; None: where the file has one."""
    sizes = (d.q_width, d.kv_width, d.kv_width)
    q, k, v = weights.split("qkv", sizes, d.width, layer)
    o = weights.matrix("o", d.width, d.q_width, layer)
    if not (weights.has("qkv", layer, "bias") if biased is None else biased):
        return Attention(q, k, v, o)
    whole = weights.tensors.vector(weights.name("qkv", layer, "bias"), sum(sizes))
    biases = np.split(whole.data, (d.q_width, d.q_width + d.kv_width))
    return Attention(q, k, v, o, *(Dense(part, whole.dtype) for part in biases))


@dataclass(frozen=True, slots=True)
class Mlp:
    """The projections of one block's gated MLP."""

    gate: Layout
    up: Layout
    down: Layout
    gate_bias: Dense | None = None
    up_bias: Dense | None = None
    down_bias: Dense | None = None


def mlp_of(weights: Weights, layer: int, d: Dims, biased: Collection[str] | None) -> Mlp:
    """gate, up and down as three matrices. biased: see Weights.bias."""
    return Mlp(
        gate=weights.matrix("gate", d.ffn, d.width, layer),
        up=weights.matrix("up", d.ffn, d.width, layer),
        down=weights.matrix("down", d.width, d.ffn, layer),
        gate_bias=weights.bias("gate", d.ffn, layer, biased),
        up_bias=weights.bias("up", d.ffn, layer, biased),
        down_bias=weights.bias("down", d.width, layer, biased),
    )


def fused_mlp_of(weights: Weights, layer: int, d: Dims) -> Mlp:
    """gate and up as the halves of one matrix, without biases."""
    gate, up = weights.split("gate_up", (d.ffn, d.ffn), d.width, layer)
    return Mlp(gate, up, weights.matrix("down", d.width, d.ffn, layer))


def head_rows(ops: Ops, batch: Batch, x: Tensor, layers: int, norm: Dense, eps: float) -> Tensor:
    """The input of the head: the rows `batch.logit_rows` of x, the output of the last layer, after the last norm.

    The norm stands before the rows are taken, so that rows behind it can be kept for every token. Where none are, backends take
    the rows first (backends/early.py).
    """
    ops.mark(x, layers)
    x = ops.rms_norm(x, norm, eps)
    ops.mark(x, FINAL)
    return ops.take(x, batch.logit_rows)


def seen(windows: tuple[int | None, ...], context: int) -> tuple[int | None, ...]:
    """The windows that hide anything of a sequence of that length."""
    return tuple(None if w is None or w >= context else w for w in windows)


def windows_line(windows: tuple[int | None, ...]) -> list[str]:
    """A line for people about layers with an attention window; none where no layer has one."""
    some = [w for w in windows if w is not None]
    if not some:
        return []
    count = "all" if len(some) == len(windows) else f"{len(some)} of {len(windows)}"
    return [f"attention window: {some[0]} tokens in {count} layers"]


def refuse_unknown(
    checkpoint: Folder | GGUF,
    tensors: Tensors,
    d: Dims,
    *,
    tied: bool = False,
    known: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Every tensor must be one that the model uses: one that it does not know means that the weights are of another model.

    `known` are those that a family may leave alone. What was left alone and is worth a word comes back as notes.
    """
    told: list[str] = []
    # Some files carry the frequencies that we compute, or a copy of the embedding where the head is tied to it.
    extra = [n for n in tensors.leftover() if not n.endswith((".rotary_emb.inv_freq", ".attn_rot_embd.weight"))]
    if tied and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        told.append("the file's lm_head.weight is not used: the configuration ties the head to the embedding")
    # Writers of GPTQ files give a bias of zeros to matrices that have none.
    nothing = [n for n in extra if n.endswith(".bias") and not known(n) and not checkpoint.tensor(n).dequantize().any()]
    if nothing:
        extra = [n for n in extra if n not in set(nothing)]
        told.append(f"{len(nothing)} biases in the file are zeros, and not used: {nothing[0]}, …")
    alone = [n for n in extra if known(n)]
    if alone:
        told.append(f"{len(alone)} tensors in the file are not used by this model: {', '.join(alone[:4])}")
    unknown = [n for n in extra if not known(n)]
    if unknown:
        raise BadModelFile(
            f"{checkpoint.file_of(unknown[0])}: tensor {unknown[0]!r} is not one that a {d.architecture} with this "
            f"configuration has ({d.layers} layers); {len(unknown)} of {len(checkpoint.tensors)} tensors are not",
            cure="the configuration and the weights belong to different models, or a setting is missing from it",
        )
    return told


def own_code_line(folder: Folder, d: Dims) -> list[str]:
    """A line for people about a folder that comes with code of its own, which is never run."""
    if "auto_map" not in folder.config:
        return []
    return [f"config.json names code of its own (auto_map), which is not run: as {d.architecture}"]
