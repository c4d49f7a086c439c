"""Building an engine from a configuration: file, model, memory, backend, scheduler, runner, in that order.

Everything decided on the way is a line in `EngineInfo.decisions`; nothing is printed here. What cannot be honoured as asked
(a context the model was not made for, a pool that is not there) is refused before any weight is read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from quire.backends.choose import open_backend
from quire.backends.detect import detect
from quire.backends.kv import KV_DTYPES
from quire.backends.ops import QUANTIZE, Backend, Tells
from quire.config import (
    EngineConfig,
    Environment,
    asked_threads,
    available_cores,
    resolve_step,
)
from quire.engine.construction.adapters import check_loras
from quire.engine.construction.generating import build_writing
from quire.engine.construction.parts import Parts
from quire.engine.construction.sizes import choose_kv
from quire.engine.construction.tasks import TASKS, task_of
from quire.engine.engine import Engine
from quire.engine.types import EngineInfo
from quire.layouts import Layout
from quire.machine import look_at_cores
from quire.models import Model, Stretches, load
from quire.observe.errors import BadRequest, Unsupported
from quire.runner.speculate import names
from quire.weights.checkpoint import Opened, open_checkpoint, weight_bytes
from quire.weights.gguf.file import GGUF, expanded

MOST_DRAFTS = 32  # for one sequence

Progress = Callable[[int, int], None]  # bytes of weights taken over, of all


def build_engine(
    config: EngineConfig, env: Environment, progress: Progress | None = None, checkpoint: Opened | None = None
) -> tuple[Engine, EngineInfo]:
    """Load the model and make it ready. `checkpoint` is what is at the path when the caller has it open already."""
    watch = _Watch()
    _check(config)
    config, device_lines = choose_backend(config)
    seqs, tokens = resolve_step(config.max_seqs, config.max_batch_tokens, config.backend == "cuda")
    config = dataclasses.replace(config, max_seqs=seqs, max_batch_tokens=tokens)
    source = _source(config, checkpoint)
    model = source.model
    if config.context is not None and isinstance(model, Stretches):
        model.stretch(config.context)
    watch.lap("model")
    threads, cores, threads_line = choose_threads(config, env)
    backend = _open(config, env, threads, cores)
    if config.kv_dtype != "auto" and config.kv_dtype not in backend.kv_dtypes:
        raise Unsupported(
            f"the {backend.name} backend cannot keep K and V as {config.kv_dtype}: "
            f"there {'is' if len(backend.kv_dtypes) == 1 else 'are'} {', '.join(backend.kv_dtypes)}",
            cure="leave --kv-dtype out, or use another backend",
        )
    config = choose_kv(config, model, backend)
    watch.lap("backend")

    def packed(layout: Layout, done: int, total: int) -> None:
        model.release(layout)
        if progress is not None:
            progress(done, total)

    parts = Parts(model, source.name, source.nbytes, source.checkpoint, backend, packed)
    task = task_of(config.task, model, source.checkpoint)
    if task == "generate":
        engine, info = build_writing(config, env, parts, watch.lap)
    else:
        from quire.engine.construction.pooled import build_pooled

        engine, info = build_pooled(config, env, parts, task, watch.lap)
    lines = [
        f"model: {source.name}, architecture {model.config.architecture}, {source.nbytes / 2**20:.0f} MiB of weights",
        *source.notes,
        *model.notes,
        f"backend: {backend.describe()}",
        *device_lines,
        threads_line,
        *([] if task == "generate" else [f"task: {task}"]),
        *(backend.told() if isinstance(backend, Tells) else []),
        *info.decisions,
        watch.line(),
    ]
    return engine, msgspec.structs.replace(info, decisions=lines, load_seconds=watch.total)


@dataclass(frozen=True, slots=True)
class _Source:
    """A model, where it came from, and what is to be told about that."""

    model: Model
    name: str
    nbytes: int
    notes: list[str]
    checkpoint: Opened | None = None


def _source(config: EngineConfig, checkpoint: Opened | None) -> _Source:
    if config.load_format == "dummy":
        from quire.models.shapes import load_shape

        model, nbytes = load_shape(config.path)
        return _Source(model, config.name or config.path, nbytes, ["weights: random numbers, not a trained model"])
    checkpoint = checkpoint or open_checkpoint(config.path)
    notes: list[str] = []
    if isinstance(checkpoint, GGUF):
        own = checkpoint.metadata.get_str("general.name", "")
        if config.backend == "native":  # the others say themselves what they keep
            notes = expanded(checkpoint)
    else:
        own = checkpoint.name
    model = load(checkpoint)
    if not isinstance(checkpoint, GGUF):
        notes += checkpoint.notes(config.backend == "native")
        if checkpoint.notes(False) and config.backend in ("torch", "cuda") and config.quantize == "none":
            notes.append("quantized weights are held as plain numbers here: --quantize keep holds codes")
    return _Source(model, config.name or own or config.path, weight_bytes(checkpoint), notes, checkpoint)


def choose_backend(config: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """The configuration with a backend's name in place of auto, and the line that says why."""
    if config.backend != "auto":
        return config, []
    if config.device.startswith("cuda"):
        return dataclasses.replace(config, backend="cuda"), [f"device: {config.device} (asked for)"]
    if config.device == "cpu":
        return dataclasses.replace(config, backend="native"), ["device: cpu (asked for)"]
    if config.device != "auto":
        raise BadRequest(f"device is {config.device!r}: it must be auto, cpu, cuda or cuda:N", param="device")
    found = detect()
    device = "cuda" if found.backend == "cuda" else "cpu"
    return dataclasses.replace(config, backend=found.backend), [f"device: {device} ({found.why})"]


def choose_threads(config: EngineConfig, env: Environment) -> tuple[int, tuple[int, ...], str]:
    """The number of threads, what they are pinned to, and the sentence that says why.

    Who asks gets what was asked. Otherwise the native backend's choice is measured, once per machine, here and not later:
    the weights are about to be packed with these threads, and a quarter of a second once is less than a wrong choice
    costs every start.
    """
    try:
        asked = asked_threads(config.threads, env, available_cores())
    except ValueError as e:
        raise BadRequest(str(e), cure="unset it, and what was measured is used", param="threads") from None
    if asked is not None:
        return asked[0], (), asked[1]
    cores = look_at_cores()
    if config.backend == "native":
        from quire.backends.native import available
        from quire.backends.native.tune import decide

        with suppress(Unsupported):  # opening the backend says it better
            made = decide(env.home, cores, config.isa or env.isa or available()[0])
            return made.candidate.threads, made.candidate.cores, made.line
    return cores.most, (), f"threads: {cores.most} (every core available)"


def _check(config: EngineConfig) -> None:
    """Numbers that could never work."""
    if config.speculate != "none" and config.speculate not in names():
        raise BadRequest(
            f"speculate is {config.speculate!r}: it must be none or {' or '.join(names())}", param="speculate"
        )
    if not 1 <= config.draft_tokens <= MOST_DRAFTS:
        raise BadRequest(
            f"draft_tokens is {config.draft_tokens}: it must be between 1 and {MOST_DRAFTS}", param="draft_tokens"
        )
    if config.kv_dtype not in ("auto", *KV_DTYPES):
        *most, last = ("auto", *KV_DTYPES)
        raise BadRequest(f"kv_dtype is {config.kv_dtype!r}: it must be {', '.join(most)} or {last}", param="kv_dtype")
    if config.task not in TASKS:
        raise BadRequest(f"task is {config.task!r}: it must be {', '.join(TASKS[:-1])} or {TASKS[-1]}", param="task")
    if config.quantize not in QUANTIZE:
        raise BadRequest(
            f"quantize is {config.quantize!r}: it must be {', '.join(QUANTIZE[:-1])} or {QUANTIZE[-1]}",
            param="quantize",
        )
    if config.quantize == "keep" and config.load_format == "dummy":
        raise Unsupported("random weights have no four-bit codes to keep", cure="use --quantize int4")
    for name in ("threads", "context"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise BadRequest(f"{name} is {value}: it must be at least 1", param=name)
    for name in ("max_seqs", "max_batch_tokens"):
        if getattr(config, name) < 0:
            raise BadRequest(
                f"{name} is {getattr(config, name)}: it must be at least 1, or 0 for a default", param=name
            )
    if 0 < config.max_batch_tokens < config.max_seqs:
        raise BadRequest(
            f"max_batch_tokens is {config.max_batch_tokens} and max_seqs {config.max_seqs}: "
            "a step must have room for one token of every sequence",
            param="max_batch_tokens",
        )
    if config.max_waiting < 0:
        raise BadRequest(f"max_waiting is {config.max_waiting}: it must not be negative", param="max_waiting")
    for name in ("itl_slo", "ttft_slo"):
        if (getattr(config, name) or 0) < 0:
            raise BadRequest(f"{name} is {getattr(config, name)}: it must be milliseconds, or 0 for none", param=name)
    check_loras(config)
    if config.depth is not None and not 0 <= config.depth <= 8:
        raise BadRequest(f"depth is {config.depth}: it must be between 0 and 8", param="depth")


def _open(config: EngineConfig, env: Environment, threads: int, cores: tuple[int, ...]) -> Backend:
    name = config.backend
    torch = name in ("torch", "cuda")
    if config.load_format not in ("auto", "dummy"):
        raise BadRequest(f"load_format is {config.load_format!r}: it must be auto or dummy", param="load_format")
    if not torch and config.load_format == "dummy":
        raise Unsupported(f"the {name} backend cannot make random weights", cure="use --backend torch or cuda")
    if not torch and (config.device not in ("auto", "cpu") or config.dtype != "auto"):
        raise Unsupported(
            f"the {name} backend takes no device or dtype", cure="leave them out, or use --backend torch or cuda"
        )
    if not torch and config.quantize != "none":
        raise Unsupported(
            f"the {name} backend keeps weights as the file has them: it cannot make them {config.quantize}",
            cure="leave --quantize out, or use --backend torch or cuda",
        )
    if name in ("torch", "reference") and config.deterministic:
        raise Unsupported(
            f"the {name} backend cannot promise the same bits in any batch: the libraries under it choose the order of a "
            "sum by the shape of the batch",
            cure="leave --deterministic out, or use --backend cuda, or the native backend, which always keeps it",
        )
    if config.deterministic and torch and (config.quantize != "none" or config.kv_dtype not in ("auto", "f16")):
        raise Unsupported(
            f"the {name} backend keeps the same bits in any batch only with weights, keys and values of its own dtype",
            cure="leave --deterministic out, or --quantize and --kv-dtype",
        )
    try:
        return open_backend(
            name,
            threads=threads,
            isa=config.isa or env.isa,
            cores=cores,
            device=config.device,
            dtype=config.dtype,
            random=config.load_format == "dummy",
            deterministic=config.deterministic,
            quantize=config.quantize,
        )
    except ValueError as e:
        raise BadRequest(str(e), param="backend") from None
    except ImportError as e:
        raise Unsupported(
            f"the {config.backend} backend cannot be loaded here: {e}",
            cure="pip install 'quire[cuda]' or 'quire[torch]'"
            if torch
            else "install the package so that it is built, or use --backend reference (slow)",
        ) from e


class _Watch:
    """Splits the load time into laps that add up."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps.append((name, now - self._last))
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start

    def line(self) -> str:
        parts = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in self._laps)
        return f"loaded in {self.total * 1000:.0f} ms: {parts}"
