"""Instructions become steps: functions over cells, each of which calls one kernel.

A cell holds the tensor of one value while it lives. Weights are looked up here, once; a step holds the tensors it needs.
What is loaded, and what of it may be quantized, follows from the instructions too: `groups` and `products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

from quire.backends.recorder import Instruction, Segment, Value
from quire.backends.torch.adapters import Stacks
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.experts import Mixture
from quire.backends.torch.fuse import Attention, loose, multiplied, routers, soon, uses, wide
from quire.backends.torch.kernels import Sight, TorchKernels
from quire.backends.torch.quantized import Weight
from quire.backends.torch.states import Heads, Inputs
from quire.backends.torch.weights import Weights
from quire.layouts import Experts, Layout

Cells: TypeAlias = list[Any]  # tensors of a run, by the number of their value; None before and after their lives
Step: TypeAlias = Callable[[Cells, DeviceBatch], None]
Product: TypeAlias = Callable[[Any, Weight, torch.Tensor | None], Any]


class Emitter:
    """Turns instructions into steps: functions over cells that call one kernel each."""

    def __init__(
        self,
        kernels: TorchKernels,
        weights: Weights,
        number: dict[Value, int],
        program: list[Instruction],
        output: Value,
        stacks: Stacks,
    ):
        self._kernels = kernels
        self._stacks = stacks
        self._weights = weights
        self._number = number
        self._output = output
        self._soon = soon(program, output)
        self._loose = loose(program, output)
        self._multiplied = multiplied(program, output)
        self._wide, self._output = wide(program, output), output
        self._used = uses(program, output)

    def step(self, i: Instruction, gone: list[Value]) -> Step:
        """The step that runs one instruction; the values in `gone` are not needed after it."""
        if i.op == "take":
            run = self._take(i, gone)
        elif i.elementwise is not None and i.op == i.elementwise.name:
            run = self._elementwise(i)
        else:
            run = getattr(self, f"_{i.op}")(i)
        dead = [self._number[v] for v in gone]

        def step(cells: Cells, batch: DeviceBatch) -> None:
            run(cells, batch)
            for at in dead:
                cells[at] = None

        return step

    def _at(self, values: list[Value]) -> list[int]:
        return [self._number[v] for v in values]

    def _embed(self, i: Instruction) -> Step:
        k, table, (out,) = self._kernels, self._matrix(i.weight), self._at(i.outputs)

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = k.embed(batch.ids, table)
            if batch.given is not None:
                cells[out] = k.place(cells[out], batch.given)

        return run

    def _norm(self, i: Instruction) -> Step:
        k, weight, eps, heads = self._kernels, self._weight(i.weight), i.eps, i.heads
        (x,), (out,) = self._at(i.inputs), self._at(i.outputs)
        hand_on = self._readers(i.outputs[0]) if i.outputs[0] in self._soon else ()

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = k.rms_norm(cells[x], weight, eps, heads=heads, soon=hand_on)

        return run

    def _layer_norm(self, i: Instruction) -> Step:
        bias = None if i.bias is None else self._weight(i.bias)
        op = partial(self._kernels.layer_norm, weight=self._weight(i.weight), bias=bias, eps=i.eps, heads=i.heads)
        return self._single(i, op)

    def _add_norm(self, i: Instruction) -> Step:
        k, weight, eps, (a, b) = self._kernels, self._weight(i.weight), i.eps, self._at(i.inputs)
        total, out = self._at(i.outputs)
        hand_on = self._readers(i.outputs[1]) if i.outputs[1] in self._soon else ()

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[total], cells[out] = k.add_norm(cells[a], cells[b], weight, eps, soon=hand_on)

        return run

    def _linear(self, i: Instruction) -> Step:
        x = self._number[i.segments[0].x]
        outs = self._at([s.out for s in i.segments])
        if len(outs) == 1 and i.segments[0].out in self._wide:
            return self._logits(i.segments[0])
        op = partial(self._kernels.linear, loose=True) if id(i) in self._loose else self._kernels.linear
        product = self._product(i.segments, op)
        if product is None:
            parts = self._linear_parts(i.segments)

            def run_parts(cells: Cells, batch: DeviceBatch) -> None:
                for at, part in zip(outs, parts, strict=True):
                    cells[at] = part(cells[x])

            return run_parts
        if len(outs) == 1:

            def run_one(cells: Cells, batch: DeviceBatch) -> None:
                cells[outs[0]] = product(cells[x])

            return run_one
        widths = [s.out.width for s in i.segments]

        def run(cells: Cells, batch: DeviceBatch) -> None:
            for at, part in zip(outs, product(cells[x]).split(widths, dim=-1), strict=True):
                cells[at] = part

        return run

    def _logits(self, segment: Segment) -> Step:
        op, weight, bias = self._kernels.logits, self._matrix(segment.weight), self._bias([segment])
        x, out, last = self._number[segment.x], self._number[segment.out], segment.out == self._output

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = op(cells[x], weight, bias, into=batch.into if last else None)

        return run

    def _gated(self, i: Instruction) -> Step:
        k, x, (out,) = self._kernels, self._number[i.segments[0].x], self._at(i.outputs)
        assert i.elementwise is not None
        op = k.elementwise(i.elementwise)  # refuses what it does not know
        product = self._product(i.segments, partial(k.gated, act=i.elementwise, soon=self._readers(i.outputs[0])))
        if product is None:  # the halves are not one matrix: a part of them is shared with another product
            parts = self._linear_parts(i.segments)

            def run_parts(cells: Cells, batch: DeviceBatch) -> None:
                cells[out] = op(*(part(cells[x]) for part in parts))

            return run_parts

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = product(cells[x])

        return run

    def _linear_add_norm(self, i: Instruction) -> Step:
        k, norm, eps = self._kernels, self._weight(i.weight), i.eps
        segment = i.segments[0]
        weight, bias = self._matrix(segment.weight), self._bias(i.segments)
        x, (residual,), (total, out) = self._number[segment.x], self._at(i.inputs), self._at(i.outputs)
        hand_on = self._readers(i.outputs[1]) if i.outputs[1] in self._soon else ()

        def run(cells: Cells, batch: DeviceBatch) -> None:
            own = cells[x], weight, bias, cells[residual], norm, eps
            cells[total], cells[out] = k.linear_add_norm(*own, soon=hand_on)

        return run

    def _rope(self, i: Instruction) -> Step:
        k, rope, heads, (x,), (out,) = self._kernels, i.rope, i.heads, self._at(i.inputs), self._at(i.outputs)
        assert rope is not None

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = k.rope(cells[x], batch, rope, heads)

        return run

    def _attention(self, i: Attention) -> Step:
        kernels, (q, k, v), (out,) = self._kernels, self._at(i.inputs), self._at(i.outputs)
        sight = Sight(i.window, i.cap, None if i.weight is None else self._weight(i.weight))
        norms = None
        if i.q_norm is not None and i.k_norm is not None:
            norms = self._weight(i.q_norm), self._weight(i.k_norm), i.eps
        cache = kernels.caches[i.group][i.layer]
        told = {"cache": cache, "heads": i.heads, "scale": i.scale, "rope": i.rope, "sight": sight, "norms": norms}

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = kernels.attention(cells[q], cells[k], cells[v], batch, **told)

        return run

    def _latent_attention(self, i: Instruction) -> Step:
        kernels, (q, k), (out,) = self._kernels, self._at(i.inputs), self._at(i.outputs)
        told = {"cache": kernels.caches[i.group][i.layer], "heads": i.heads, "scale": i.scale}

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = kernels.latent_attention(cells[q], cells[k], batch, **told)

        return run

    def _conv(self, i: Instruction) -> Step:
        kernels, weight, (x,), (out,) = (
            self._kernels, self._weight(i.weight), self._at(i.inputs), self._at(i.outputs)
        )  # fmt: skip
        told = {"layer": i.layer, "group": i.group, "at": i.at}

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = kernels.conv(cells[x], weight, batch, **told)

        return run

    def _delta_rule(self, i: Instruction) -> Step:
        kernels, (qkv, a, b), (out,) = self._kernels, self._at(i.inputs), self._at(i.outputs)
        decay, bias = self._weight(i.weight), self._weight(i.bias)
        heads = Heads(i.key_heads, i.heads, i.key_dim, i.outputs[0].width // i.heads)
        told = {"layer": i.layer, "group": i.group, "at": i.at}

        def run(cells: Cells, batch: DeviceBatch) -> None:
            inputs = Inputs(cells[qkv], cells[a], cells[b], decay, bias)
            cells[out] = kernels.delta_rule(inputs, batch, heads, **told)

        return run

    def _encode(self, i: Instruction) -> Step:
        kernels, (q, k, v), (out,), heads, scale = (
            self._kernels, self._at(i.inputs), self._at(i.outputs), i.heads, i.scale
        )  # fmt: skip

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = kernels.encode(cells[q], cells[k], cells[v], batch, heads=heads, scale=scale)

        return run

    def _keep(self, i: Instruction) -> Step:
        """A copy: a sum that is kept may lie where the next one is added up."""
        (x,), which = self._at(i.inputs), i.hidden
        assert which is not None

        def run(cells: Cells, batch: DeviceBatch) -> None:
            rows = cells[x]
            if batch.hidden_into is None:
                batch.hidden[which] = rows.clone()
            else:
                batch.hidden[which] = batch.hidden_into[which][: rows.shape[0]].copy_(rows)

        return run

    def _adapt(self, i: Instruction) -> Step:
        kernels, outs, taken = self._kernels, self._at(i.outputs), not i.outputs[0].per_token
        *ys, x = self._at(i.inputs)
        stacks = [self._stacks.by_target[target] for target in i.targets]
        alone = all(self._used[y] == 1 for y in i.inputs[:-1])

        def run(cells: Cells, batch: DeviceBatch) -> None:
            made = kernels.adapt([cells[y] for y in ys], cells[x], stacks, batch, taken=taken, alone=alone)
            for at, y in zip(outs, made, strict=True):
                cells[at] = y

        return run

    def _elementwise(self, i: Instruction) -> Step:
        assert i.elementwise is not None
        op, ins, (out,) = self._kernels.elementwise(i.elementwise, i.number), self._at(i.inputs), self._at(i.outputs)

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = op(*[cells[at] for at in ins])

        return run

    def _join(self, i: Instruction) -> Step:
        return self._pairwise(i, partial(self._kernels.join, heads=i.heads))

    def _head_linear(self, i: Instruction) -> Step:
        return self._single(i, partial(self._kernels.head_linear, weight=self._weight(i.weight), heads=i.heads))

    def _moe(self, i: Instruction) -> Step:
        return self._pairwise(i, partial(self._kernels.moe, mixture=self._mixture(i), loose=id(i) in self._loose))

    def _mixture(self, i: Instruction) -> Mixture:
        """The weights of a mixture, those of all experts in one tensor each."""
        e, routing = i.experts, i.routing
        assert e is not None and routing is not None
        none = torch.zeros(e.gate[0].shape[0], device=self._kernels.device)
        gates, ups = ([self._weight(b) for b in bs] or [none] * e.count for bs in (e.gate_bias, e.up_bias))
        biased = bool(e.gate_bias or e.up_bias)
        return Mixture(
            both=self._weights.stacked(_pairs(e)),
            down=self._weights.stacked(e.down),
            both_bias=torch.cat([torch.stack(gates), torch.stack(ups)], 1) if biased else None,
            down_bias=torch.stack([self._weight(b) for b in e.down_bias]) if e.down_bias else None,
            count=e.count,
            limit=e.limit,
            routing=routing,
            routing_bias=None if routing.bias is None else self._weight(routing.bias),
        )

    def _take(self, i: Instruction, gone: list[Value]) -> Step:
        k, (x,), (out,) = self._kernels, self._at(i.inputs), self._at(i.outputs)
        last = i.inputs[0] in gone  # what comes next may then write over it

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = cells[x] if last and batch.all_taken else k.take(cells[x], batch.logit_rows)

        return run

    def _single(self, i: Instruction, op: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        (x,), (out,) = self._at(i.inputs), self._at(i.outputs)

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = op(cells[x])

        return run

    def _pairwise(self, i: Instruction, op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Step:
        (a, b), (out,) = self._at(i.inputs), self._at(i.outputs)

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = op(cells[a], cells[b])

        return run

    def _readers(self, value: Value) -> tuple[Weight, ...]:
        """The weights of the products that read it, if nothing else does."""
        found: list[Weight] = []
        for segments in self._multiplied.get(value, ()):
            layouts = [s.weight for s in segments]
            whole = self._weights.joined(layouts)
            found += [self._weights[w] for w in layouts] if whole is None else [whole]
        return tuple(found)

    def _product(self, segments: list[Segment], op: Product) -> Callable[[Any], Any] | None:
        """x -> x times every segment's weight, side by side; None when those do not lie side by side."""
        whole, bias = self._weights.joined([s.weight for s in segments]), self._bias(segments)
        return None if whole is None else lambda x: op(x, whole, bias)

    def _linear_parts(self, segments: list[Segment]) -> list[Callable[[Any], Any]]:
        products = [self._product([s], self._kernels.linear) for s in segments]
        return [p for p in products if p is not None]  # one weight always lies beside itself

    def _bias(self, segments: list[Segment]) -> torch.Tensor | None:
        if all(s.bias is None for s in segments):
            return None
        parts = [
            torch.zeros(s.out.width, device=self._kernels.device) if s.bias is None else self._weight(s.bias)
            for s in segments
        ]
        return torch.cat(parts).to(self._kernels.dtype)

    def _matrix(self, layout: Layout | None) -> Weight:
        assert layout is not None  # the recorder gives one to every op that reads one
        return self._weights[layout]

    def _weight(self, layout: Layout | None) -> torch.Tensor:
        held = self._matrix(layout)
        assert isinstance(held, torch.Tensor)  # a vector, or a matrix by head: never quantized
        return held


def _pairs(experts: Experts) -> list[Layout]:
    """gate and up of each expert, one after another."""
    return [w for pair in zip(experts.gate, experts.up, strict=True) for w in pair]


def groups(program: list[Instruction]) -> Iterator[list[Layout]]:
    """The weights that are loaded together, in the order of use."""
    for i in program:
        together = [[s.weight for s in i.segments]] if i.segments else []
        if i.experts is not None:
            together += [_pairs(i.experts), list(i.experts.down)]
        known = {id(w) for group in together for w in group}
        yield from ([w] for w in i.weights() if id(w) not in known)
        yield from together


def products(program: list[Instruction]) -> set[int]:
    """Ids of the layouts that may be quantized: what is multiplied, but not what `kept_back` names."""
    found = {id(s.weight) for i in program for s in i.segments}
    return (found | stacks(program)) - kept_back(program).keys()


def stacks(program: list[Instruction]) -> set[int]:
    """Ids of the experts' matrices: those of a group must be kept alike."""
    return {id(w) for i in program if i.experts is not None for w in (*_pairs(i.experts), *i.experts.down)}


def kept_back(program: list[Instruction]) -> dict[int, str]:
    """Ids of matrices that are multiplied and yet are not quantized, each with what it is."""
    alone = routers(program)
    found = {id(s.weight): "router" for i in program if id(i) in alone for s in i.segments}
    return found | {id(i.weight): "by head" for i in program if i.op == "head_linear"}


def ends(program: list[Instruction], output: Value) -> list[list[Value]]:
    """For each instruction, the values that nothing reads after it."""
    last: dict[Value, int] = {}
    for at, i in enumerate(program):
        for v in (*i.reads(), *i.writes()):
            last[v] = at
    found: list[list[Value]] = [[] for _ in program]
    for v, at in last.items():
        if v is not output:
            found[at].append(v)
    return found
