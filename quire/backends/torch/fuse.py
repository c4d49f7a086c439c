"""Passes over recorded instructions for a device: fewer, larger pieces of work. They change no sum, only who does it.

    linear, linear, … of one input    linear with several weights, whose outputs are columns of one tensor
    swiglu of two such columns        gated: the product and swiglu over its halves
    add, then norm of the sum         add_norm, which gives both
    (rope,) store, attend             attention, with the rope that its queries and keys still need

Values are written once, so an instruction may move down to where another one stood. Each pass takes a list and
returns a list; what it does not recognise it leaves alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from quire.backends.native.recorder import Instruction, Value

Program: TypeAlias = list[Instruction]


def merge_linears(program: Program, output: Value) -> Program:
    """Linears that read the same tensor become one, at the first one's place."""
    first: dict[Value, Instruction] = {}
    out: Program = []
    for i in program:
        if i.op == "linear":
            x, weight = i.segments[0].x, i.segments[0].weight
            mate = first.setdefault(x, i)
            if mate is not i and all(s.weight is not weight for s in mate.segments):
                mate.segments += i.segments
                continue
        out.append(i)
    return out


def gated(program: Program, output: Value) -> Program:
    """swiglu over the two halves of one product: what lies between is never looked at apart."""
    used, maker = uses(program, output), makers(program)
    gone: set[int] = set()
    out: Program = []
    for i in program:
        if i.op == "swiglu":
            linear = maker.get(i.inputs[0])
            alone = all(used[v] == 1 for v in i.inputs)
            if alone and linear and linear.op == "linear" and [s.out for s in linear.segments] == i.inputs:
                gone.add(id(linear))
                i = Instruction("gated", outputs=i.outputs, segments=linear.segments)
        out.append(i)
    return [i for i in out if id(i) not in gone]


def add_norm(program: Program, output: Value) -> Program:
    """A residual sum and the norm that reads it."""
    out: Program = []
    for i in program:
        before = out[-1] if out else None
        if i.op == "norm" and before is not None and before.op == "add" and before.outputs == i.inputs:
            out[-1] = Instruction("add_norm", before.inputs, [*before.outputs, *i.outputs], weight=i.weight, eps=i.eps)
            continue
        out.append(i)
    return out


def attention(program: Program, output: Value) -> Program:
    """store and attend of a layer, and the rotations that only they read, in one."""
    used, maker = uses(program, output), makers(program)
    gone: set[int] = set()
    out: Program = []
    for i in program:
        if i.op == "attend":
            store = out.pop()
            assert store.op == "store" and store.layer == i.layer  # the recorder puts them side by side
            q, (k, v) = i.inputs[0], store.inputs
            whole = Instruction("attention", [q, k, v], i.outputs, layer=i.layer, heads=i.heads, scale=i.scale)
            turned = maker.get(q), maker.get(k)
            if all(t is not None and t.op == "rope" for t in turned) and used[q] == used[k] == 1:
                a, b = turned
                assert a is not None and b is not None
                if a.rope is b.rope:
                    gone |= {id(a), id(b)}
                    whole.inputs = [a.inputs[0], b.inputs[0], v]
                    whole.rope = a.rope
            i = whole
        out.append(i)
    return [i for i in out if id(i) not in gone]


PASSES = (merge_linears, gated, add_norm, attention)


def fuse(program: Program, output: Value) -> Program:
    """The program as it is run."""
    for run in PASSES:
        program = run(program, output)
    return program


def uses(program: Program, output: Value) -> Counter[Value]:
    """How often each value is read, the output once more."""
    count = Counter(v for i in program for v in i.reads())
    count[output] += 1
    return count


def makers(program: Program) -> dict[Value, Instruction]:
    """The instruction that writes each value."""
    return {v: i for i in program for v in i.writes()}
