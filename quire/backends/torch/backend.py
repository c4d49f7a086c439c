"""The torch backend: records a forward, brings its weights to a device, and runs it there.

A program can be used in two ways. `run` is the Program contract: numpy in, numpy out, waited for. `launch` is for a
runner that keeps its state on the device (runner/device_runner.py): tensors in, float32 logits out as a tensor, and no
wait. Both execute the same list of instructions. Nothing here knows slots, sampling or graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from quire.backends.batch import Batch
from quire.backends.ops import KV, KV_DTYPES, TABLE, Forward, check_kv
from quire.backends.recorder import Instruction, Segment, Value, record
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.fuse import fuse, loose, multiplied, soon
from quire.backends.torch.kernels import TorchKernels
from quire.backends.torch.quantized import Weight
from quire.backends.torch.sampler import DeviceSampler
from quire.backends.torch.weights import Packed, Weights
from quire.config import available_memory
from quire.layouts import Dense, Floats, Layout
from quire.observe.errors import Unsupported

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RESERVE = 2 << 30, 0.03  # device memory left alone, and a share of all: sampling, graphs, what libraries take later

Cells: TypeAlias = list[Any]  # tensors of a run, by the number of their value; None before and after their lives
Step: TypeAlias = Callable[[Cells, DeviceBatch], None]
Product: TypeAlias = Callable[[Any, Weight, torch.Tensor | None], Any]


class DeviceProgram(Protocol):
    """A program whose inputs and outputs stay on a device."""

    device: torch.device
    kv: KV
    shares: bool  # whether it is worth telling a launch which rows share a prefix
    graphs: bool  # whether a launch may be captured and replayed
    sampler: DeviceSampler  # who chooses from its logits

    def launch(self, batch: DeviceBatch) -> torch.Tensor:
        """Logits of batch.logit_rows, float32 [L, V], on the device; valid until the next launch. Does not wait."""
        ...


class TorchProgram:
    """A recorded forward as a list of steps over cells, and its KV pool."""

    def __init__(self, kernels: TorchKernels, steps: list[Step], count: int, inputs: dict[str, int], output: int):
        self.device = kernels.device
        self.kv = kernels.kv
        self.kernels = kernels
        self.sampler = kernels.sampler()
        self.graphs = False
        self.shares = False
        self._steps = steps
        self._count = count
        self._inputs = inputs
        self._output = output

    @torch.inference_mode()
    def launch(self, batch: DeviceBatch, inputs: Mapping[str, torch.Tensor] = {}) -> torch.Tensor:
        cells: Cells = [None] * self._count
        for name, at in self._inputs.items():
            cells[at] = inputs[name]
        for step in self._steps:
            step(cells, batch)
        return self._deliver(cells[self._output].float(), batch)

    def _deliver(self, result: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """The result, where the batch wants it."""
        if batch.into is None:
            return result
        batch.into[: result.shape[0]].copy_(result)
        return batch.into[: result.shape[0]]

    def run(self, batch: Batch, inputs: Mapping[str, Floats] = {}) -> Floats:
        if inputs.keys() != self._inputs.keys():
            raise ValueError(f"the program takes the inputs {sorted(self._inputs)}, not {sorted(inputs)}")
        given = {name: torch.tensor(x, dtype=self.kernels.dtype, device=self.device) for name, x in inputs.items()}
        return self.launch(DeviceBatch.of(batch, self.device), given).cpu().numpy()


class TorchBackend:
    """Programs on one torch device. `random` takes shapes from the layouts and numbers from a seed."""

    name = "torch"
    kv_dtypes: tuple[str, ...] = tuple(KV_DTYPES)
    kv_groups = False
    kernels: Callable[[KV, torch.device, torch.dtype], TorchKernels] = TorchKernels

    def __init__(
        self,
        device: str = "auto",
        dtype: str = "auto",
        *,
        threads: int | None = None,
        random: bool = False,
        quantize: str = "none",
    ):
        self.device = pick_device(device)
        if threads is not None and self.device.type == "cpu":
            torch.set_num_threads(threads)  # torch has one pool for the whole process
        self.dtype = pick_dtype(dtype, self.device)
        self.owns_memory = self.device.type == "cuda"
        self.weights = Weights(self.device, self.dtype, random=random, quantize=quantize)

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes

    def told(self) -> list[str]:
        return self.weights.told()

    def compile(
        self,
        forward: Forward,
        *,
        kv: KV,
        max_tokens: int,
        max_rows: int,
        inputs: Mapping[str, int] = {},
        packed: Packed | None = None,
    ) -> TorchProgram:
        check_kv(kv, self)
        recording = record(forward, kv, inputs)
        program = fuse(recording.instructions, recording.output)
        self.weights.load(list(_groups(program)), packed, {id(s.weight) for i in program for s in i.segments})
        kernels = type(self).kernels(kv, self.device, self.dtype)
        number: dict[Value, int] = {v: n for n, v in enumerate(recording.inputs.values())}
        for i in program:
            for v in i.writes():
                number[v] = len(number)
        emit = Emitter(kernels, self.weights, number, program, recording.output)
        steps = [emit.step(i, gone) for i, gone in zip(program, _ends(program, recording.output), strict=True)]
        names = {name: number[v] for name, v in recording.inputs.items()}
        return self.wrap(TorchProgram(kernels, steps, len(number), names, number[recording.output]))

    def wrap(self, program: TorchProgram) -> TorchProgram:
        """A device may say more about its programs."""
        return program

    def measure(self, forward: Forward, kv: KV, *, max_tokens: int, max_rows: int, packed: Packed | None = None) -> int:
        """Bytes that a KV pool may take here: what is free with the weights loaded and the largest step running.

        `kv` is the shape of a page; the weights stay for the `compile` that follows.
        """
        if not self.owns_memory:
            return available_memory()
        need = -(-max_tokens // kv.page_size)
        small = replace(kv, pages=need)
        program = self.compile(forward, kv=small, max_tokens=max_tokens, max_rows=max_rows, packed=packed)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        program.run(largest(max_tokens, max_rows, kv.page_size))
        step = torch.cuda.max_memory_allocated(self.device) - before
        del program
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, free - step - RESERVE[0] - int(total * RESERVE[1]))

    def describe(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        if self.device.type == "cuda":
            return f"{self.name} ({torch.cuda.get_device_name(self.device)}, {kind})"
        return f"{self.name} ({self.device}, {kind})"

    def implementations(self) -> dict[str, str]:
        return {op.name: f"torch ({self.device.type})" for op in TABLE}


class Emitter:
    """Turns instructions into steps: functions over cells that call one kernel each."""

    def __init__(
        self,
        kernels: TorchKernels,
        weights: Weights,
        number: dict[Value, int],
        program: list[Instruction],
        output: Value,
    ):
        self._kernels = kernels
        self._weights = weights
        self._number = number
        self._output = output
        self._soon = soon(program, output)
        self._loose = loose(program, output)
        self._multiplied = multiplied(program, output)

    def step(self, i: Instruction, gone: list[Value]) -> Step:
        """One instruction; the values in `gone` are not needed after it."""
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

        return run

    def _norm(self, i: Instruction) -> Step:
        k, weight, eps, (x,), (out,) = (
            self._kernels,
            self._weight(i.weight),
            i.eps,
            self._at(i.inputs),
            self._at(i.outputs),
        )
        hand_on = self._readers(i.outputs[0]) if i.outputs[0] in self._soon else ()

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = k.rms_norm(cells[x], weight, eps, soon=hand_on)

        return run

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
        last = len(outs) == 1 and i.segments[0].out is self._output
        op = self._kernels.logits if last else self._kernels.linear
        if id(i) in self._loose:
            op = partial(op, loose=True)
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

    def _gated(self, i: Instruction) -> Step:
        k, x, (out,) = self._kernels, self._number[i.segments[0].x], self._at(i.outputs)
        product = self._product(i.segments, partial(k.gated, soon=self._readers(i.outputs[0])))
        if product is None:  # the halves are not one matrix: a part of them is shared with another product
            parts, op = self._linear_parts(i.segments), k.swiglu

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

    def _attention(self, i: Instruction) -> Step:
        kernels, (q, k, v), (out,) = self._kernels, self._at(i.inputs), self._at(i.outputs)
        told = {"layer": i.layer, "heads": i.heads, "scale": i.scale, "rope": i.rope}

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = kernels.attention(cells[q], cells[k], cells[v], batch, **told)

        return run

    def _add(self, i: Instruction) -> Step:
        return self._pairwise(i, self._kernels.add)

    def _swiglu(self, i: Instruction) -> Step:
        return self._pairwise(i, self._kernels.swiglu)

    def _take(self, i: Instruction) -> Step:
        k, (x,), (out,) = self._kernels, self._at(i.inputs), self._at(i.outputs)

        def run(cells: Cells, batch: DeviceBatch) -> None:
            cells[out] = k.take(cells[x], batch.logit_rows)

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
        assert isinstance(held, torch.Tensor)  # a vector: never quantized
        return held


def _groups(program: list[Instruction]) -> Iterator[list[Layout]]:
    """What is loaded together, in the order of use."""
    for i in program:
        if i.weight is not None:
            yield [i.weight]
        if i.segments:
            yield [s.weight for s in i.segments]
        biases: list[Layout] = [s.bias for s in i.segments if isinstance(s.bias, Dense)]
        yield from ([b] for b in biases)


def _ends(program: list[Instruction], output: Value) -> list[list[Value]]:
    """For each instruction, the values that nothing reads after it."""
    last: dict[Value, int] = {}
    for at, i in enumerate(program):
        for v in (*i.reads(), *i.writes()):
            last[v] = at
    ends: list[list[Value]] = [[] for _ in program]
    for v, at in last.items():
        if v is not output:
            ends[at].append(v)
    return ends


def largest(max_tokens: int, max_rows: int, page_size: int) -> Batch:
    """One sequence that fills a step, every logit row wanted."""
    count = np.arange(max_tokens, dtype=np.int32)
    pages = np.arange(-(-max_tokens // page_size), dtype=np.int32)[None]
    return Batch(
        ids=np.zeros(max_tokens, np.int32),
        pos=count,
        q_start=np.array([0, max_tokens], np.int32),
        kv_len=np.array([max_tokens], np.int32),
        pages=pages,
        write=count,
        logit_rows=np.zeros(max_rows, np.int32),
    )


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Unsupported(f"torch knows no device {name!r}", cure="use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported("torch sees no CUDA device here", cure="use --device cpu, or install a torch with CUDA")
    if device.type not in ("cpu", "cuda"):
        raise Unsupported(f"the device {name!r} was never tried here", cure="use cpu, cuda or cuda:N")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute dtype; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise Unsupported(f"there is no dtype {name!r} to compute in", cure=f"there are: auto, {', '.join(DTYPES)}")
    return DTYPES[name]
