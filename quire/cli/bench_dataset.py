"""Prompts from a file for `quire bench throughput`: one JSON object a line, checked whole before anything is measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.engine.measure import Span, greedy
from quire.engine.types import EngineInfo, Request
from quire.observe.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from quire.chat.tokenizers.tokenizer import Tokenizer


class Entry(msgspec.Struct, forbid_unknown_fields=False):
    """A line. Other fields are somebody else's."""

    prompt: str | list[int]
    output_tokens: int | None = None


def read(path: Path, count: int | None, output: Span, seed: int, model: Path, info: EngineInfo) -> list[Request]:
    """The first `count` prompts, or all. Text is tokenized as the server would a completion's prompt."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as e:
        raise NotFound(f"the dataset {path} cannot be read: {e.strerror or e}", param="dataset") from None
    if not lines:
        raise BadRequest(f"the dataset {path} has no prompts", param="dataset")
    if count is not None and count > len(lines):
        raise BadRequest(
            f"{count} requests were asked for: the dataset has {len(lines)} prompts, and one sent twice would be cached",
            cure=f"ask for at most {len(lines)}",
            param="requests",
        )
    rng = random.Random(f"{seed} sizes")
    tokenizer: Tokenizer | None = None
    requests: list[Request] = []
    for number, line in enumerate(lines[:count], 1):
        entry = _entry(path, number, line)
        if isinstance(entry.prompt, str):
            tokenizer = tokenizer or _tokenizer(model)
            tokens = tokenizer.encode(entry.prompt, add_special=True, parse_special=True)
        else:
            tokens = entry.prompt
        drawn = output.draw(rng)
        wanted = drawn if entry.output_tokens is None else entry.output_tokens
        _check(f"prompt {number} of {path}", tokens, wanted, info)
        requests.append(greedy(str(number), tokens, wanted))
    return requests


def _entry(path: Path, number: int, line: bytes) -> Entry:
    try:
        return msgspec.json.decode(line, type=Entry)
    except msgspec.DecodeError as e:
        raise BadRequest(
            f"prompt {number} of {path} cannot be read: {e}",
            cure='a line looks like {"prompt": "Once", "output_tokens": 64}',
            param="dataset",
        ) from None


def _check(where: str, tokens: list[int], output: int, info: EngineInfo) -> None:
    if output < 1:
        raise BadRequest(f"{where} asks for {output} output tokens: at least 1", param="dataset")
    if not tokens:
        raise BadRequest(f"{where} has no tokens", param="dataset")
    if wrong := [t for t in tokens if not 0 <= t < info.vocab_size]:
        raise BadRequest(f"{where} has token {wrong[0]}: the vocabulary has {info.vocab_size}", param="dataset")
    if len(tokens) + output > info.context:
        raise BadRequest(
            f"{where} has {len(tokens)} tokens and asks for {output}, which is {len(tokens) + output}: "
            f"the context is {info.context}",
            param="dataset",
        )


def _tokenizer(model: Path) -> Tokenizer:
    from quire.chat.loading import tokenizer_of
    from quire.weights.checkpoint import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        return tokenizer_of(checkpoint)
