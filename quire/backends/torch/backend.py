"""The torch backend: records a forward, brings its weights to a device, and runs it there.

A program can be used in two ways. `run` is the Program contract: numpy in, numpy out, waited for. `launch` is for a
runner that keeps its state on the device (runner/device/runner.py): tensors in, float32 logits out as a tensor, and no
wait. Both execute the same list of instructions. Nothing here knows slots, sampling or graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.backends.adapters import Pair, Target, by_slot
from quire.backends.batch import Batch, Table
from quire.backends.early import take_early
from quire.backends.elementwise import ELEMENTWISE
from quire.backends.ops import KV, TABLE, Forward, check_kv
from quire.backends.outputs import Hidden, kept
from quire.backends.pages import PageBytes, PageCopy, PageIds, PageLayout
from quire.backends.recorder import Instruction, Recording, Value, record
from quire.backends.torch.adapters import Stacks, without
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.elementwise import EXPRESSIONS
from quire.backends.torch.emit import Cells, Emitter, Step, ends, groups, kept_back, products, stacks
from quire.backends.torch.fuse import fuse
from quire.backends.torch.kernels import TorchKernels
from quire.backends.torch.pages import DevicePages
from quire.backends.torch.sampler import DeviceSampler
from quire.backends.torch.weights import Packed, Weights
from quire.config import available_memory, within_openmp
from quire.layouts import Floats
from quire.machine import cpu_model
from quire.observe.errors import Unsupported

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RESERVE = 2 << 30, 0.03  # device memory left alone, and a share of all: sampling, graphs, what libraries take later


class DeviceProgram(Protocol):
    """A program whose inputs and outputs stay on a device."""

    device: torch.device
    kv: KV
    shares: bool  # whether it is worth telling a launch which rows share a prefix
    graphs: bool  # whether a launch may be captured and replayed
    sparse: bool  # whether a row goes through a part of the weights alone: then launching a step takes longer than most steps do
    adapts: bool  # whether captured graphs serve steps with adapters: their memory never moves
    sampler: DeviceSampler  # who chooses from its logits

    keep: tuple[Hidden, ...]  # rows that every launch leaves in batch.hidden

    def launch(self, batch: DeviceBatch) -> torch.Tensor:
        """Logits of batch.logit_rows, float32 [L, V], on the device; valid until the next launch. Does not wait."""
        ...

    def hidden_buffers(self, rows: int) -> dict[Hidden, torch.Tensor] | None:
        """Memory for so many rows of each kind that it keeps, for batch.hidden_into; None, where it keeps none."""
        ...

    def page_buffer(self, group: int, count: int) -> PageBytes: ...

    def read_pages(self, group: int, pages: PageIds, out: PageBytes | None = None) -> PageCopy: ...

    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes) -> PageCopy: ...

    def compile_only(self) -> AbstractContextManager[None]:
        """Launches in here mean nothing: they are for what must be compiled, which may then be done faster."""
        ...


@dataclass(slots=True)
class Steps:
    """A recorded forward, ready to run."""

    steps: list[Step]
    count: int  # cells
    inputs: dict[str, int]  # cells of the named inputs
    output: int
    widths: dict[Hidden, int]  # of rows that are kept
    sparse: bool  # whether experts are among them


class TorchProgram:
    """A recorded forward as a list of steps over cells, and its KV pools."""

    def __init__(self, kernels: TorchKernels, plain: Steps, adapted: Steps | None, held: Stacks):
        self.device = kernels.device
        self.kv = kernels.kv
        self.kernels = kernels
        self.sampler = kernels.sampler()
        self.graphs = False
        self.shares = False
        self.sparse = plain.sparse
        self.adapts = False
        self.compile_only: Callable[[], AbstractContextManager[None]] = nullcontext
        self._plain = plain
        self._adapted = adapted  # for steps with adapters in them
        self._held = held
        self._pages = pages_of(kernels)
        self._hidden: dict[Hidden, torch.Tensor] = {}  # of the last run

    @torch.inference_mode()
    def launch(self, batch: DeviceBatch, inputs: Mapping[str, torch.Tensor] = {}) -> torch.Tensor:
        own = self._plain if batch.adapters is None or self._adapted is None else self._adapted
        cells: Cells = [None] * own.count
        for name, at in own.inputs.items():
            cells[at] = inputs[name]
        for step in own.steps:
            step(cells, batch)
        return self._deliver(cells[own.output].float(), batch)

    @property
    def has_targets(self) -> bool:
        """Whether adapters may be placed."""
        return self._adapted is not None

    def place(self, slot: int, pairs: Mapping[Target, Pair]) -> None:
        self._held.place(slot, pairs)

    def page_layout(self, group: int) -> PageLayout:
        return self._pages.layout(group)

    def page_buffer(self, group: int, count: int) -> PageBytes:
        """Pinned, where the device is a GPU: pages in other memory are copied while the caller waits."""
        return self._pages.buffer(group, count)

    def read_pages(
        self, group: int, pages: PageIds, out: PageBytes | None = None, *, layers: range | None = None
    ) -> PageCopy:
        return self._pages.read(group, pages, out, layers)

    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes, *, layers: range | None = None) -> PageCopy:
        return self._pages.write(group, pages, buffer, layers)

    @property
    def keep(self) -> tuple[Hidden, ...]:
        return tuple(self._plain.widths)

    def hidden_buffers(self, rows: int) -> dict[Hidden, torch.Tensor] | None:
        options = {"dtype": self.kernels.dtype, "device": self.device}
        return {which: torch.empty(rows, n, **options) for which, n in self._plain.widths.items()} or None

    def hidden(self, which: Hidden) -> Floats:
        return kept(self._hidden, which).float().cpu().numpy()

    def _deliver(self, result: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """The result, where the batch wants it."""
        if batch.into is None:
            return result
        own = batch.into[: result.shape[0]]
        return own if own.data_ptr() == result.data_ptr() else own.copy_(result)

    def run(self, batch: Batch, inputs: Mapping[str, Floats] = {}) -> Floats:
        if inputs.keys() != self._plain.inputs.keys():
            raise ValueError(f"the program takes the inputs {sorted(self._plain.inputs)}, not {sorted(inputs)}")
        given = {name: torch.tensor(x, dtype=self.kernels.dtype, device=self.device) for name, x in inputs.items()}
        own = DeviceBatch.of(batch, self.device)
        result = self.launch(own, given).cpu().numpy()
        self._hidden = own.hidden
        return result


def pages_of(kernels: TorchKernels) -> DevicePages:
    """Copies of the pages of these kernels' pools."""
    dtypes, words = [], []
    for pool in kernels.pools:
        state = pool.kv.state
        dtypes.append("float32" if state else str(pool.numbers.dtype).removeprefix("torch."))
        words.append([kernels.states.words(pool.group)] if state else pool.words)
    return DevicePages(kernels.kv, dtypes, words, kernels.device)


class TorchBackend:
    """Programs on one torch device. `random` takes shapes from the layouts and numbers from a seed."""

    name = "torch"
    kv_dtypes: tuple[str, ...] = ("f16", "int8", "fp8")
    kv_dtype = "f16"
    kv_states = True
    kernels: Callable[[KV, torch.device, torch.dtype], TorchKernels] = TorchKernels
    stacks: type[Stacks] = Stacks  # where adapters lie

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
        if self.device.type == "cpu":
            # One pool for the whole process. On ARM its kernels deal work out to as many threads as were asked for, and what OpenMP
            # gives no thread for stays undone.
            torch.set_num_threads(within_openmp(threads or torch.get_num_threads()))
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
        keep: Sequence[Hidden] = (),
    ) -> TorchProgram:
        check_kv(kv, self)
        recording = take_early(record(forward, kv, inputs, keep))
        targets = [target for i in recording.instructions for target in i.targets]
        # Steps without adapters are what they always were: recorded, and fused, without them. Where bits may not depend on
        # who else is in a step, they too are those with adapters, which leave alone who has none.
        plain = without(take_early(record(forward, kv, inputs, keep))) if targets else recording
        first, second = self._load(plain, packed), self._load(recording, None) if targets else None
        kernels = type(self).kernels(kv, self.device, self.dtype)
        together = [i.targets for i in second or () if i.op == "adapt"]
        held = type(self).stacks(together, self.device, self.dtype)
        adapted = None if second is None else self._steps(second, recording, kernels, held)
        usual = adapted if adapted is not None and kernels.invariant else self._steps(first, plain, kernels, held)
        made = TorchProgram(kernels, usual, adapted, held)
        for slot, pairs in by_slot(targets).items():
            made.place(slot, pairs)
        return self.wrap(made)

    def _load(self, recording: Recording, packed: Packed | None) -> list[Instruction]:
        """The program as it is run, its weights brought over."""
        program = fuse(recording.instructions, recording.output)
        self.weights.load(list(groups(program)), packed, products(program), kept_back(program), stacks(program))
        return program

    def _steps(self, program: list[Instruction], recording: Recording, kernels: TorchKernels, held: Stacks) -> Steps:
        number: dict[Value, int] = {v: n for n, v in enumerate(recording.inputs.values())}
        for i in program:
            for v in i.writes():
                number[v] = len(number)
        emit = Emitter(kernels, self.weights, number, program, recording.output, held)
        steps = [emit.step(i, gone) for i, gone in zip(program, ends(program, recording.output), strict=True)]
        names = {name: number[v] for name, v in recording.inputs.items()}
        widths = {i.hidden: i.inputs[0].width for i in program if i.hidden is not None}
        sparse = any(i.op == "moe" for i in program)
        return Steps(steps, len(number), names, number[recording.output], widths, sparse)

    def wrap(self, program: TorchProgram) -> TorchProgram:
        """A device may say more about its programs."""
        return program

    def measure(
        self,
        forward: Forward,
        kv: KV,
        *,
        max_tokens: int,
        max_rows: int,
        packed: Packed | None = None,
        keep: Sequence[Hidden] = (),
    ) -> int:
        """Bytes that a KV pool may take here: what is free with the weights loaded and the largest step running.

        `kv` is the shape of a page; the weights stay for the `compile` that follows.
        """
        if not self.owns_memory:
            return available_memory()
        need = -(-max_tokens // kv.page_size)
        small = kv.sized([1 if own.state else need for own in kv.groups])
        program = self.compile(forward, kv=small, max_tokens=max_tokens, max_rows=max_rows, packed=packed, keep=keep)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        program.run(largest(max_tokens, max_rows, kv.page_size, kv.more))
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

    def computes(self) -> str:
        """The arithmetic of this backend, as text: another device or another release of torch may sum in another order."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_model()
        return f"{self.name}, torch {torch.__version__}, {device}, {self.dtype}"

    def implementations(self) -> dict[str, str]:
        return {
            op.name: f"torch ({self.device.type})"
            for op in TABLE
            if op.name not in ELEMENTWISE or op.name in EXPRESSIONS
        }


def largest(max_tokens: int, max_rows: int, page_size: int, more: Sequence[KV] = ()) -> Batch:
    """One sequence that fills a step, every logit row wanted. All of it lies in every group's pool, in order; of states, the last."""
    count = np.arange(max_tokens, dtype=np.int32)
    pages = np.arange(-(-max_tokens // page_size), dtype=np.int32)[None]
    last = np.where(pages == pages[0, -1], 0, -1).astype(np.int32)
    return Batch(
        ids=np.zeros(max_tokens, np.int32),
        pos=count,
        q_start=np.array([0, max_tokens], np.int32),
        kv_len=np.array([max_tokens], np.int32),
        pages=pages,
        write=count,
        logit_rows=np.zeros(max_rows, np.int32),
        more=tuple(Table(last if own.state else pages, count) for own in more),
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
