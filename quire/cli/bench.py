"""`quire bench latency` and `quire bench throughput`: how fast an engine in this process is, with everything that a figure depends on beside it.

Sampling is greedy and goes on past end tokens; prompts are token ids that follow from the seed; what warms up is not
counted, and the head of the table says how much that was. The measuring is `engine/measure.py`, the wording
`bench_report.py`. Ctrl-C prints what was measured until then.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from quire.cli import bench_report as report
from quire.cli.arguments.engine_options import engine_options
from quire.cli.pull import here, supported
from quire.cli.terminal import ui
from quire.config import DEFAULT_MODEL, EngineConfig, Environment, Terminal
from quire.engine.engine import Engine
from quire.engine.measure import Round, Run, Shape, Span, drive, greedy, latency_round, synthetic, token_ids
from quire.engine.types import EngineInfo, Request
from quire.observe.errors import BadRequest

if TYPE_CHECKING:
    from quire.weights.store.store import Store

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
LINE_EVERY = 0.25  # seconds between changes of the progress line
DEFAULT_REQUESTS = 16  # with the sizes below, some ten seconds for the default model on two cores
MAX_REQUESTS = 100_000

Model = Annotated[str, typer.Argument(help="A short name, a path, a URL, hf:… or pypi:…")]
Json = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write a record as JSON; - is stdout, without the table.")
]
Seed = Annotated[int, typer.Option(help="Seed of the random prompts.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also print the engine's settings.")]


class Modes(TyperGroup):
    """The commands of `bench`. What is measured comes first, and the model after it; a user who starts with the model is told
    so."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word, modes = args[0], list(self.commands)
        if word not in modes and not difflib.get_close_matches(word, modes):
            ctx.fail(f"What is measured comes first: quire bench {' or '.join(modes)}, then the model ({word}).")
        return super().resolve_command(ctx, args)


command = typer.Typer(
    name="bench",
    cls=Modes,
    help="Measure how fast a model runs here, with the engine in this process.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings=SETTINGS,
)


@command.command(context_settings=SETTINGS, short_help="Measure one answer: time to first token, time per token.")
@engine_options(without=("max_seqs",))
def latency(
    model: Model = DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens to compute.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    depth: Annotated[int, typer.Option(min=0, help="Tokens that are in the context already.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="How often to measure.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")] = 1,
    seed: Seed = 0,
    json: Json = None,
    verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """How long one answer takes: first token, each further token, and the rates of both.

    Every round has new prompts, so that the prefix cache holds nothing of them; --depth is computed outside of the
    figures. With --batch, prefill lasts until every stream has its first token, and decode is what comes after.

    \b
    Examples:
      quire bench latency
      quire bench latency smollm2 --prompt-tokens 16 --depth 2048 --threads 2
      quire bench latency model.gguf --batch 8 --rounds 10 --json latency.json
    """
    shape = Shape(prompt_tokens, output_tokens, depth, batch)
    if depth and not engine.prefix_cache:
        raise BadRequest("--depth needs the prefix cache, which --no-prefix-cache turns off", param="depth")
    if 0 < engine.max_batch_tokens < batch:
        raise BadRequest(
            f"--batch is {batch}: a step computes at most {engine.max_batch_tokens} tokens",
            cure=f"--max-batch-tokens {batch}, or a smaller --batch",
            param="batch",
        )
    settings = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "depth": depth,
        "batch": batch,
        "rounds": rounds,
        "warmup": warmup,
        "seed": seed,
    }
    measured: list[Round] = []
    with opened(model, replace(engine, max_seqs=batch), json, verbose) as subject:
        info = subject.info
        check_length(info, engine.context, depth=depth, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        check_pool(info, shape)
        with interruptible() as state, Line() as line:
            for number in range(-warmup, rounds):
                name = f"round {number + 1} of {rounds}" if number >= 0 else f"warmup {warmup + number + 1} of {warmup}"
                line.show(name)
                found = latency_round(
                    subject.engine,
                    shape,
                    name,
                    seed=seed,
                    vocab_size=info.vocab_size,
                    page_size=info.page_size,
                    clock=time.perf_counter,
                )
                if number >= 0:
                    measured.append(found)
        done = f"{len(measured)} of {rounds}" if state.interrupted else f"{rounds}"
        head = (
            f"latency: prompt {prompt_tokens}, output {output_tokens}, depth {depth}, batch {batch}; "
            f"{done} rounds after {warmup} of warmup, greedy"
        )
        figures = report.latency(measured)
        subject.tell("latency", head, report.latency_table(figures) if measured else [], settings, figures, state)


@command.command(context_settings=SETTINGS, short_help="Measure many requests: tokens per second, and waiting times.")
@engine_options()
def throughput(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[
        int | None, typer.Option(min=1, max=MAX_REQUESTS, help="Number of requests. Default: 16, or the whole dataset.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most unfinished requests at once. Default: all.")
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(metavar="N|MIN:MAX", help="Prompt tokens of each request.")] = "512",
    output_tokens: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Tokens to generate for each request.")
    ] = "128",
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens in front of each prompt that all requests share.")
    ] = 0,
    dataset: Annotated[
        Path | None, typer.Option(metavar="FILE", help='Prompts: lines of {"prompt": …, "output_tokens": …}.')
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 1,
    seed: Seed = 0,
    json: Json = None,
    verbose: Verbose = False,
    *,
    engine: EngineConfig,
) -> None:
    """What an engine does under load: requests and tokens a second, and what that costs each request.

    Prompts are token ids from the seed. A dataset has one JSON object a line: "prompt" is a text or a list of token ids,
    "output_tokens" may give its own length. Total tokens count prompts whole, cached or not.

    \b
    Examples:
      quire bench throughput
      quire bench throughput --requests 64 --concurrency 8 --prompt-tokens 64:1024
      quire bench throughput model.gguf --shared-prefix 512 --prompt-tokens 32 --json -
      quire bench throughput --dataset prompts.jsonl --output-tokens 16:256
    """
    prompt, output = span("--prompt-tokens", prompt_tokens), span("--output-tokens", output_tokens)
    if dataset is not None and shared_prefix:
        raise BadRequest("--shared-prefix is for made prompts: a dataset has its own", param="shared_prefix")
    settings: dict[str, Any] = {
        "requests": requests,
        "concurrency": concurrency,
        "prompt_tokens": str(prompt),
        "output_tokens": str(output),
        "shared_prefix": shared_prefix,
        "warmup": warmup,
        "seed": seed,
        "dataset": None if dataset is None else dataset.name,
    }
    run = Run()
    with opened(model, engine, json, verbose) as subject:
        info = subject.info
        if dataset is None:
            check_length(
                info,
                engine.context,
                shared_prefix=shared_prefix,
                prompt_tokens=prompt.high,
                output_tokens=output.high,
            )
            work = synthetic(requests or DEFAULT_REQUESTS, prompt, output, shared_prefix, seed, info.vocab_size)
            sizes = f"prompt {f'{shared_prefix} shared + ' if shared_prefix else ''}{prompt}, output {output}"
        else:
            from quire.cli.bench_dataset import read

            work = read(dataset, requests, output, seed, subject.path, info)
            sizes = f"prompts of {dataset.name}"
        settings["requests"] = len(work)
        with interruptible() as state, Line() as line:
            line.show("warming up")
            longest = max(len(r.tokens) for r in work), max(r.sampling.max_tokens or 1 for r in work)
            drive(subject.engine, warm(warmup, *longest, seed, info), Run())
            drive(subject.engine, work, run, concurrency=concurrency, on_step=line.follow)
        together = "all at once" if concurrency is None else f"{concurrency} at a time"
        count = f"{len(run.done)} of {len(work)}" if state.interrupted else str(len(work))
        head = f"throughput: {count} requests, {together}; {sizes}; greedy, {warmup} of warmup"
        figures = report.throughput(run)
        table = report.throughput_table(figures) if run.output_tokens else []
        subject.tell("throughput", head, table, settings, figures, state)


def warm(count: int, prompt: int, output: int, seed: int, info: EngineInfo) -> list[Request]:
    """Requests as long as the longest that counts, in a namespace of their own: they leave nothing for the others."""
    return [
        greedy(f"warm {i}", token_ids(f"{seed} warm {i}", prompt, info.vocab_size), output, "warmup")
        for i in range(count)
    ]


# ---- what is measured


@dataclass(slots=True)
class Subject:
    """A loaded model, and where to say what was found."""

    engine: Engine
    info: EngineInfo
    path: Path
    model: dict[str, Any]
    json: str | None

    def tell(
        self,
        kind: str,
        head: str,
        table: list[str],
        settings: dict[str, Any],
        figures: dict[str, Any],
        state: Interrupt,
    ) -> None:
        """The table and the record; exit code 130 when it was cut short."""
        if state.interrupted:
            ui.note(
                "interrupted: this is what was measured until then" if table else "interrupted: nothing measured yet"
            )
        if table and self.json != "-":
            for line in (f"{self.model['name']}, {self.info.backend}", head, "", *table, report.footer(self.info)):
                typer.echo(line)
        if table and self.json is not None:
            body = report.record(kind, settings, self.info, self.model, complete=not state.interrupted, results=figures)
            report.write(self.json, body)
        if state.interrupted:
            raise typer.Exit(130)


@contextlib.contextmanager
def opened(model: str, config: EngineConfig, json: str | None, verbose: bool) -> Iterator[Subject]:
    """The model found, fetched if it is not here, and loaded as `quire run` loads it."""
    from quire.engine.construction.build import build_engine
    from quire.weights.store.store import Store

    if json is not None:
        report.check_target(json)
    env = Environment.read()
    if config.load_format == "dummy":  # a shape, not a file
        path, facts = Path(model), {"name": model, "file": None, "bytes": None, "digest": None}
    else:
        path, facts = find(Store(env, accepts=supported), model)
    with Line() as line:
        line.show("loading")
        engine, info = build_engine(replace(config, path=str(path), name=facts["name"], task="generate"), env)
    facts["architecture"] = info.architecture
    try:
        if verbose:
            for text in info.decisions:
                ui.note(text)
        yield Subject(engine, info, path, facts, json)
    finally:
        engine.close()


def find(store: Store, model: str) -> tuple[Path, dict[str, Any]]:
    """The model's file or folder, fetched if it is not here, and what a record says of it."""
    path = here(store, model)
    manifest = store.get(model)
    return path, {
        "name": manifest.name if manifest else os.path.basename(os.path.normpath(model)),
        "file": str(path),
        "bytes": sum(f.stat().st_size for f in path.glob("*.safetensors")) if path.is_dir() else path.stat().st_size,
        "digest": manifest.digest if manifest else None,
    }


def check_length(info: EngineInfo, asked: int | None, **parts: int) -> None:
    """Refuse what the context does not hold, with the numbers."""
    total = sum(parts.values())
    if total > info.context:
        words = " + ".join(f"{name.replace('_', ' ')} {n}" for name, n in parts.items() if n)
        raise BadRequest(
            f"{words} is {total} tokens: the context is {info.context}",
            cure="make them smaller" + (", or raise --context" if asked is not None else ""),
            param="prompt_tokens",
        )


def check_pool(info: EngineInfo, shape: Shape) -> None:
    """Refuse a batch that would be preempted: its figures would be of something else."""
    needed = shape.batch * -(-shape.length // info.page_size)
    if needed > info.pages:
        raise BadRequest(
            f"{shape.batch} streams of {shape.length} tokens need {needed} pages of {info.page_size}: "
            f"the KV pool has {info.pages}",
            cure=f"--kv-memory {-(-needed * info.kv_bytes // info.pages >> 20)}MiB, or a smaller --batch",
            param="batch",
        )


def span(option: str, text: str) -> Span:
    """N, or MIN:MAX."""
    low, colon, high = text.partition(":")
    try:
        found = Span(int(low), int(high if colon else low))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number or MIN:MAX", param_hint=option) from None
    if not 1 <= found.low <= found.high:
        raise typer.BadParameter(f"{text!r}: at least 1, and MIN not over MAX", param_hint=option)
    return found


# ---- the terminal


@dataclass(slots=True)
class Interrupt:
    interrupted: bool = False


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Ctrl-C ends the block and is remembered."""
    state = Interrupt()
    try:
        yield state
    except KeyboardInterrupt:
        state.interrupted = True


class Line:
    """One line on stderr that says where we are; on a terminal only, and gone afterwards."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty() and Terminal.read().moves
        self._spoke = 0.0

    def show(self, text: str) -> None:
        if self._on:
            self._spoke = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def follow(self, run: Run) -> None:
        """Now and then, so that saying it costs nothing that could be measured."""
        if self._on and time.monotonic() - self._spoke > LINE_EVERY:
            self.show(f"{len(run.done)} of {run.asked} requests, {run.output_tokens} tokens")

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
