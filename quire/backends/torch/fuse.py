"""Passes over recorded instructions for a device: fewer, larger pieces of work. They change no sum, only who does it.

    linear, linear, … of one input    linear with several weights, whose outputs are columns of one tensor
    swiglu of two such columns        gated: the product and swiglu over its halves
    add, then norm of the sum         add_norm, which gives both; with the product that is added, linear_add_norm
    (rope,) store, attend             attention, with the rope that its queries and keys still need

Values are written once, so an instruction may move down to where another one stood. Each pass takes a list and
returns a list; what it does not recognise it leaves alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from quire.backends.recorder import Instruction, Segment, Value

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


def linear_add_norm(program: Program, output: Value) -> Program:
    """The product that is added to a residual, the sum and its norm, where each reads the other's and nobody else does."""
    used, maker = uses(program, output), makers(program)
    last = {v: at for at, i in enumerate(program) for v in i.reads()}
    gone: set[int] = set()
    out: Program = []
    for at, i in enumerate(program):
        if i.op == "add_norm":
            residual, product = i.inputs
            linear = maker.get(product)
            alone = used[product] == 1 and last[residual] == at and residual is not product
            if alone and linear and linear.op == "linear" and len(linear.segments) == 1 and residual is not output:
                gone.add(id(linear))
                i.op, i.inputs, i.segments = "linear_add_norm", [residual], linear.segments
        out.append(i)
    return [i for i in out if id(i) not in gone]


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


PASSES = (merge_linears, gated, add_norm, linear_add_norm, attention)


def fuse(program: Program, output: Value) -> Program:
    """The program as it is run."""
    for run in PASSES:
        program = run(program, output)
    return program


def soon(program: Program, output: Value) -> set[Value]:
    """Norms that only products read, all of them before what was normalized is overwritten (by linear_add_norm)."""
    readers: dict[Value, list[int]] = {}
    products: dict[Value, list[int]] = {}
    overwritten: dict[Value, int] = {}
    for at, i in enumerate(program):
        for v in i.reads():
            readers.setdefault(v, []).append(at)
        if i.op in ("linear", "gated"):
            for x in {s.x for s in i.segments}:
                products.setdefault(x, []).extend([at] * len(i.segments))
        if i.op == "linear_add_norm":
            overwritten[i.inputs[0]] = at
    found: set[Value] = set()
    for i in program:
        if i.op in ("norm", "add_norm", "linear_add_norm"):
            source, result = (i.inputs if i.op == "norm" else i.outputs)[0], i.outputs[-1]
            by = readers.get(result, [])
            until = overwritten.get(source, len(program))
            if result is not output and by and by == products.get(result) and by[-1] < until:
                found.add(result)
    return found


def multiplied(program: Program, output: Value) -> dict[Value, list[list[Segment]]]:
    """Values that nothing but products reads, with the segments of each product."""
    readers: Counter[Value] = uses(program, output)
    found: dict[Value, list[list[Segment]]] = {}
    for i in program:
        if i.segments:
            x = i.segments[0].x
            found.setdefault(x, []).append(i.segments)
            readers[x] -= len(i.segments)
    return {v: products for v, products in found.items() if readers[v] == 0}


def loose(program: Program, output: Value) -> set[int]:
    """Products (by id) whose outputs are the queries, keys and values of one attention that rotates them itself."""
    used, maker = uses(program, output), makers(program)
    found: set[int] = set()
    for i in program:
        if i.op == "attention" and i.rope is not None:
            linear = maker.get(i.inputs[0])
            alone = all(used[v] == 1 for v in i.inputs)
            if alone and linear and linear.op == "linear" and [s.out for s in linear.segments] == i.inputs:
                found.add(id(linear))
    return found


def uses(program: Program, output: Value) -> Counter[Value]:
    """How often each value is read, the output once more."""
    count = Counter(v for i in program for v in i.reads())
    count[output] += 1
    return count


def makers(program: Program) -> dict[Value, Instruction]:
    """The instruction that writes each value."""
    return {v: i for i in program for v in i.writes()}
