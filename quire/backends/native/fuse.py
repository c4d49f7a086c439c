"""Passes over recorded instructions. `lower` is needed; every other pass is optional and changes no bit of any result.

Each pass takes a list and returns a list. Values are written once, so an instruction may move down to where another one
stood as long as what it reads was written before: that is all these passes rely on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from quire.backends.recorder import Instruction, Value
from quire.layouts import Affine, Dense, Layout

Program: TypeAlias = list[Instruction]
Pass: TypeAlias = Callable[[Program, Value], Program]


def input_bytes(weight: Layout) -> int:
    """The bytes of a number of x in a product with this weight: 1 for quantized ones, 2 for f16; 0: x stays float32."""
    if isinstance(weight, Affine):
        return 1
    return 2 if isinstance(weight, Dense) and weight.dtype == "f16" and weight.shape[-1] % 32 == 0 else 0


def lower(program: Program) -> Program:
    """Products over weights that are integers here get their input as integers, each from an instruction of its own.

    A mixture of experts reads [logits, x where some experts need float32, x as integers where some need that].
    """
    out: Program = []

    program = fold_adapters(program)

    def rounded(x: Value, size: int) -> Value:
        made = Value(x.width, x.per_token, quant=size)
        out.append(Instruction("quantize", [x], [made]))
        return made

    for i in program:
        for s in i.segments:
            if (size := input_bytes(s.weight)) and not s.x.quant:
                s.x = rounded(s.x, size)
        if i.op == "head_linear" and i.weight is not None and (size := input_bytes(i.weight)):
            i.inputs = [rounded(i.inputs[0], size)]
        elif i.op == "moe":
            assert i.experts is not None
            x, logits = i.inputs
            sizes = {input_bytes(w) for w in (*i.experts.gate, *i.experts.up)}
            i.inputs = [logits, *([x] if 0 in sizes else []), *([rounded(x, max(sizes))] if any(sizes) else [])]
        out.append(i)
    return out


def keep_last(program: Program) -> Program:
    """Let tensors that a program keeps (hidden rows) live until its end, where they are read, and stand between no two
    instructions."""
    return sorted(program, key=lambda i: i.op == "keep")


def fold_adapters(program: Program) -> Program:
    """Fold each `adapt` into the linear before it, where the result is stored. The product a x becomes a shrink, one for each x.

    An adapt over anything else stays, and reads [y, a x].
    """
    read, maker = Counter(v for i in program for v in i.reads()), _makers(program)
    shrinks: dict[Value, Instruction] = {}
    before: dict[int, Instruction] = {}  # by the id of the first instruction that needs it
    out: Program = []
    for i in program:
        if i.op != "adapt":
            out.append(i)
            continue
        (y, x), (target,) = i.inputs, i.targets
        linear = maker.get(y)
        folds = linear is not None and _plain_linear(linear) and read[y] == 1
        user = linear if linear is not None and folds else i
        if x not in shrinks:
            before[id(user)] = shrinks[x] = Instruction("shrink", [x])
        shrunk = Value(target.rank, x.per_token)
        shrinks[x].outputs.append(shrunk)
        shrinks[x].targets.append(target)
        if user is i:
            i.inputs = [y, shrunk]
            out.append(i)
        else:
            s = user.segments[0]
            s.out, s.target, s.shrunk = i.outputs[0], target, shrunk
    return [each for i in out for each in ([before[id(i)], i] if id(i) in before else [i])]


def share_quantize(program: Program, output: Value) -> Program:
    """Quantize each tensor to integers once, for all products that read it: the first byte of two is what the others need."""
    first: dict[Value, Value] = {}
    same: dict[Value, Value] = {}
    out: Program = []
    for i in program:
        if i.op == "quantize":
            x, rounded = i.inputs[0], i.outputs[0]
            if x in first:
                same[rounded] = first[x]
                first[x].quant = max(first[x].quant, rounded.quant)
                continue
            first[x] = rounded
        i.inputs = [same.get(v, v) for v in i.inputs]
        for s in i.segments:
            s.x = same.get(s.x, s.x)
        out.append(i)
    return out


def gate_up(program: Program, output: Value) -> Program:
    """The activation of two linears becomes one instruction with them, which never stores what lies between."""
    used, maker = _uses(program, output), _makers(program)
    gone: set[int] = set()
    out: Program = []
    for i in program:
        if i.elementwise is not None and i.elementwise.gates:
            pair = [maker.get(v) for v in i.inputs]
            gate, up = pair
            if gate is not up and all(
                p is not None and _plain_linear(p) and used[p.segments[0].out] == 1 for p in pair
            ):
                assert gate is not None and up is not None
                gone |= {id(gate), id(up)}
                segments = [gate.segments[0], up.segments[0]]
                out.append(Instruction("gated", [], i.outputs, segments, elementwise=i.elementwise))
                continue
        out.append(i)
    return [i for i in out if id(i) not in gone]


def residual(program: Program, output: Value) -> Program:
    """add(a, linear(…)) is added where the linear's result is stored: the same sum, rounded the same."""
    used, maker = _uses(program, output), _makers(program)
    gone: set[int] = set()
    out: Program = []
    for i in program:
        if i.op == "add":
            for other, mine in (i.inputs, i.inputs[::-1]):
                linear = maker.get(mine)
                if linear is not None and _plain_linear(linear) and used[mine] == 1 and other is not mine:
                    gone.add(id(linear))
                    s = linear.segments[0]
                    i = Instruction("linear", segments=[replace(s, out=i.outputs[0], residual=other)])
                    break
        out.append(i)
    return [i for i in out if id(i) not in gone]


def merge_linears(program: Program, output: Value) -> Program:
    """Linears that read the same tensor become one instruction with several weights, at the first one's place."""
    first: dict[Value, Instruction] = {}
    out: Program = []
    for i in program:
        if _plain_linear(i):
            x = i.segments[0].x
            if x in first:
                first[x].segments.append(i.segments[0])
                continue
            first[x] = i
        out.append(i)
    return out


def quantize_tail(program: Program, output: Value) -> Program:
    """Norms, gated ones and attend hand on int8 themselves, and keep the float32 form only where something else reads it."""
    used, maker = _uses(program, output), _makers(program)
    out: Program = []
    for i in program:
        if i.op == "quantize":
            source = maker.get(i.inputs[0])
            if source is not None and len(source.outputs) == 1 and _can_round(source):
                alone = used[i.inputs[0]] == 1 and source.op != "attend"
                source.outputs = i.outputs if alone else [*source.outputs, *i.outputs]
                continue
        out.append(i)
    return out


def rope_store(program: Program, output: Value) -> Program:
    """Keys are rotated on their way into the cache, and the queries of that layer with them."""
    used, maker = _uses(program, output), _makers(program)
    gone: set[int] = set()
    for at, i in enumerate(program):
        if i.op != "store":
            continue
        attend = program[at + 1]
        k, q = maker.get(i.inputs[0]), maker.get(attend.inputs[0])
        if k is None or k.op != "rope" or used[i.inputs[0]] != 1 or i.rope is not None:
            continue
        gone.add(id(k))
        i.inputs[0], i.rope = k.inputs[0], k.rope
        if q is not None and q.op == "rope" and q.rope is k.rope and used[attend.inputs[0]] == 1:
            gone.add(id(q))
            i.inputs.append(q.inputs[0])
            i.outputs = q.outputs
    return [i for i in program if id(i) not in gone]


def store_attend(program: Program, output: Value) -> Program:
    """Where each sequence has one row, make attention store the row's K and V before it reads them, in one step instead of two."""
    for before, i in itertools.pairwise(program):
        if before.op == "store" and i.op == "attend" and len(i.inputs) == 1:
            i.inputs = [*i.inputs, *before.inputs]
    return program


def attend_wanted(program: Program, output: Value) -> Program:
    """Compute attention only for the rows that are taken afterwards, where only `take` reads its result: the last layer of a
    prompt."""
    whole = {v for i in program for v in i.reads() if i.op != "take"} | {output}
    for i in program:
        i.wanted = i.op in ("attend", "attend_latent") and not whole.intersection(i.writes())
    return program


PASSES: tuple[Pass, ...] = (
    share_quantize,
    gate_up,
    residual,
    merge_linears,
    quantize_tail,
    rope_store,
    store_attend,
    attend_wanted,
)


def fuse(program: Program, output: Value, passes: tuple[Pass, ...] = PASSES) -> Program:
    """The program as it is replayed."""
    program = lower(keep_last(program))
    for run in passes:
        program = run(program, output)
    return program


def _can_round(i: Instruction) -> bool:
    """Whether C++ can store its result as int8: no group of 32 may lie in two of attend's items."""
    return i.op in ("norm", "layer_norm", "gated") or (i.op == "attend" and i.span % 32 == 0)


def _plain_linear(i: Instruction) -> bool:
    return i.op == "linear" and len(i.segments) == 1 and i.segments[0].residual is None


def _uses(program: Program, output: Value) -> Counter[Value]:
    count = Counter(v for i in program for v in i.reads())
    count[output] += 1
    return count


def _makers(program: Program) -> dict[Value, Instruction]:
    return {v: i for i in program for v in i.writes()}
