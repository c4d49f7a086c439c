"""The op table in capture mode: running a model's forward once over symbols gives the list of instructions to replay.

A `Value` stands for a tensor: its width, and whether it has a row per token or per logit row. The recorder checks shapes
as it goes, so a model with a mistake fails when it is compiled, naming the op. It knows no kernel and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from quire.backends.batch import Batch
from quire.backends.ops import KV, Forward, Tensor
from quire.layouts import Affine, Dense, Layout, Rope
from quire.observe.errors import Unsupported

MAX_HEAD_DIM = 256


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the program. `quant` ones hold int8 groups made from a float tensor."""

    width: int
    per_token: bool = True
    quant: bool = False


@dataclass(slots=True, eq=False)
class Segment:
    """One weight of a linear: out = x @ weight.T (+ bias) (+ residual)."""

    x: Value
    weight: Layout
    bias: Dense | None
    out: Value
    residual: Value | None = None


@dataclass(slots=True, eq=False)
class Instruction:
    """`op` decides which fields mean something; see `backend.emit`. Values are written once, by one instruction."""

    op: str
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    weight: Layout | None = None
    rope: Rope | None = None
    eps: float = 0.0
    heads: int = 0
    layer: int = 0
    scale: float = 0.0
    span: int = 0  # attend: columns of the queries that share a key

    def reads(self) -> list[Value]:
        """Every value it needs."""
        found = list(self.inputs)
        for s in self.segments:
            found.append(s.x)
            if s.residual is not None:
                found.append(s.residual)
        return found

    def writes(self) -> list[Value]:
        """Every value it makes."""
        return [*self.outputs, *(s.out for s in self.segments if self.op == "linear")]


@dataclass(slots=True, eq=False)
class _Index:
    """One of the batch's index arrays, as a symbol."""

    name: str


class _SymbolicBatch:
    """What forward sees of the batch while it is recorded: three names, and nothing to compute with."""

    def __init__(self) -> None:
        self.ids = _Index("ids")
        self.pos = _Index("pos")
        self.logit_rows = _Index("logit_rows")


@dataclass(slots=True)
class Recording:
    """A recorded program."""

    instructions: list[Instruction]
    inputs: dict[str, Value]
    output: Value


class Recorder:
    """Ops whose calls append instructions and return symbols."""

    def __init__(self, kv: KV):
        self._kv = kv
        self._batch = _SymbolicBatch()
        self.instructions: list[Instruction] = []

    def embed(self, ids: Tensor, table: Layout) -> Value:
        self._index(ids, "ids", "embed")
        out = Value(_matrix(table, "embed")[1])
        self.instructions.append(Instruction("embed", outputs=[out], weight=table))
        return out

    def rms_norm(self, x: Tensor, weight: Dense, eps: float) -> Value:
        v = _value(x, "rms_norm")
        _same(weight.shape, (v.width,), "rms_norm: the weight")
        out = Value(v.width, v.per_token)
        self.instructions.append(Instruction("norm", [v], [out], weight=weight, eps=float(eps)))
        return out

    def linear(self, x: Tensor, weight: Layout, bias: Dense | None = None) -> Value:
        v = _value(x, "linear")
        n, k = _matrix(weight, "linear")
        _same((k,), (v.width,), "linear: the weight's columns")
        if bias is not None:
            _same(bias.shape, (n,), "linear: the bias")
        if isinstance(weight, Affine) and k % 32:
            raise Unsupported(f"linear: a quantized weight must have a multiple of 32 columns, not {k}")
        out = Value(n, v.per_token)
        self.instructions.append(Instruction("linear", segments=[Segment(v, weight, bias, out)]))
        return out

    def add(self, a: Tensor, b: Tensor) -> Value:
        return self._pairwise("add", a, b)

    def swiglu(self, gate: Tensor, up: Tensor) -> Value:
        return self._pairwise("swiglu", gate, up)

    def rope(self, x: Tensor, pos: Tensor, rope: Rope, heads: int) -> Value:
        v = _value(x, "rope")
        self._index(pos, "pos", "rope")
        if heads < 1 or v.width % heads or rope.dim > v.width // heads or rope.dim % 2 or not v.per_token:
            raise ValueError(
                f"rope: {heads} heads with {rope.dim} rotated columns do not fit {v.width} columns per token"
            )
        out = Value(v.width)
        self.instructions.append(Instruction("rope", [v], [out], rope=rope, heads=heads))
        return out

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, layer: int, heads: int, scale: float
    ) -> Value:
        kv, values = self._kv, [_value(t, "attention") for t in (q, k, v)]
        if cast(Any, batch) is not self._batch:
            raise ValueError("attention: the batch must be the one that forward was given")
        if kv.page_size != 16 or kv.head_dim % 8 or kv.head_dim > MAX_HEAD_DIM:
            raise Unsupported(
                f"attention: pages of {kv.page_size} tokens and head size {kv.head_dim}; "
                f"supported are pages of 16 and head sizes that are multiples of 8 up to {MAX_HEAD_DIM}"
            )
        if not 0 <= layer < kv.layers or heads < 1 or heads % kv.kv_heads:
            raise ValueError(f"attention: layer {layer} with {heads} heads does not fit {kv}")
        widths = [heads * kv.head_dim, kv.kv_heads * kv.head_dim, kv.kv_heads * kv.head_dim]
        _same(tuple(x.width for x in values), tuple(widths), "attention: q, k and v")
        if not all(x.per_token for x in values):
            raise ValueError("attention: q, k and v must have a row per token")
        out = Value(widths[0])
        self.instructions.append(Instruction("store", values[1:], [], layer=layer))
        span = heads // kv.kv_heads * kv.head_dim
        attend = Instruction("attend", values[:1], [out], layer=layer, heads=heads, scale=float(scale), span=span)
        self.instructions.append(attend)
        return out

    def take(self, x: Tensor, rows: Tensor) -> Value:
        v = _value(x, "take")
        self._index(rows, "logit_rows", "take")
        if not v.per_token:
            raise ValueError("take: the rows have been taken already")
        out = Value(v.width, per_token=False)
        self.instructions.append(Instruction("take", [v], [out]))
        return out

    def _pairwise(self, op: str, a: Tensor, b: Tensor) -> Value:
        x, y = _value(a, op), _value(b, op)
        if x.width != y.width or x.per_token != y.per_token:
            raise ValueError(f"{op}: the two sides have different shapes, {x.width} and {y.width} columns")
        out = Value(x.width, x.per_token)
        self.instructions.append(Instruction(op, [x, y], [out]))
        return out

    def _index(self, given: Tensor, name: str, op: str) -> None:
        if given is not getattr(self._batch, name):
            raise Unsupported(f"{op}: only batch.{name} can be used there")


def record(forward: Forward, kv: KV, inputs: Mapping[str, int]) -> Recording:
    """Run `forward` over symbols. Raises what the ops raise, or ValueError when it does not return a tensor of its own."""
    recorder = Recorder(kv)
    named = {name: Value(width) for name, width in inputs.items()}
    output = _value(forward(recorder, cast(Batch, recorder._batch), named), "the program's result")
    return Recording(recorder.instructions, named, output)


def _value(x: Tensor, what: str) -> Value:
    if not isinstance(x, Value):
        raise TypeError(f"{what}: expected a tensor that an op returned, not {type(x).__name__}")
    return x


def _matrix(layout: Layout, op: str) -> tuple[int, int]:
    if len(layout.shape) != 2:
        raise ValueError(f"{op}: the weight must be a matrix, not of shape {layout.shape}")
    return layout.shape[0], layout.shape[1]


def _same(got: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
    if tuple(got) != tuple(wanted):
        raise ValueError(f"{what} should have shape {wanted}, not {tuple(got)}")
