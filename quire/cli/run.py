"""`quire run`: one answer to a prompt, or a conversation on a terminal, with the engine in this process.

The answer is all that goes to stdout; spinner, numbers and notes go to stderr. Process start to first token is what a
user feels, so imports here are few and late. The conversation itself is `talk.py`.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from quire.config import DEFAULT_MODEL
from quire.observe.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from quire.engine.types import EngineInfo
    from quire.llm import LLM, Completion, Options, Output
    from quire.runner.params import SamplingParams

SEQUENCES = 4  # one conversation is one sequence; the KV pool is sized for four, so that earlier ones stay cached
MAX_STDIN = 64 << 20  # bytes; far more than any context holds

# Nearly greedy, and with a seed of its own: the same question gets the same answer until somebody asks otherwise.
TEMPERATURE = 0.2
TOP_P = 0.9
SEED = 0
MAX_TOKENS = 1024


def command(
    model: Annotated[str, typer.Argument(help="A short name, a path, a URL, hf:… or pypi:…")] = DEFAULT_MODEL,
    prompt: Annotated[list[str] | None, typer.Argument(help="What to ask; without it, a conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = TEMPERATURE,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, those that make up this much.")] = TOP_P,
    top_k: Annotated[int, typer.Option(help="Of the likeliest tokens, this many; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Another seed, another answer; -1 draws one.")] = SEED,
    max_tokens: Annotated[int, typer.Option(help="Longest answer; 0 is up to the context.")] = MAX_TOKENS,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Tell what was decided, and how long it took.")] = False,
    threads: Annotated[int | None, typer.Option(help="Default: every core.")] = None,
    context: Annotated[int | None, typer.Option(help="Longest conversation, in tokens.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for the KV pool, such as 512MiB.")] = None,
    backend: Annotated[str, typer.Option(help="native, or reference (slow).")] = "native",
) -> None:
    """Chat with a model, or ask it one thing.

    A prompt may come as arguments, on standard input, or both (the input is then put after the arguments, as a document).
    With neither, on a terminal, this is a conversation: /help there tells more.
    """
    from quire.runner.params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=None if seed == -1 else seed,
        max_tokens=max_tokens or None,
    ).validate()
    if raw and system is not None:
        raise BadRequest("--system needs the chat template, which --raw leaves out", param="system")
    if any(c.isspace() for c in model) and not os.path.exists(model):
        raise BadRequest(
            f"{model!r} is not a model's name",
            cure=f'the model comes first: quire run {DEFAULT_MODEL} "…"',
            param="model",
        )
    text = ask(prompt or [])
    with Spinner("loading"):
        llm = load(
            model,
            progress=False,
            threads=threads,
            context=context,
            kv_memory=kv_memory,
            backend=backend,
            max_seqs=SEQUENCES,
        )
    try:
        if stats:
            decisions(llm.info)
        if text is None:
            from quire.cli.talk import Talk

            Talk(llm, params, system=system, raw=raw, stats=stats).loop()
        else:
            once(llm, text, params, system=system, raw=raw, stats=stats)
    finally:
        llm.close()


def load(model: str, **options: Unpack[Options]) -> LLM:
    """Find the model, fetching it with a bar if it is not here, and load it."""
    from quire.weights.store import Store

    store = Store()
    try:
        store.resolve(model)
    except NotFound as missing:
        if missing.param != "model":
            raise
        from quire.cli import ui

        store.pull(model, ui.progress())
    from quire.llm import LLM

    return LLM(model, **options)


def ask(words: list[str]) -> str | None:
    """The prompt from the arguments and standard input; None when there is none and a conversation is meant."""
    said = " ".join(words)
    if words and not said.strip():
        raise BadRequest("the prompt is empty", param="prompt")
    if sys.stdin is None or sys.stdin.closed:
        piped = False
    elif sys.stdin.isatty():
        if not words and sys.stdout.isatty():
            return None
        piped = not words  # the answer goes to a file: take the prompt like `cat` would
    else:
        piped = not words or _is_document()
    document = _read_stdin() if piped else ""
    if document.strip():
        return f"{said}\n\n{document}" if said else document
    if not said:
        raise BadRequest("there is no prompt: standard input is empty", param="prompt")
    return said


def _is_document() -> bool:
    """Whether somebody gave us standard input on purpose: a pipe or a file, not /dev/null or a stray device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(MAX_STDIN + 1)
    if len(data) > MAX_STDIN:
        raise BadRequest(f"standard input has more than {MAX_STDIN >> 20} MiB", param="prompt")
    try:
        return data.decode().rstrip("\n")
    except UnicodeDecodeError as e:
        raise BadRequest(f"standard input is not text: byte {e.start} is not UTF-8", param="prompt") from None


def once(llm: LLM, text: str, params: SamplingParams, *, system: str | None, raw: bool, stats: bool) -> None:
    """One prompt, one answer."""
    if raw:
        stream = llm.stream(text, params)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        stream = llm.stream_chat([*messages, {"role": "user", "content": text}], params)
    with stream:
        first = show(stream)
    if stream.output is not None:
        report(stream.output, llm.info, params, stats)
    if stats and first is not None:
        say(f"process start to first text: {first * 1000:.0f} ms")


def show(stream: Iterable[str]) -> float | None:
    """Pieces to stdout as they come, with a spinner before the first. Ends with a newline, also when interrupted.

    Returns how old the process was when the first piece was written, where the system tells.
    """
    out = sys.stdout
    screen = out.isatty()
    last, first = "\n", None
    spinner = Spinner("thinking")
    spinner.start()
    try:
        for piece in stream:
            spinner.stop()
            last = piece
            out.write(_tame(piece) if screen else piece)
            out.flush()
            first = first or _age()
    finally:
        spinner.stop()
        if not last.endswith("\n"):
            out.write("\n")
        out.flush()
    return first


def _age() -> float | None:
    """Seconds since this process was started; Linux tells."""
    try:
        with open("/proc/self/stat") as f:
            ticks = int(f.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None


def _tame(text: str) -> str:
    """Nothing a model says may steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def report(output: Output, info: EngineInfo, params: SamplingParams, stats: bool) -> None:
    """Say what cut an answer short, and the numbers when asked."""
    done = output.outputs[0]
    if done.finish_reason == "length":
        full = len(output.prompt_tokens) + len(done.tokens) >= info.context
        what = f"the context of {info.context} tokens is full" if full else f"--max-tokens {params.max_tokens}"
        say(f"[the answer was cut: {what}]")
    if stats:
        for line in numbers(done):
            say(line)


def decisions(info: EngineInfo) -> None:
    """What was decided at load."""
    for line in info.decisions:
        say(line)


def numbers(done: Completion) -> list[str]:
    """A receipt in words."""
    r = done.receipt
    computed = r.prompt_tokens - r.cached_tokens
    first = r.queue_seconds + r.prefill_seconds
    lines = [
        f"prompt: {r.prompt_tokens} tokens, {r.cached_tokens} of them cached; answer: {r.output_tokens} tokens; "
        f"ended by {done.finish_reason or 'interrupt'}; seed {r.seed}",
        f"first token: {first * 1000:.0f} ms (queue {r.queue_seconds * 1000:.0f}, prefill {r.prefill_seconds * 1000:.0f})",
    ]
    if r.prefill_seconds > 0 and computed > 0:
        lines.append(f"prefill: {computed / r.prefill_seconds:.1f} tokens/s")
    if r.decode_seconds > 0 and r.output_tokens > 1:
        lines.append(f"decode: {(r.output_tokens - 1) / r.decode_seconds:.1f} tokens/s")
    return lines


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


class Spinner:
    """Something that moves on stderr while nothing else does; on a terminal only."""

    def __init__(self, text: str):
        self._text = text
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._turn, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Spinner:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _turn(self) -> None:
        shown = False
        wait = 0.15  # what is over sooner needs no spinner
        for frame in _frames():
            if self._over.wait(wait):
                break
            sys.stderr.write(f"\r{frame} {self._text} ")
            sys.stderr.flush()
            shown, wait = True, 0.1
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _frames() -> Iterable[str]:
    while True:
        yield from "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
