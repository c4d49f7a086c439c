"""Delta nets: layers that convolve queries, keys and values over a few tokens and fold them into a state for each head.

What such a layer is made of, where its parts lie in the two kinds of file, and how it is computed. A folder keeps its projections
by key head, mixed; a GGUF has the exponential of the decay taken, and in newer files the projections apart. A family puts
NAMES beside its own, and gives the group of states that its layers carry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.backends.batch import Batch
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Layout
from quire.models.parts import MAX_HEAD_DIM, Dims, Weights
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.picked import pick

GGUF_NAMES = {
    "qkvz": "blk.{}.ssm_in",  # of older files
    "z": "blk.{}.attn_gate",
    "ba": "blk.{}.ssm_ba",
    "conv": "blk.{}.ssm_conv1d",
    "delta_norm": "blk.{}.ssm_norm",
    "delta_out": "blk.{}.ssm_out",
}
HF_NAMES = {
    "qkvz": "model.layers.{}.linear_attn.in_proj_qkvz",
    "ba": "model.layers.{}.linear_attn.in_proj_ba",
    "conv": "model.layers.{}.linear_attn.conv1d",
    "delta": "model.layers.{}.linear_attn",
    "delta_norm": "model.layers.{}.linear_attn.norm",
    "delta_out": "model.layers.{}.linear_attn.out_proj",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a delta net."""

    taps: int  # rows that the convolution sees
    key_heads: int
    heads: int  # of values
    key_dim: int
    value_dim: int

    def check(self, where: str) -> Shape:
        if self.heads % self.key_heads:
            raise BadModelFile(f"{where}: {self.heads} value heads cannot share {self.key_heads} key heads evenly")
        if max(self.key_dim, self.value_dim) > MAX_HEAD_DIM or self.taps < 2:
            raise Unsupported(
                f"{where}: delta nets with keys of {self.key_dim} and values of {self.value_dim} numbers over {self.taps} rows "
                "are not supported",
                cure=f"up to {MAX_HEAD_DIM} numbers are, and at least 2 rows",
            )
        return self

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Columns that are convolved."""
        return 2 * self.keys + self.values

    @property
    def seen(self) -> int:
        """Numbers of a state that are rows for the convolution; behind them lie the heads'."""
        return (self.taps - 1) * self.mixed

    @property
    def state(self) -> int:
        """Numbers of a layer's state."""
        return self.seen + self.key_dim * self.values

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Rows of queries, keys, values and gates that belong to one key head."""
        share = self.heads // self.key_heads * self.value_dim
        return self.key_dim, self.key_dim, share, share


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of a delta net."""

    qkv: Layout
    z: Layout
    a: Layout
    b: Layout
    conv: Dense  # [taps * mixed]
    decay: Dense  # [heads], below zero
    bias: Dense  # [heads]
    norm: Dense  # [value_dim]
    out: Layout


def carry(ops: Ops, h: Tensor, batch: Batch, w: DeltaNet, s: Shape, *, layer: int, group: int, eps: float) -> Tensor:
    """The layer over its normalized input; `layer` counts inside the group of states. [T, d] -> [T, d]"""
    z, a, b = ops.linear(h, w.z), ops.linear(h, w.a), ops.linear(h, w.b)
    qkv = ops.conv(ops.linear(h, w.qkv), w.conv, batch, layer=layer, group=group)
    y = ops.delta_rule(
        qkv, a, b, w.decay, w.bias, batch,
        layer=layer, group=group, key_heads=s.key_heads, heads=s.heads, key_dim=s.key_dim, at=s.seen,
    )  # fmt: skip
    return ops.linear(ops.swiglu(z, ops.rms_norm(y, w.norm, eps, heads=s.heads)), w.out)


def delta_net_of(weights: Weights, layer: int, d: Dims, s: Shape) -> DeltaNet:
    """The weights of one."""
    if "z" in weights.names and weights.has("z", layer):
        qkv = weights.matrix("qkv", s.mixed, d.width, layer)
        z = weights.matrix("z", s.values, d.width, layer)
    else:  # for each key head what belongs to it
        each = np.arange(s.mixed + s.values).reshape(s.key_heads, -1)
        q, k, v, gate = (part.reshape(-1) for part in np.split(each, np.cumsum(s.parts)[:3], axis=1))
        qkv, z = rows_of(weights, "qkvz", layer, d.width, np.concatenate([q, k, v]), gate)
    both = np.arange(2 * s.heads).reshape(s.key_heads, 2, -1)
    b, a = rows_of(weights, "ba", layer, d.width, both[:, 0], both[:, 1])
    if "delta" in weights.names:
        log = weights.tensors.vector(weights.name("delta", layer, "A_log"), s.heads)
        decay = Dense(-np.exp(log.dequantize()), "f32")
        bias = weights.tensors.vector(weights.name("delta", layer, "dt_bias"), s.heads)
    else:
        decay = weights.tensors.vector(f"blk.{layer}.ssm_a", s.heads)
        bias = weights.tensors.vector(f"blk.{layer}.ssm_dt.bias", s.heads)
    kernel = (s.mixed, s.taps) if "delta" not in weights.names else (s.mixed, 1, s.taps)
    (conv,) = weights.tensors.cut(
        weights.name("conv", layer),
        kernel,
        lambda w: (Dense(np.ascontiguousarray(w.dequantize().reshape(s.mixed, s.taps).T).reshape(-1), "f32"),),
    )
    assert isinstance(conv, Dense)
    return DeltaNet(
        qkv=qkv,
        z=z,
        a=a,
        b=b,
        conv=conv,
        decay=decay,
        bias=bias,
        norm=weights.norm("delta_norm", s.value_dim, layer),
        out=weights.matrix("delta_out", d.width, s.values, layer),
    )


def rows_of(weights: Weights, role: str, layer: int, k: int, *parts: npt.NDArray[np.intp]) -> tuple[Layout, ...]:
    """Matrices of some rows each of one matrix; together they are all of its rows."""
    shape = sum(part.size for part in parts), k
    return weights.tensors.cut(
        weights.name(role, layer), shape, lambda w: tuple(pick(w, part.reshape(-1)) for part in parts)
    )
