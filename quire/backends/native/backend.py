"""The native backend: packs weights, hands recorded programs to C++, runs them.

Weights are packed once per layout object and shared by every program of this backend, so a tied embedding is one matrix.
Results are bitwise the same whatever the batch, the chunking, the thread count and the kernel set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from quire.backends.adapters import Target, by_slot
from quire.backends.early import take_early
from quire.backends.elementwise import ELEMENTWISE
from quire.backends.native import arena, extension, fuse
from quire.backends.native.numerics import NUMERICS, sines
from quire.backends.native.program import NativeProgram, Targets
from quire.backends.ops import KV, TABLE, Forward, HostSampler, Needs, check_kv
from quire.backends.outputs import Hidden
from quire.backends.recorder import Instruction, Recording, Segment, Value, record
from quire.layouts import Affine, Codec, Dense, Float8, Ints, Layout, Rope, Scale
from quire.observe.errors import NotEnoughMemory, Unsupported

# Weights handed to C++ in one call. Their file pages are let go after it, so more would cost memory; and in fewer bytes the
# thread that loads would ask for the interpreter lock too often, which whoever imports modules beside it gives up late.
BATCH_BYTES = 32 << 20
MAX_LATENT_DIM = 576  # kMaxLatentDim
SCRATCH = 1 << 20  # bytes a thread that estimates allow for; attention takes the most, by the size of a head
FLOAT8 = "bf16"  # what FP8 numbers become: kernels know no FP8, and the product with a scale has more bits
_TYPES = {"f32": (0, np.uint32), "f16": (1, np.uint16), "bf16": (2, np.uint16)}
CELLS = {"f16": 0, "int8": 1, "int16": 2}  # what C++ calls a way to keep K and V
TILES = ("amx",)  # kernel sets with matrix tiles, which attend to int16 twice as fast as to f16
_INTEGERS = 3  # float16 numbers, packed as integers of 14 bits with a scale for 32 of them: what products read fastest


@dataclass(slots=True)
class _Draft:
    """A program with a place for every tensor: all that can be known before memory is taken."""

    recording: Recording
    program: list[Instruction]
    offsets: dict[Value, int]
    arena: int  # bytes


class NativeBackend:
    """Programs on this machine's CPU. `isa` forces a kernel set; `passes` leaves fusions out, for tests.

    `cores`, when there are any, are what the threads are pinned to, in turn; the caller's thread is left alone.
    """

    name = "native"
    kv_dtypes: tuple[str, ...] = tuple(CELLS)
    kv_states = True

    def __init__(
        self,
        threads: int = 1,
        isa: str | None = None,
        passes: tuple[fuse.Pass, ...] = fuse.PASSES,
        cores: Sequence[int] = (),
    ):
        self._native = extension()
        names = self._native.available()
        if isa is not None and isa not in names:
            raise Unsupported(f"the kernel set {isa!r} does not run on this CPU", cure=f"there are: {', '.join(names)}")
        self.isa: str = isa or names[0]
        self.kv_dtype: str = (
            "int16" if names[0] in TILES else "f16"
        )  # whichever set is used: all sets of a machine agree
        self.threads = threads
        try:
            self._machine = self._native.Machine(threads, self.isa, list(cores))
        except RuntimeError as e:
            raise NotEnoughMemory(str(e), cure="ask for fewer, or raise the limits (ulimit -u, ulimit -v)") from None
        self._passes = passes
        self._packed: dict[int, tuple[Layout, Any]] = {}  # the layout is kept so that its id stays its own
        self._vectors: dict[int, tuple[Dense, Any]] = {}
        self._codecs: dict[int, tuple[Codec, Any]] = {}
        self._drafts: dict[Any, _Draft] = {}  # estimated and not yet compiled: at most one

    def compile(
        self,
        forward: Forward,
        *,
        kv: KV,
        max_tokens: int,
        max_rows: int,
        inputs: Mapping[str, int] = {},
        packed: Callable[[Layout, int, int], None] | None = None,
        keep: Sequence[Hidden] = (),
    ) -> NativeProgram:
        check_kv(kv, self)
        _check_latent(kv)
        draft = self._draft(forward, kv, max_tokens, max_rows, inputs, keep)
        self._drafts.clear()
        self._pack(draft.program, packed)
        plan, numbers, kept = self._emit(draft, kv, max_tokens, max_rows)
        made = NativeProgram(
            plan,
            kv,
            dict(inputs),
            kept,
            Targets(numbers, self._pack_adapters),
            self.host_sampler,
            self._native.DecodeSteps,
        )
        for slot, pairs in by_slot(list(numbers)).items():
            made.place(slot, pairs)
        return made

    def host_sampler(self, vocab_size: int) -> HostSampler:
        """Rows of logits become tokens, on this backend's threads and kernels."""
        return self._native.sampler(self._machine, vocab_size)

    def _pack_adapters(self, matrices: list[Dense]) -> list[Any]:
        types = [_TYPES[w.dtype] for w in matrices]
        data = [np.ascontiguousarray(w.data).view(bits) for w, (_, bits) in zip(matrices, types, strict=True)]
        return self._native.pack(self._machine, [(each, number) for each, (number, _) in zip(data, types, strict=True)])

    def estimate(
        self,
        forward: Forward,
        *,
        kv: KV,
        max_tokens: int,
        max_rows: int,
        inputs: Mapping[str, int] = {},
        keep: Sequence[Hidden] = (),
    ) -> Needs:
        draft = self._draft(forward, kv, max_tokens, max_rows, inputs, keep)
        sizes: dict[tuple[Any, ...], int] = {}  # layers repeat their shapes
        weights = 0
        for w in self._new(draft.program):
            kind = (id(w.codec),) if isinstance(w, Affine) else (w.dtype,) if isinstance(w, Dense) else (FLOAT8,)
            key = (*kind, *w.shape)
            if key not in sizes:
                sizes[key] = self._weight_bytes(w)
            weights += sizes[key]
        ropes = {id(i.rope): i.rope for i in draft.program if i.rope is not None}
        tables = sum(4 * max_tokens * r.dim for r in ropes.values())
        # Keys and values of encoders are laid out anew in each step, in one piece of memory per shape of heads.
        laid = {(v[1].width, v[0].width // i.heads) for i in draft.program if i.op == "encode" for v in [i.inputs]}
        pages = sum(8 * (max_tokens + 15) * width for width, _ in laid)
        peaks = 4 * max_rows * -(-draft.recording.output.width // 64)  # of logits, for the sampler
        return Needs(weights, draft.arena + tables + pages + peaks + self.threads * SCRATCH)

    def adopt(self, layout: Layout, matrix: Any) -> None:
        """Use a matrix of the extension for a layout, whatever numbers that holds: how the machine is measured."""
        self._packed[id(layout)] = (layout, matrix)

    def pattern(self, n: int, k: int) -> Any:
        """A matrix of [n, k] numbers that mean nothing, for `adopt`."""
        return self._native.pattern(self._machine, n, k)

    def describe(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"native ({self.isa}, {threads})"

    def computes(self) -> str:
        """The arithmetic of this backend, as text. Kernel sets and numbers of threads are not in it: they agree. The angles of
        rotations come from the system's library."""
        return f"native {NUMERICS}, sines {sines()}"

    def implementations(self) -> dict[str, str]:
        mine = self._native.elementwise()
        return {op.name: f"C++ ({self.isa})" for op in TABLE if op.name not in ELEMENTWISE or op.name in mine}

    def told(self) -> list[str]:
        rounded = sum(w.nbytes for w, _ in self._packed.values() if fuse.input_bytes(w) == 2)
        if not rounded:
            return []
        return [
            f"f16 weights: {rounded / 2**20:.0f} MiB are integers of 14 bits here, with a scale for each 32: "
            "what is below 2^-13 of the largest of them is rounded away"
        ]

    @property
    def packed_bytes(self) -> int:
        """Memory held by packed matrices."""
        return sum(m.nbytes for _, m in self._packed.values())

    def _draft(
        self,
        forward: Forward,
        kv: KV,
        max_tokens: int,
        max_rows: int,
        inputs: Mapping[str, int],
        keep: Sequence[Hidden] = (),
    ) -> _Draft:
        """The program laid out; taken over from an estimate of the same program when there is one."""
        key = (forward, kv.sized([0] * len(kv.groups)), max_tokens, max_rows, tuple(inputs.items()), tuple(keep))
        if key in self._drafts:
            return self._drafts[key]

        def size(v: Value) -> int:
            if isinstance(v, arena.Room):
                return v.nbytes
            return self._native.tensor_bytes(v.width, v.quant, max_tokens if v.per_token else max_rows)

        recording = take_early(record(forward, kv, inputs, keep))
        self._check(recording)
        program = fuse.fuse(recording.instructions, recording.output, self._passes)
        for i in program:
            if i.op == "moe":
                i.outputs.append(self._room(i, max_tokens, max_rows))
        offsets, arena_bytes = arena.lay_out(program, recording.inputs.values(), recording.output, size)
        self._drafts = {key: _Draft(recording, program, offsets, arena_bytes)}
        return self._drafts[key]

    def _check(self, recording: Recording) -> None:
        """Raises Unsupported where C++ has no kernel for an elementwise op of the program."""
        known = self._native.elementwise()
        for i in recording.instructions:
            if i.elementwise is not None and i.elementwise.name not in known:
                raise Unsupported(
                    f"the native backend has no kernel for the op {i.elementwise.name!r}", cure="use --backend torch"
                )

    def _room(self, i: Instruction, max_tokens: int, max_rows: int) -> arena.Room:
        """The memory that a mixture of experts needs between its steps."""
        assert i.experts is not None and i.routing is not None
        w, out = i.experts, i.outputs[0]

        def forms(*weights: Layout) -> tuple[int, bool]:  # bytes of integers, float32
            sizes = {fuse.input_bytes(x) for x in weights}
            return max(sizes), 0 in sizes

        rows = max_tokens if out.per_token else max_rows
        widths = out.width, w.gate[0].shape[0]
        room = self._native.moe_bytes(rows, w.count, i.routing.top, *widths, forms(*w.gate, *w.up), forms(*w.down))
        return arena.Room(1, out.per_token, nbytes=room)

    def _new(self, program: list[Instruction]) -> list[Layout]:
        """Weights that no earlier program brought here, each once."""
        found = {id(w): w for w in _weights(program) if id(w) not in self._packed and id(w) not in self._vectors}
        return list(found.values())

    def _pack(self, program: list[Instruction], packed: Callable[[Layout, int, int], None] | None) -> None:
        new = self._new(program)
        total, done = sum(w.nbytes for w in new), 0
        for batch in _batches(new):
            matrices = [w for w in batch if not _is_vector(w)]
            handles = self._native.pack(self._machine, [self._as_packable(w) for w in matrices])
            self._packed |= {id(w): (w, handle) for w, handle in zip(matrices, handles, strict=True)}
            for w in batch:
                if _is_vector(w):
                    self._vectors[id(w)] = (w, self._native.vector(np.ascontiguousarray(w.dequantize())))
                done += w.nbytes
                if packed is not None:
                    packed(w, done, total)

    def _as_packable(self, w: Layout) -> tuple[Any, Any]:
        """The bytes of a matrix, and how C++ is to read them."""
        if isinstance(w, Float8):
            return _bfloat16(w), self._number(w)
        data = np.ascontiguousarray(w.data)
        if isinstance(w, Dense):
            return data.view(_TYPES[w.dtype][1]), self._number(w)
        if id(w.codec) not in self._codecs:
            self._codecs[id(w.codec)] = (w.codec, self._native.Codec(*_codec(w)))
        return data, self._codecs[id(w.codec)][1]

    @staticmethod
    def _number(w: Dense | Float8) -> int:
        """The type that C++ packs it as."""
        if isinstance(w, Float8):
            return _TYPES[FLOAT8][0]
        return _INTEGERS if fuse.input_bytes(w) else _TYPES[w.dtype][0]

    def _weight_bytes(self, w: Layout) -> int:
        """The bytes that `_pack` will take for a weight."""
        if _is_vector(w):
            return 4 * -(-w.shape[0] // 16) * 16
        if not isinstance(w, Affine):
            return self._native.dense_bytes(*w.shape, self._number(w))
        return self._native.affine_bytes(*w.data.shape, *_codec(w))

    def _emit(
        self, draft: _Draft, kv: KV, max_tokens: int, max_rows: int
    ) -> tuple[Any, dict[Target, int], dict[Hidden, int]]:
        """The plan, the numbers of its targets, and the slots of what it keeps."""
        program, recording = draft.program, draft.recording
        first, *more = [
            (k.layers, k.pages, k.kv_heads, k.head_dim, CELLS[k.dtype], k.latent, k.state) for k in kv.groups
        ]
        plan = self._native.Plan(self._machine, first, max_tokens, max_rows, draft.arena)
        for pool in more:
            plan.pool(pool)
        assert plan.page_bytes == kv.page_bytes  # two languages, one account of memory
        slots = {
            v: at if isinstance(v, arena.Room) else plan.slot(at, v.width, v.quant, v.per_token)
            for v, at in draft.offsets.items()
        }
        ropes: dict[int, int] = {}
        for i in program:
            if i.rope is not None and id(i.rope) not in ropes:
                ropes[id(i.rope)] = _rope_table(plan, i.rope)
        numbers: dict[Target, int] = {}
        for target in (target for i in program for target in i.targets):
            if target not in numbers:
                numbers[target] = plan.site(target.n, target.k, target.rank, target.slots)
        for i in program:
            if i.op != "keep":  # that the tensor lives until the end is all that it asks
                self._emit_one(plan, i, slots, ropes, numbers)
        for v in recording.inputs.values():
            plan.input(slots[v])
        plan.output(slots[recording.output])
        return plan, numbers, {i.hidden: slots[i.inputs[0]] for i in program if i.hidden is not None}

    def _emit_one(
        self, plan: Any, i: Instruction, slots: dict[Value, int], ropes: dict[int, int], numbers: dict[Target, int]
    ) -> None:
        ins, outs = [slots[v] for v in i.inputs], [slots[v] for v in i.outputs]
        whole = next((slots[v] for v in i.outputs if not v.quant), -1)
        rounded = next((slots[v] for v in i.outputs if v.quant), -1)
        if i.op == "embed":
            plan.embed(self._packed[id(i.weight)][1], whole)
        elif i.op == "norm":
            plan.norm(ins[0], self._vector(i.weight), i.eps, i.heads, whole, rounded)
        elif i.op == "layer_norm":
            plan.layer_norm(ins[0], self._vector(i.weight), self._vector(i.bias), i.eps, i.heads, whole, rounded)
        elif i.op == "linear":
            plan.linear([self._segment(s, slots, numbers) for s in i.segments])
        elif i.op == "gated":
            assert i.elementwise is not None
            gate, up = (self._segment(s, slots, numbers) for s in i.segments)
            plan.gated(i.elementwise.name, gate, up, whole, rounded)
        elif i.elementwise is not None:
            plan.elementwise(i.elementwise.name, ins, i.number, whole)
        elif i.op == "shrink":
            plan.shrink(ins[0], [(numbers[target], at) for target, at in zip(i.targets, outs, strict=True)])
        elif i.op == "adapt":
            plan.adapt(*ins, numbers[i.targets[0]], whole)
        elif i.op == "join":
            plan.join(*ins, i.heads, whole)
        elif i.op == "head_linear":
            plan.head_linear(ins[0], self._packed[id(i.weight)][1], i.heads, whole)
        elif i.op == "moe":
            self._emit_moe(plan, i, slots)
        elif i.op == "rope":
            plan.rope(ins[0], ropes[id(i.rope)], i.heads, whole)
        elif i.op == "store":
            table = -1 if i.rope is None else ropes[id(i.rope)]
            q, q_out = (ins[2], outs[0]) if outs else (-1, -1)
            plan.store(ins[0], ins[1], table, q, q_out, i.layer, i.group)
        elif i.op == "attend":
            sinks = None if i.weight is None else self._vectors[id(i.weight)][1]
            stores = len(ins) > 1
            shape, kind = (i.layer, i.heads, i.scale, i.window, i.cap), (i.group, stores, i.wanted)
            plan.attend(ins[0], *shape, sinks, whole, rounded, *kind)
        elif i.op == "store_latent":
            plan.store_latent(ins[0], i.layer, i.group)
        elif i.op == "attend_latent":
            plan.attend_latent(ins[0], i.layer, i.heads, i.scale, whole, i.group, i.wanted)
        elif i.op == "conv":
            plan.conv(ins[0], self._vector(i.weight), i.layer, i.group, i.at, whole)
        elif i.op == "delta_rule":
            vectors, sizes = (self._vector(i.weight), self._vector(i.bias)), (i.key_heads, i.heads, i.key_dim)
            plan.delta_rule(*ins, *vectors, i.layer, i.group, *sizes, i.at, whole)
        elif i.op == "encode":
            plan.encode(*ins, i.heads, i.scale, whole)
        elif i.op == "take":
            plan.take(*ins, *outs)
        elif i.op == "quantize":
            plan.quantize(*ins, *outs)
        else:
            raise Unsupported(f"the native backend has no kernel for the op {i.op!r}", cure="use --backend torch")

    def _emit_moe(self, plan: Any, i: Instruction, slots: dict[Value, int]) -> None:
        assert i.experts is not None and i.routing is not None
        w, how = i.experts, i.routing
        logits, *forms = i.inputs
        x = next((slots[v] for v in forms if not v.quant), -1)
        rounded = next((slots[v] for v in forms if v.quant), -1)
        matrices = [[self._packed[id(m)][1] for m in part] for part in (w.gate, w.up, w.down)]
        biases = [[self._vector(b) for b in part] for part in (w.gate_bias, w.up_bias, w.down_bias)]
        experts = (*matrices, *biases, [] if w.limit is None else [w.limit])
        routing = (how.top, how.sigmoid, how.renormalize, how.scale, how.groups, how.top_groups, how.pair)
        out, room = (slots[v] for v in i.outputs)
        plan.moe(x, rounded, slots[logits], experts, routing, self._vector(how.bias), out, room)

    def _segment(
        self, s: Segment, slots: dict[Value, int], numbers: dict[Target, int]
    ) -> tuple[Any, Any, int, int, int, int, int]:
        residual = -1 if s.residual is None else slots[s.residual]
        weight, bias = self._packed[id(s.weight)][1], self._vector(s.bias)
        target, shrunk = (-1, -1) if s.target is None or s.shrunk is None else (numbers[s.target], slots[s.shrunk])
        return weight, bias, slots[s.x], slots.get(s.out, -1), residual, target, shrunk

    def _vector(self, w: Layout | None) -> Any:
        """The handle of a vector; None for none."""
        return None if w is None else self._vectors[id(w)][1]


def _check_latent(kv: KV) -> None:
    """Raises Unsupported for a latent pool that the kernels do not have."""
    if kv.latent and kv.dtype != "f16":
        raise Unsupported(
            f"the native backend keeps the keys of latent attention as f16, not as {kv.dtype}",
            cure="leave --kv-dtype out",
        )
    if kv.latent and kv.head_dim > MAX_LATENT_DIM:
        raise Unsupported(f"latent attention: keys of {kv.head_dim} columns; up to {MAX_LATENT_DIM} are supported")


def _is_vector(w: Layout) -> TypeGuard[Dense]:
    return isinstance(w, Dense) and len(w.shape) == 1


def _bfloat16(w: Float8) -> np.ndarray:
    """The nearest bfloat16 numbers, of two equally near the even one, as their bits. Some rows at a time."""
    out = np.empty(w.shape, np.uint16)
    step = max(1, (1 << 16) // w.shape[1])  # what stays in the cache
    for first in range(0, w.shape[0], step):
        bits = w.dequantize(slice(first, first + step)).view(np.uint32)
        half = bits >> np.uint32(16)
        half &= np.uint32(1)
        half += np.uint32(0x7FFF)
        bits += half  # what is no number has no low bits, and stays none
        bits >>= np.uint32(16)
        out[first : first + step] = bits
    return out


def _batches(weights: Iterable[Layout]) -> Iterator[list[Layout]]:
    """Weights in their order, BATCH_BYTES or a little more at a time."""
    batch: list[Layout] = []
    size = 0
    for w in weights:
        batch.append(w)
        size += w.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _weights(program: list[Instruction]) -> Iterator[Layout]:
    for i in program:
        yield from i.weights()


def _rope_table(plan: Any, rope: Rope) -> int:
    frequencies = np.ascontiguousarray(rope.frequencies, np.float32)
    return plan.rope_table(frequencies, rope.dim, rope.pairs, float(rope.magnitude), rope.axes)


def _codec(w: Affine) -> tuple[Any, ...]:
    c = w.codec
    bias = [_factor(c.bias)] if c.bias else []
    return c.block, c.nbytes, c.group, c.bits, _ints(c.codes), _factor(c.scale), bias


def _ints(ints: Ints | None) -> tuple[list[Any], int]:
    if ints is None:
        return [], 0
    return [(p.byte.tolist(), p.shift.tolist(), p.mask, p.lift, p.flip) for p in ints.planes], ints.offset


def _factor(scale: Scale) -> tuple[int, bool, bool, tuple[list[Any], int]]:
    return scale.at, scale.negate, scale.wide, _ints(scale.codes)
