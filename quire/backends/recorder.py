"""The op table in capture mode: running a model's forward once over symbols gives the list of instructions to replay.

A `Value` stands for a tensor: its width, and whether it has a row per token or per logit row. The recorder checks shapes
as it goes, so a model with a mistake fails when it is compiled, naming the op. It knows no kernel and no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from quire.backends.adapters import Target
from quire.backends.batch import Batch
from quire.backends.elementwise import Elementwise, ElementwiseOps
from quire.backends.ops import KV, Forward, Tensor
from quire.backends.outputs import Hidden, check_keep
from quire.layouts import Affine, Dense, Experts, Layout, Rope, Routing
from quire.observe.errors import Unsupported

MAX_HEAD_DIM = 256


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the program. `quant` ones hold groups of integers made from a float tensor, of so many bytes: 1 or 2."""

    width: int
    per_token: bool = True
    quant: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """One weight of a linear: out = x @ weight.T (+ bias) (+ residual)."""

    x: Value
    weight: Layout
    bias: Dense | None
    out: Value
    residual: Value | None = None
    target: Target | None = None  # where adapters add to it
    shrunk: Value | None = None  # what a backend keeps for that


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
    group: int = 0  # of the KV pools; layers count inside it
    scale: float = 0.0
    span: int = 0  # attend: columns of the queries that share a key
    bias: Dense | None = None  # layer_norm
    window: int = 0  # attend; 0: everything
    cap: float = 0.0  # attend; 0: none
    wanted: bool = False  # attend: of its result, logit rows alone are read
    experts: Experts | None = None
    routing: Routing | None = None
    at: int = 0  # conv and delta_rule: where in a layer's state its part begins
    key_heads: int = 0  # delta_rule
    key_dim: int = 0
    targets: list[Target] = field(default_factory=list)  # adapt: one
    elementwise: Elementwise | None = None  # what it is; of a fused `gated`, the activation
    number: float = 0.0  # of an elementwise op that takes one
    hidden: Hidden | None = None  # keep: what its input is asked for as

    def reads(self) -> list[Value]:
        """Every value it needs."""
        found = list(self.inputs)
        for s in self.segments:
            found.append(s.x)
            if s.residual is not None:
                found.append(s.residual)
            if s.shrunk is not None:
                found.append(s.shrunk)
        return found

    def weights(self) -> list[Layout]:
        """Every weight it uses."""
        found: list[Layout | None] = [self.weight, self.bias]
        for s in self.segments:
            found += [s.weight, s.bias]
        if self.experts is not None:
            found += self.experts.weights()
        if self.routing is not None:
            found.append(self.routing.bias)
        return [w for w in found if w is not None]

    def writes(self) -> list[Value]:
        """Every value it makes."""
        return [*self.outputs, *(s.out for s in self.segments if self.op == "linear")]


@dataclass(slots=True, eq=False)
class _Index:
    """One of the batch's index arrays, as a symbol."""

    name: str


class _SymbolicBatch:
    """What forward sees of the batch while it is recorded: its names, and nothing to compute with."""

    def __init__(self) -> None:
        self.ids = _Index("ids")
        self.pos = _Index("pos")
        self.logit_rows = _Index("logit_rows")
        self.adapters = _Index("adapters")
        self.taken_adapters = _Index("taken_adapters")


@dataclass(slots=True)
class Recording:
    """A recorded program."""

    instructions: list[Instruction]
    inputs: dict[str, Value]
    output: Value


class Recorder(ElementwiseOps):
    """Ops whose calls append instructions and return symbols."""

    def __init__(self, kv: KV, keep: Sequence[Hidden] = ()):
        self._kv = kv
        self._keep = keep
        self.marked: set[int] = set()
        self._batch = _SymbolicBatch()
        self.instructions: list[Instruction] = []

    def embed(self, ids: Tensor, table: Layout) -> Value:
        self._index(ids, "ids", "embed")
        out = Value(_matrix(table, "embed")[1])
        self.instructions.append(Instruction("embed", outputs=[out], weight=table))
        return out

    def rms_norm(self, x: Tensor, weight: Dense, eps: float, heads: int = 1) -> Value:
        v = self._normed("rms_norm", x, weight, heads)
        out = Value(v.width, v.per_token)
        self.instructions.append(Instruction("norm", [v], [out], weight=weight, eps=float(eps), heads=heads))
        return out

    def layer_norm(self, x: Tensor, weight: Dense, bias: Dense | None, eps: float, heads: int = 1) -> Value:
        v = self._normed("layer_norm", x, weight, heads)
        if bias is not None:
            _same(bias.shape, weight.shape, "layer_norm: the bias")
        out = Value(v.width, v.per_token)
        made = Instruction("layer_norm", [v], [out], weight=weight, eps=float(eps), heads=heads, bias=bias)
        self.instructions.append(made)
        return out

    def _normed(self, op: str, x: Tensor, weight: Dense, heads: int) -> Value:
        v = _value(x, op)
        if heads < 1 or v.width % heads:
            raise ValueError(f"{op}: {v.width} columns are not {heads} equal parts")
        if weight.shape != (v.width,):
            _same(weight.shape, (v.width // heads,), f"{op}: the weight")
        return v

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

    def adapt(self, y: Tensor, x: Tensor, rows: Tensor, target: Target) -> Value:
        v, w = _value(y, "adapt"), _value(x, "adapt")
        _same((v.width, w.width), (target.n, target.k), f"adapt: y and x of {target.name}")
        if v.per_token != w.per_token:
            raise ValueError("adapt: y and x are not of the same rows")
        self._index(rows, "adapters" if v.per_token else "taken_adapters", "adapt")
        out = Value(v.width, v.per_token)
        self.instructions.append(Instruction("adapt", [v, w], [out], targets=[target]))
        return out

    def elementwise(self, op: Elementwise, *inputs: Tensor, number: float = 0.0) -> Value:
        values = [_value(x, op.name) for x in inputs]
        first = values[0]
        if any(v.width != first.width or v.per_token != first.per_token for v in values):
            shown = " and ".join(str(v.width) for v in values)
            raise ValueError(f"{op.name}: the inputs have different shapes, {shown} columns")
        if op.number is not None and op.number.positive and not number > 0.0:
            raise ValueError(f"{op.name}: the {op.number.name} is {number}: it must be a positive number")
        out = Value(first.width, first.per_token)
        self.instructions.append(Instruction(op.name, values, [out], elementwise=op, number=float(number)))
        return out

    def join(self, a: Tensor, b: Tensor, heads: int) -> Value:
        x, y = _value(a, "join"), _value(b, "join")
        if heads < 1 or x.width % heads or y.width % heads or x.per_token != y.per_token:
            raise ValueError(f"join: {x.width} and {y.width} columns are not {heads} heads each")
        out = Value(x.width + y.width, x.per_token)
        self.instructions.append(Instruction("join", [x, y], [out], heads=heads))
        return out

    def head_linear(self, x: Tensor, weight: Layout, heads: int) -> Value:
        v = _value(x, "head_linear")
        n, k = _matrix(weight, "head_linear")
        if heads < 1 or n % heads or k * heads != v.width:
            raise ValueError(f"head_linear: {heads} heads of a {n} x {k} weight do not fit {v.width} columns")
        if isinstance(weight, Affine) and k % 32:
            raise Unsupported(f"head_linear: a quantized weight must have a multiple of 32 columns, not {k}")
        out = Value(n, v.per_token)
        self.instructions.append(Instruction("head_linear", [v], [out], weight=weight, heads=heads))
        return out

    def moe(self, x: Tensor, logits: Tensor, experts: Experts, routing: Routing) -> Value:
        v, scores = _value(x, "moe"), _value(logits, "moe")
        count = experts.count
        _same((scores.width,), (count,), "moe: the router's logits")
        if v.per_token != scores.per_token:
            raise ValueError("moe: the rows and the router's logits are not of the same rows")
        if not 1 <= routing.top <= count or count % routing.groups or not 1 <= routing.top_groups <= routing.groups:
            raise ValueError(f"moe: {routing} does not fit {count} experts")
        if routing.top > routing.top_groups * (count // routing.groups):
            raise ValueError(f"moe: {routing.top} experts cannot be chosen from {routing.top_groups} groups")
        f = experts.gate[0].shape[0]
        wanted = {"gate": (f, v.width), "up": (f, v.width), "down": (v.width, f)}
        for name, shape in wanted.items():
            biases = getattr(experts, f"{name}_bias")
            for weight in getattr(experts, name):
                _same(weight.shape, shape, f"moe: an expert's {name}")
                if isinstance(weight, Affine) and shape[1] % 32:
                    raise Unsupported(f"moe: a quantized {name} must have a multiple of 32 columns, not {shape[1]}")
            if len(getattr(experts, name)) != count or len(biases) not in (0, count):
                raise ValueError(f"moe: {count} experts need as many of {name}")
            for bias in biases:
                _same(bias.shape, shape[:1], f"moe: the bias of an expert's {name}")
        out = Value(v.width, v.per_token)
        self.instructions.append(Instruction("moe", [v, scores], [out], experts=experts, routing=routing))
        return out

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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        *,
        layer: int,
        heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Dense | None = None,
        group: int = 0,
    ) -> Value:
        values = [_value(t, "attention") for t in (q, k, v)]
        kv = self._cached(batch, layer, heads, "attention", group)
        if kv.head_dim > MAX_HEAD_DIM or kv.latent:
            raise Unsupported(f"attention: head size {kv.head_dim} of {MAX_HEAD_DIM} at most, and V of its own: {kv}")
        widths = [heads * kv.head_dim, kv.kv_heads * kv.head_dim, kv.kv_heads * kv.head_dim]
        _same(tuple(x.width for x in values), tuple(widths), "attention: q, k and v")
        if not all(x.per_token for x in values):
            raise ValueError("attention: q, k and v must have a row per token")
        if (window is not None and window < 1) or (softcap is not None and not softcap > 0.0):
            raise ValueError(f"attention: a window of {window} and a cap of {softcap}: they must be positive")
        if kv.window and (window is None or window > kv.window):
            raise ValueError(f"attention: a window of {window} over a group that keeps {kv.window} tokens")
        if sinks is not None:
            _same(sinks.shape, (heads,), "attention: the sinks")
        out = Value(widths[0])
        self.instructions.append(Instruction("store", values[1:], [], layer=layer, group=group))
        span = heads // kv.kv_heads * kv.head_dim
        attend = Instruction(
            "attend", values[:1], [out], layer=layer, heads=heads, scale=float(scale), span=span,
            window=window or 0, cap=softcap or 0.0, weight=sinks, group=group,
        )  # fmt: skip
        self.instructions.append(attend)
        return out

    def latent_attention(
        self, q: Tensor, k: Tensor, batch: Batch, *, layer: int, heads: int, scale: float, group: int = 0
    ) -> Value:
        values = [_value(t, "latent_attention") for t in (q, k)]
        kv = self._cached(batch, layer, heads, "latent_attention", group)
        if kv.window or kv.kv_heads != 1 or not 0 < kv.latent <= kv.head_dim:
            raise ValueError(f"latent_attention: one key per token, with values inside it, is needed: {kv}")
        _same(tuple(x.width for x in values), (heads * kv.head_dim, kv.head_dim), "latent_attention: q and k")
        if not all(x.per_token for x in values):
            raise ValueError("latent_attention: q and k must have a row per token")
        out = Value(heads * kv.latent)
        self.instructions.append(Instruction("store_latent", values[1:], [], layer=layer, group=group))
        attend = Instruction(
            "attend_latent", values[:1], [out], layer=layer, heads=heads, scale=float(scale), group=group
        )
        self.instructions.append(attend)
        return out

    def encode(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, heads: int, scale: float) -> Value:
        values = [_value(t, "encode") for t in (q, k, v)]
        if cast(Any, batch) is not self._batch:
            raise ValueError("encode: the batch must be the one that forward was given")
        width, key = values[0].width, values[1].width
        dim = width // max(heads, 1)
        if heads < 1 or width % heads or key % dim or heads % (key // dim) or values[2].width != key:
            raise ValueError(f"encode: q, k and v of {[x.width for x in values]} columns are not {heads} heads")
        if dim % 8 or dim > MAX_HEAD_DIM:
            raise Unsupported(f"encode: heads of {dim} columns; multiples of 8 up to {MAX_HEAD_DIM} are supported")
        if not all(x.per_token for x in values):
            raise ValueError("encode: q, k and v must have a row per token")
        out = Value(width)
        self.instructions.append(Instruction("encode", values, [out], heads=heads, scale=float(scale)))
        return out

    def conv(self, x: Tensor, weight: Dense, batch: Batch, *, layer: int, group: int, at: int = 0) -> Value:
        v = _value(x, "conv")
        taps = weight.shape[0] // v.width
        if len(weight.shape) != 1 or taps < 2 or weight.shape[0] != taps * v.width or not v.per_token:
            raise ValueError(f"conv: a weight of shape {weight.shape} is not several rows of {v.width} columns")
        self._state(batch, layer, group, at, (taps - 1) * v.width, "conv")
        out = Value(v.width)
        self.instructions.append(Instruction("conv", [v], [out], weight=weight, layer=layer, group=group, at=at))
        return out

    def delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        decay: Dense,
        bias: Dense,
        batch: Batch,
        *,
        layer: int,
        group: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        at: int = 0,
    ) -> Value:
        values = [_value(t, "delta_rule") for t in (qkv, a, b)]
        if min(key_heads, heads, key_dim) < 1 or heads % key_heads or key_dim > MAX_HEAD_DIM:
            raise ValueError(f"delta_rule: {heads} heads over {key_heads} of {key_dim} columns")
        width = values[0].width - 2 * key_heads * key_dim
        if width < heads or width % heads or width // heads > MAX_HEAD_DIM or not all(x.per_token for x in values):
            raise ValueError(f"delta_rule: {values[0].width} columns hold no values for {heads} heads")
        for what, got in zip(("a", "b"), values[1:], strict=True):
            _same((got.width,), (heads,), f"delta_rule: {what}")
        for what, vector in (("decay", decay), ("bias", bias)):
            _same(vector.shape, (heads,), f"delta_rule: the {what}")
        self._state(batch, layer, group, at, key_dim * width, "delta_rule")
        out = Value(width)
        made = Instruction(
            "delta_rule", values, [out], weight=decay, bias=bias, layer=layer, group=group, heads=heads,
            key_heads=key_heads, key_dim=key_dim, at=at,
        )  # fmt: skip
        self.instructions.append(made)
        return out

    def _state(self, batch: Batch, layer: int, group: int, at: int, size: int, op: str) -> None:
        """A group of states must have room for this part of a layer's."""
        if cast(Any, batch) is not self._batch:
            raise ValueError(f"{op}: the batch must be the one that forward was given")
        kv = self._kv.groups[group] if 0 <= group < len(self._kv.groups) else None
        if kv is None or not kv.state or kv.page_size != 16:
            raise ValueError(f"{op}: group {group} is not one of states with pages of 16 tokens")
        if not 0 <= layer < kv.layers or at < 0 or at + size > kv.state:
            raise ValueError(f"{op}: layer {layer}, numbers {at} to {at + size} do not fit {kv}")

    def _cached(self, batch: Batch, layer: int, heads: int, op: str, group: int) -> KV:
        """The pool of a group, which must be what every attention over it asks for."""
        if not 0 <= group < len(self._kv.groups):
            raise ValueError(f"{op}: group {group} of {len(self._kv.groups)}")
        kv = self._kv.groups[group]
        if cast(Any, batch) is not self._batch:
            raise ValueError(f"{op}: the batch must be the one that forward was given")
        if kv.page_size != 16 or kv.head_dim % 8:
            raise Unsupported(
                f"{op}: pages of {kv.page_size} tokens and head size {kv.head_dim}; "
                "supported are pages of 16 and head sizes that are multiples of 8"
            )
        if not 0 <= layer < kv.layers or heads < 1 or heads % kv.kv_heads:
            raise ValueError(f"{op}: layer {layer} with {heads} heads does not fit {kv}")
        return kv

    def take(self, x: Tensor, rows: Tensor) -> Value:
        v = _value(x, "take")
        self._index(rows, "logit_rows", "take")
        if not v.per_token:
            raise ValueError("take: the rows have been taken already")
        out = Value(v.width, per_token=False)
        self.instructions.append(Instruction("take", [v], [out]))
        return out

    def mark(self, x: Tensor, layer: int) -> None:
        v = _value(x, "mark")
        if layer in self.marked or not v.per_token:
            raise ValueError(f"mark: layer {layer} is marked once, where there is a row for every token")
        self.marked.add(layer)
        for hidden in self._keep:
            if hidden.layer == layer:
                kept = self.take(v, self._batch.logit_rows) if hidden.taken else v
                self.instructions.append(Instruction("keep", [kept], hidden=hidden))

    def _index(self, given: Tensor, name: str, op: str) -> None:
        if given is not getattr(self._batch, name):
            raise Unsupported(f"{op}: only batch.{name} can be used there")


def record(forward: Forward, kv: KV, inputs: Mapping[str, int], keep: Sequence[Hidden] = ()) -> Recording:
    """Run `forward` over symbols. Raises what the ops raise, or ValueError when it does not return a tensor of its own.

    What is to be kept is read by instructions of its own, "keep", each where the model marks it.
    """
    recorder = Recorder(kv, keep)
    named = {name: Value(width) for name, width in inputs.items()}
    output = _value(forward(recorder, cast(Batch, recorder._batch), named), "the program's result")
    check_keep(keep, recorder.marked)
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
