"""A stand-in for a tokenizer, and answers read to the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools.check import parse
from quire.chat.tools.detect import detect_format
from quire.chat.tools.types import Format, Reading, Tool, Tools

# Tokens that end a turn in the templates that are tried; a tokenizer knows them by their ids.
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    *(
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
        "<|user|>",
        "<|observation|>",
        "<end_of_turn>",
    ),
    *("<turn|>", "<seed:eos>", "[e~[", "<|eot|>", "<|end_of_msg|>", "<SPECIAL_12>", "<|assistant_end|>", "<EOS>"),
    *(
        "<|message_sep|>",
        "<sep>",
        "</assistant>",
        "<|calls|>",
        "<|tool_response>",
        "〈|EOS|〉",
        "<｜hy_eos:opensource｜>",
    ),
)

Read = tuple[str, str, list[tuple[str, object]]]


class ToyTokenizer:
    """What is asked of a tokenizer; `special` texts are control tokens."""

    eos_ids = tuple(range(len(ENDS)))

    def __init__(self, special: tuple[str, ...] = ()):
        self.special = special

    def token_text(self, token: int) -> str:
        return ENDS[token]

    def controls(self, text: str) -> list[str | int]:
        parts: list[str | int] = [text]
        for i, mark in enumerate(self.special):
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for n, piece in enumerate(part.split(mark)):
                    cut += [*([1000 + i] if n else []), *([piece] if piece else [])]
            parts = cut
        return parts


@cache
def format_of(source: str) -> Format | None:
    return detect_format(ChatTemplate(source, "", ""), ToyTokenizer())


def tools(*names: str, **more: object) -> Tools:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    return Tools([Tool(name, "", schema) for name in names], **more)


def every_way(reading: Reading, text: str) -> Read:
    """What the text is read as: whole, by characters and cut at every place, which must all agree."""
    whole = parse(reading, [text])
    assert parse(reading, list(text)) == whole
    for at in range(1, len(text)):
        assert parse(reading, [text[:at], text[at:]]) == whole, f"cut at {at}: {text[:at]!r} {text[at:]!r}"
    return whole


def some_ways(reading: Reading, text: str, cuts: Iterable[int]) -> Read:
    """The same with the text cut at some places at once."""
    at = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    return parse(reading, [text[a:b] for a, b in itertools.pairwise(at)])
