"""Passes over recorded instructions for a device: fewer, larger pieces of work. They change no sum, only who does it.

    linear, linear, … of one input    linear with several weights, whose outputs are columns of one tensor
    adapt of several such columns     adapt with as many targets
    swiglu, say, of two such columns  gated: the product, and the activation over its halves
    add, then norm of the sum         add_norm, which gives both; with the product that is added, linear_add_norm
    (norm, rope,) store, attend       attention, with the norms and the rope that its queries and keys still need
    store_latent, attend_latent       latent_attention

Only a norm of whole rows is a plain one: what normalizes the heads of a row is left to attention, or alone.

Values are written once, so an instruction may move down to where another one stood. Each pass takes a list and
returns a list; what it does not recognise it leaves alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from quire.backends.recorder import Instruction, Segment, Value
from quire.layouts import Layout

Program: TypeAlias = list[Instruction]

PRODUCTS = ("linear", "gated")


@dataclass(slots=True, eq=False)
class Attention(Instruction):
    """Instruction("attention") with the weights of a norm over each query head and each key head, if it is to do them."""

    q_norm: Layout | None = None
    k_norm: Layout | None = None

    def weights(self) -> list[Layout]:
        norms = [w for w in (self.q_norm, self.k_norm) if w is not None]
        return [*Instruction.weights(self), *norms]


def plain(i: Instruction) -> bool:
    """Whether it is a norm of whole rows."""
    return i.op == "norm" and i.heads == 1


def merge_linears(program: Program, output: Value) -> Program:
    """Linears that read the same tensor become one, at the first one's place. Routers stay alone: see `routers`."""
    first: dict[Value, Instruction] = {}
    alone = routers(program)
    out: Program = []
    for i in program:
        if i.op == "linear" and id(i) not in alone:
            x, weight = i.segments[0].x, i.segments[0].weight
            mate = first.setdefault(x, i)
            if mate is not i and all(s.weight is not weight for s in mate.segments):
                mate.segments += i.segments
                continue
        out.append(i)
    return out


def merge_adapts(program: Program, output: Value) -> Program:
    """Adapters that add to columns of one product become one, at the first one's place: targets in the order of columns.

    Its inputs are those columns, then what was multiplied.
    """
    maker = makers(program)
    first: dict[tuple[int, Value], Instruction] = {}
    out: Program = []
    for i in program:
        if i.op == "adapt" and (linear := maker.get(i.inputs[0])) is not None and linear.op == "linear":
            mate = first.setdefault((id(linear), i.inputs[1]), i)
            if mate is not i and i.inputs[0] not in mate.inputs:
                mate.inputs = [*mate.inputs[:-1], i.inputs[0], i.inputs[1]]
                mate.outputs += i.outputs
                mate.targets += i.targets
                continue
        out.append(i)
    for (_, x), i in first.items():
        linear = maker[i.inputs[0]]
        place = {s.out: at for at, s in enumerate(linear.segments)}
        order = sorted(range(len(i.targets)), key=lambda at: place[i.inputs[at]])
        i.inputs = [*(i.inputs[at] for at in order), x]
        i.outputs, i.targets = [i.outputs[at] for at in order], [i.targets[at] for at in order]
    return out


def gated(program: Program, output: Value) -> Program:
    """An activation over the two halves of one product: what lies between is never looked at apart."""
    used, maker = uses(program, output), makers(program)
    gone: set[int] = set()
    out: Program = []
    for i in program:
        if i.elementwise is not None and i.elementwise.gates:
            linear = maker.get(i.inputs[0])
            alone = all(used[v] == 1 for v in i.inputs)
            if alone and linear and linear.op == "linear" and [s.out for s in linear.segments] == i.inputs:
                gone.add(id(linear))
                i = Instruction("gated", outputs=i.outputs, segments=linear.segments, elementwise=i.elementwise)
        out.append(i)
    return [i for i in out if id(i) not in gone]


def add_norm(program: Program, output: Value) -> Program:
    """A residual sum and the norm that reads it."""
    out: Program = []
    for i in program:
        before = out[-1] if out else None
        if plain(i) and before is not None and before.op == "add" and before.outputs == i.inputs:
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
    """store and attend of a layer in one, with the rotations and the norms of heads that only they read."""
    used, maker = uses(program, output), makers(program)
    gone: set[int] = set()
    out: Program = []
    for i in program:
        if i.op in ("attend", "attend_latent"):
            store = out.pop()
            # The recorder pairs them.
            assert store.op == i.op.replace("attend", "store") and (store.group, store.layer) == (i.group, i.layer)
            i = _latent(store, i) if i.op == "attend_latent" else _paged(store, i, used, maker, gone)
        out.append(i)
    return [i for i in out if id(i) not in gone]


def _latent(store: Instruction, i: Instruction) -> Instruction:
    inputs = [*i.inputs, *store.inputs]
    return Instruction(
        "latent_attention", inputs, i.outputs, layer=i.layer, heads=i.heads, scale=i.scale, group=i.group
    )


def _paged(
    store: Instruction, i: Instruction, used: Counter[Value], maker: dict[Value, Instruction], gone: set[int]
) -> Instruction:
    whole = Attention(
        "attention", [*i.inputs, *store.inputs], i.outputs, layer=i.layer, heads=i.heads, scale=i.scale,
        window=i.window, cap=i.cap, weight=i.weight, group=i.group,
    )  # fmt: skip
    q, k, v = whole.inputs
    a, b = maker.get(q), maker.get(k)
    if not (a and b and a.op == b.op == "rope" and a.rope is b.rope and used[q] == used[k] == 1):
        return whole
    gone |= {id(a), id(b)}
    whole.inputs = [a.inputs[0], b.inputs[0], v]
    whole.rope = a.rope
    normed = [(maker.get(turn.inputs[0]), turn.heads, used[turn.inputs[0]]) for turn in (a, b)]
    if all(n and n.op == "norm" and n.heads == heads and once == 1 for n, heads, once in normed):
        first, second = normed[0][0], normed[1][0]
        assert first and second and first.weight and second.weight
        shared = all(n.weight and n.weight.shape[0] * n.heads == n.inputs[0].width for n in (first, second))
        if shared and first.eps == second.eps:
            gone |= {id(first), id(second)}
            whole.inputs = [first.inputs[0], second.inputs[0], v]
            whole.q_norm, whole.k_norm, whole.eps = first.weight, second.weight, first.eps
    return whole


PASSES = (merge_linears, merge_adapts, gated, add_norm, linear_add_norm, attention)


def fuse(program: Program, output: Value) -> Program:
    """The program as it is run.

    What is kept is copied right behind the instruction that makes it, and no pass sees that, nor the choice of rows that is
    for the copy alone: so a program that keeps rows of its residual stream is fused, and rounds, like one that does not.
    """
    chains, rest = _set_aside(program, output)
    if chains:
        rest = _norm_first(rest, output, {c[0].inputs[0] for c in chains})
    for run in PASSES:
        rest = run(rest, output)
    return _with_copies(rest, chains) if chains else rest


def _set_aside(program: Program, output: Value) -> tuple[list[Program], Program]:
    """Each keep, with an instruction of its own that takes its rows where it is for some; and the program without them.

    A take that the program shares with a keep stands before whoever else reads it, as it does where nothing is kept."""
    maker, chains, rest = makers(program), list[Program](), Program()
    asked = {i.inputs[0] for i in program if i.op == "keep"}
    waiting: dict[Value, Instruction] = {}
    for i in program:
        if i.op == "take" and i.outputs[0] in asked and i.outputs[0] is not output:
            waiting[i.outputs[0]] = i
        elif i.op == "keep":
            source = maker.get(i.inputs[0])
            if source is None or source.op != "take":
                chains.append([i])
                continue
            own = Value(i.inputs[0].width, per_token=False)
            chains.append([Instruction("take", source.inputs, [own]), Instruction("keep", [own], hidden=i.hidden)])
        else:
            rest += [waiting.pop(v) for v in dict.fromkeys(i.reads()) if v in waiting]
            rest.append(i)
    return chains, rest


def _norm_first(program: Program, output: Value, kept: set[Value]) -> Program:
    """Where all rows of a sum are kept and some are taken to be normalized: normalize all, and take some of those.

    A norm works on each row alone. So the sum and its norm stay one instruction, as they are where the taking comes earlier."""
    used, reader = uses(program, output), {v: i for i in program for v in i.reads()}
    out, waiting = Program(), dict[Value, Instruction]()
    for i in program:
        after = reader.get(i.outputs[0]) if i.op == "take" else None
        if after is not None and i.inputs[0] in kept and plain(after) and used[i.outputs[0]] == 1:
            waiting[i.outputs[0]] = i
        elif i.inputs and i.inputs[0] in waiting:
            take = waiting.pop(i.inputs[0])
            whole = Value(i.outputs[0].width)
            out.append(Instruction("norm", take.inputs, [whole], weight=i.weight, eps=i.eps, heads=i.heads))
            out.append(Instruction("take", [whole], i.outputs))
        else:
            out.append(i)
    return out


def _with_copies(program: Program, chains: list[Program]) -> Program:
    """The program, with each keep behind the instruction that makes what it keeps."""
    maker = makers(program)
    behind: dict[int, Program] = {}
    for chain in chains:
        made = maker.get(chain[0].inputs[0])
        if made is None:
            raise ValueError(
                f"{chain[-1].hidden} cannot be kept: on this backend they are a part of another op, and never there"
            )
        behind.setdefault(id(made), []).extend(chain)
    return [each for i in program for each in (i, *behind.get(id(i), ()))]


def soon(program: Program, output: Value) -> set[Value]:
    """Norms that only products read, all of them before what was normalized is overwritten (linear_add_norm does, and who takes it)."""
    readers: dict[Value, list[int]] = {}
    products: dict[Value, list[int]] = {}
    overwritten: dict[Value, int] = {}
    for at, i in enumerate(program):
        for v in i.reads():
            readers.setdefault(v, []).append(at)
        if i.op in PRODUCTS:
            for x in {s.x for s in i.segments}:
                products.setdefault(x, []).extend([at] * len(i.segments))
        if i.op in ("linear_add_norm", "take"):  # what was taken may be the same memory, and be written over
            overwritten[i.inputs[0]] = at
    found: set[Value] = set()
    for i in program:
        if plain(i) or i.op in ("add_norm", "linear_add_norm"):
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
    """Products (by id) whose outputs are the queries, keys and values of one attention that rotates them itself, and mixtures whose
    output is the second thing that an add_norm adds: their readers add up parts."""
    used, maker = uses(program, output), makers(program)
    found: set[int] = set()
    for i in program:
        if i.op == "add_norm":
            mixture = maker.get(i.inputs[1])
            if mixture and mixture.op == "moe" and used[i.inputs[1]] == 1:
                found.add(id(mixture))
        if i.op == "attention" and i.rope is not None:
            linear = maker.get(i.inputs[0])
            alone = all(used[v] == 1 for v in i.inputs)
            if alone and linear and linear.op == "linear" and [s.out for s in linear.segments] == i.inputs:
                found.add(id(linear))
    return found


def routers(program: Program) -> set[int]:
    """Linears (by id) that make the router's logits of a mixture.

    They choose: their weights are never quantized, and their results are not rounded to half floats.
    """
    logits = {i.inputs[1] for i in program if i.op == "moe"}
    return {id(i) for i in program if i.op == "linear" and any(s.out in logits for s in i.segments)}


def wide(program: Program, output: Value) -> set[Value]:
    """Results of products that must not be rounded to half floats: what is only scaled, capped or the like, or adapted before it
    is the output, and what a router alone reads."""
    used, maker = uses(program, output), makers(program)
    found = {i.inputs[1] for i in program if i.op == "moe" and used[i.inputs[1]] == 1}
    at = output
    while True:
        found.add(at)
        made = maker.get(at)
        if made is None or not (made.op == "adapt" or (made.elementwise is not None and len(made.inputs) == 1)):
            return found
        source = made.inputs[made.outputs.index(at)]
        if used[source] > 1:
            return found
        at = source


def uses(program: Program, output: Value) -> Counter[Value]:
    """How often each value is read, the output once more."""
    count = Counter(v for i in program for v in i.reads())
    count[output] += 1
    return count


def makers(program: Program) -> dict[Value, Instruction]:
    """The instruction that writes each value."""
    return {v: i for i in program for v in i.writes()}
