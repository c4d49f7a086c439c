"""BERT, RoBERTa and DistilBERT (MiniLM, E5, BGE, …): encoders. Every token sees the whole text, and nothing is cached.

What comes out are rows, which the pooling makes an embedding; with a classifier of one label (a cross-encoder), the row of
the first token becomes a score, on the host. Position and token type are added to a word as one row of a table that lies on
the host too, and comes as the input `positions`. A pooler that nothing asks for, and heads that predict words, are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.batch import I32, Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.backends.outputs import FINAL
from quire.layouts import Dense, Floats, Layout
from quire.models import hf, metadata
from quire.models.parts import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    Attention,
    Dims,
    Weights,
    attention_of,
    check_heads,
    own_code_line,
    refuse_unknown,
)
from quire.models.pooling import ScoreHead, activation_of
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder

ARCHS = ("bert",)
_KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_ROBERTA = ("Roberta", "XLMRoberta", "Camembert")
HF_ARCHS = tuple(prefix + kind for prefix in ("Bert", *_ROBERTA, "DistilBert") for kind in _KINDS)

_LAYER = "encoder.layer.{}."
NAMES = {
    "embedding": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "type": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "q": _LAYER + "attention.self.query",
    "k": _LAYER + "attention.self.key",
    "v": _LAYER + "attention.self.value",
    "o": _LAYER + "attention.output.dense",
    "attn_norm": _LAYER + "attention.output.LayerNorm",
    "up": _LAYER + "intermediate.dense",
    "down": _LAYER + "output.dense",
    "ffn_norm": _LAYER + "output.LayerNorm",
}
_DISTIL = "transformer.layer.{}."
DISTIL_NAMES = {
    **{role: NAMES[role] for role in ("embedding", "position", "norm")},
    "q": _DISTIL + "attention.q_lin",
    "k": _DISTIL + "attention.k_lin",
    "v": _DISTIL + "attention.v_lin",
    "o": _DISTIL + "attention.out_lin",
    "attn_norm": _DISTIL + "sa_layer_norm",
    "up": _DISTIL + "ffn.lin1",
    "down": _DISTIL + "ffn.lin2",
    "ffn_norm": _DISTIL + "output_layer_norm",
}
GGUF_NAMES = {
    "embedding": "token_embd",
    "position": "position_embd",
    "type": "token_types",
    "norm": "token_embd_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "o": "blk.{}.attn_output",
    "attn_norm": "blk.{}.attn_output_norm",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "ffn_norm": "blk.{}.layer_output_norm",
}


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm with its bias."""

    weight: Dense
    bias: Dense


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block. Its norms come after what they norm."""

    attn: Attention
    attn_norm: Norm
    up: Layout
    up_bias: Dense
    down: Layout
    down_bias: Dense
    ffn_norm: Norm


class Model:
    """An encoder: its configuration, its weights and its forward. `head` makes a score of a row, where the file has one."""

    def __init__(self, dims: Dims, weights: Weights, types: int, skip: int = 0):
        """types: kinds of token; skip: rows of the position table before that of the first token."""
        self.config = d = dims
        self.notes: list[str] = []
        self.head: ScoreHead | None = None
        self.separators = 2 if skip else 1  # between two texts
        self.tensors = weights.tensors
        self.embedding = weights.matrix("embedding", d.vocab_size, d.width)
        self.positions = self._table(weights, types, skip)
        self.norm = _norm(weights, "norm", d.width)
        self.layers = [_layer(weights, i, d) for i in range(d.layers)]

    @classmethod
    def from_hf(cls, folder: Folder) -> Model:
        config, tensors = folder.config, Tensors(folder)
        distil = folder.architecture.startswith("DistilBert")
        hf.check_activation(config, "activation" if distil else "hidden_act", ("gelu",))
        hf.refuse(config, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
        roberta = folder.architecture.startswith(_ROBERTA)
        rows, pad = config.count("max_position_embeddings", most=MAX_CONTEXT), config.raw.get("pad_token_id", 1)
        if roberta and not (type(pad) is int and 0 <= pad < rows - 1):
            raise BadModelFile(f"{config.where}: pad_token_id is {str(pad)[:40]}: that leaves no positions of {rows}")
        skip = pad + 1 if roberta else 0  # RoBERTa's first position is the one after its padding token's number
        if distil:
            d, names, types = _distil_dims(folder, rows), DISTIL_NAMES, 0
        else:
            d = hf.dims_of(config, folder.architecture, context=rows - skip, eps=("layer_norm_eps", 1e-12))
            names, types = NAMES, config.count("type_vocab_size", 2, most=16)
        prefixes = ("", "bert.", "roberta.", "distilbert.")
        prefix = next((p for p in prefixes if tensors.has(f"{p}{NAMES['embedding']}.weight")), "")
        weights = Weights(tensors, {role: prefix + name for role, name in names.items()})
        model = cls(d, weights, types, skip)
        if folder.architecture.endswith("ForSequenceClassification"):
            model.head = _head(folder, tensors, prefix, d)
        idle = ("pooler.", "embeddings.position_ids", "cls.", "lm_head.", "vocab_")
        model.notes += refuse_unknown(folder, tensors, d, known=lambda n: n.removeprefix(prefix).startswith(idle))
        model.notes += own_code_line(folder, d)
        return model

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        if keys.flag("attention.causal", False):
            raise Unsupported(f"{gguf.path}: a causal {keys.arch} is not supported")
        d = metadata.dims_of(keys, eps="attention.layer_norm_epsilon")
        types = gguf.tensors["token_types.weight"].shape[0] if tensors.has("token_types.weight") else 0
        model = cls(d, Weights(tensors, GGUF_NAMES), types)
        model.notes += refuse_unknown(gguf, tensors, d, known=lambda n: n.startswith("cls."))
        return model

    def _table(self, weights: Weights, types: int, skip: int) -> Floats:
        """The token type and position embeddings, summed: what is added to each word's embedding, [types, context, width]."""
        d = self.config
        position = weights.matrix("position", d.context + skip, d.width)
        table = position.dequantize()[skip:][None]
        self.tensors.release(position)
        if types:
            kinds = weights.matrix("type", types, d.width)
            table = table + kinds.dequantize()[:, None]
            self.tensors.release(kinds)
        return np.ascontiguousarray(table)

    @property
    def inputs(self) -> dict[str, int]:
        """The width of each input of `hidden`."""
        return {"positions": self.config.width}

    def given(self, pos: I32, second: I32) -> dict[str, Floats]:
        """The inputs for tokens at those positions; second: 1 for a token of the second of two texts, else 0."""
        kinds = np.minimum(second, len(self.positions) - 1)  # a model with one kind does not tell them apart
        return {"positions": self.positions[kinds, pos]}

    def kv(self, pages: int, page_size: int) -> KV:
        """An encoder keeps no KV cache: the smallest pool there is."""
        return KV(1, pages, page_size, 1, 8)

    def release(self, layout: Layout) -> None:
        self.tensors.release(layout)

    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows batch.logit_rows of the last layer."""
        c = self.config
        x = ops.add(ops.embed(batch.ids, self.embedding), inputs["positions"])  # [T, d]
        x = ops.layer_norm(x, self.norm.weight, self.norm.bias, c.eps)
        for i, w in enumerate(self.layers):
            ops.mark(x, i)
            a = w.attn
            q, k, v = ops.linear(x, a.q, a.q_bias), ops.linear(x, a.k, a.k_bias), ops.linear(x, a.v, a.v_bias)
            h = ops.encode(q, k, v, batch, heads=c.heads, scale=c.scale)
            h = ops.add(x, ops.linear(h, a.o, a.o_bias))
            x = ops.layer_norm(h, w.attn_norm.weight, w.attn_norm.bias, c.eps)
            h = ops.linear(ops.gelu(ops.linear(x, w.up, w.up_bias)), w.down, w.down_bias)
            x = ops.layer_norm(ops.add(x, h), w.ffn_norm.weight, w.ffn_norm.bias, c.eps)
        ops.mark(x, FINAL)  # the last layer ends with a norm
        return ops.take(x, batch.logit_rows)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        raise Unsupported(f"a {self.config.architecture} cannot generate text: it reads", cure="use it for embeddings")


def _layer(weights: Weights, i: int, d: Dims) -> Layer:
    def bias(role: str, n: int) -> Dense:
        return weights.tensors.vector(weights.name(role, i, "bias"), n)

    return Layer(
        attn=attention_of(weights, i, d, ("q", "k", "v", "o")),
        attn_norm=_norm(weights, "attn_norm", d.width, i),
        up=weights.matrix("up", d.ffn, d.width, i),
        up_bias=bias("up", d.ffn),
        down=weights.matrix("down", d.width, d.ffn, i),
        down_bias=bias("down", d.width),
        ffn_norm=_norm(weights, "ffn_norm", d.width, i),
    )


def _norm(weights: Weights, role: str, n: int, layer: int = 0) -> Norm:
    # The oldest files call the two gamma and beta.
    old = weights.has(role, layer, "gamma")
    names = (weights.name(role, layer, kind) for kind in (("gamma", "beta") if old else ("weight", "bias")))
    return Norm(*(weights.tensors.vector(name, n) for name in names))


def _distil_dims(folder: Folder, context: int) -> Dims:
    """DistilBERT's configuration has names of its own."""
    config = folder.config
    heads, width = config.count("n_heads", most=MAX_HEADS), config.count("dim")
    check_heads(config.where, heads, heads, max(1, width // heads))
    return Dims(
        architecture=folder.architecture,
        vocab_size=config.count("vocab_size"),
        context=context,
        layers=config.count("n_layers", most=MAX_LAYERS),
        width=width,
        ffn=config.count("hidden_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        eps=1e-12,
    )


def _head(folder: Folder, tensors: Tensors, prefix: str, d: Dims) -> ScoreHead:
    """The classifier of a cross-encoder: BERT's goes through the pooler, the others' have a layer of their own."""
    config = folder.config
    hf.one_label(config)
    if distil := folder.architecture.startswith("DistilBert"):
        dense, out = "pre_classifier", "classifier"
    elif folder.architecture.startswith(_ROBERTA):
        dense, out = "classifier.dense", "classifier.out_proj"
    else:
        dense, out = f"{prefix}pooler.dense", "classifier"
    return ScoreHead(
        dense=tensors.matrix(f"{dense}.weight", d.width, d.width).dequantize(),
        dense_bias=tensors.vector(f"{dense}.bias", d.width).dequantize(),
        weight=tensors.matrix(f"{out}.weight", 1, d.width).dequantize(),
        bias=tensors.vector(f"{out}.bias", 1).dequantize(),
        sigmoid=activation_of(config),
        relu=distil,
    )
