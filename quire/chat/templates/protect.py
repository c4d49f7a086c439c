"""Chat prompts in which nobody but the template writes control tokens.

A message may hold the text of a control token ("<|im_start|>"), and read as one it would let a user end a turn and begin
another in any role. So where a message holds a character that a control token begins with, the template is run twice: on
the messages as they are, and with each such character exchanged for one that is nowhere else. What the second run says
is a control token was written by the template; then the characters are put back and the text between is tokenized as
plain text. The two prompts must be the same text or have the same control tokens. Texts that the template looks for in a
message, such as </think>, are left as they are; a conversation with which nothing works is refused. A conversation without such characters takes the ordinary way, and so does one whose control tokens are all the template's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from quire.chat.templates.template import Conversation
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import BadRequest

MAX_MARK = 64  # characters of a text that a template looks for in a message
_PRIVATE = range(0xF0000, 0xFFFFE)  # a plane for private use

Marker = Callable[[str], str]


class Prompt:
    """A conversation as text, and as ids in which control tokens are the template's own."""

    def __init__(self, tokenizer: Tokenizer, text: str, parts: list[str | int] | None):
        self._tokenizer = tokenizer
        self.text = text
        self._parts = parts  # None: reading control tokens out of the text gives the template's and no others

    def ids(self) -> list[int]:
        """Token ids, without the begin and end tokens that a tokenizer puts around a text."""
        if self._parts is not None:
            return self._tokenizer.encode_parts(self._parts)
        ids = self._tokenizer.encode(self.text, add_special=False, parse_special=True)
        if self._tokenizer.loose_controls:
            parts = self._tokenizer.controls(self.text)
            if sum(map(self._tokenizer.is_special, ids)) != sum(isinstance(p, int) for p in parts):
                return self._tokenizer.encode_parts(parts)
        return ids


def write(conversation: Conversation, tokenizer: Tokenizer) -> Prompt:
    """The prompt of a conversation. Raises BadRequest where its control tokens cannot be told from its text."""
    texts = list(_texts([conversation.messages, conversation.tools, conversation.kwargs]))
    joined = "\0".join(texts)
    starts = [c for c in sorted({text[0] for text in tokenizer.control_texts}) if c in joined]
    prompt = conversation.write()
    if not starts:
        return Prompt(tokenizer, prompt, None)
    free = (c for c in map(chr, _PRIVATE) if c not in joined and c not in prompt)
    table = {ord(c): mark for c, mark in zip(starts, free, strict=False)}
    if len(table) < len(starts):
        raise BadRequest("the messages hold every private-use character", param="messages")
    back = {ord(mark): c for c, mark in table.items()}
    there = tokenizer.controls(prompt)
    for marked in _attempts(conversation, tokenizer.control_texts, _enders(tokenizer), table):
        try:
            text = marked.write()
        except BadRequest:
            continue  # a template may refuse what it does not recognize
        parts = tokenizer.controls(text)
        if _ids(parts) == _ids(there):
            return Prompt(tokenizer, prompt, None)
        if text.translate(back) == prompt:
            return Prompt(tokenizer, prompt, [p if isinstance(p, int) else p.translate(back) for p in parts])
    raise BadRequest(
        f"the messages hold {_named(texts, tokenizer.control_texts)}, and the model's chat template does not pass it on as "
        "it is, so it cannot be told from the template's own",
        cure="take it out of the messages; a raw prompt (completions) may hold control tokens",
        param="messages",
    )


def _attempts(
    conversation: Conversation, controls: frozenset[str], enders: frozenset[str], table: dict[int, str]
) -> Iterator[Conversation]:
    """The conversation with marks, the least first: not in texts that the template looks for and that are no control tokens,
    nor, in what the assistant wrote, in those that are (its own <think>) unless they end a turn; not in the first of these;
    everywhere."""
    named = [t for t in conversation.template.looked_for if len(t) <= MAX_MARK and any(ord(c) in table for c in t)]
    if named:
        begun = frozenset(control[:n] for control in controls for n in range(1, len(control)))
        plain = [text for text in named if not _holds(text, controls, begun)]
        own = [text for text in named if not _holds(text, controls - ({text} - enders), begun)]
        if own != plain:
            yield _mapped(conversation, _around(plain, table), _around(own, table))
        if plain:
            yield _mapped(conversation, _around(plain, table))
    yield _mapped(conversation, lambda text: text.translate(table))


def _holds(text: str, controls: frozenset[str], begun: frozenset[str]) -> bool:
    """Whether a control token lies in the text, or begins in it and may be completed by what follows."""
    size = len(text)
    return any(text[at:] in begun or any(text[at:end] in controls for end in range(at, size + 1)) for at in range(size))


def _around(kept: list[str], table: dict[int, str]) -> Marker:
    """Marks a text except where it says one of these."""
    if not kept:
        return lambda text: text.translate(table)
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(kept, key=len, reverse=True))) + ")")

    def mark(text: str) -> str:
        pieces = pattern.split(text)
        pieces[::2] = [piece.translate(table) for piece in pieces[::2]]
        return "".join(pieces)

    return mark


def _mapped(conversation: Conversation, mark: Marker, assistant: Marker | None = None) -> Conversation:
    """The conversation with every text in it marked; those of the assistant by a marker of their own."""

    def walk(value: Any, mark: Marker) -> Any:
        if isinstance(value, str):
            return mark(value)
        if isinstance(value, dict):
            return {mark(key): walk(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, mark) for item in value]
        return value

    return replace(
        conversation,
        messages=[
            walk(m, assistant if assistant is not None and m["role"] == "assistant" else mark)
            for m in conversation.messages
        ],
        tools=walk(conversation.tools, mark),
        kwargs=walk(conversation.kwargs, mark),
    )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a nested value, keys too."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _ids(parts: list[str | int]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]


def _enders(tokenizer: Tokenizer) -> frozenset[str]:
    ids = {*tokenizer.eos_ids, *(i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None)}
    return frozenset(tokenizer.token_text(i) for i in ids)


def _named(texts: list[str], controls: frozenset[str]) -> str:
    for text in texts:
        found = next((c for c in sorted(controls, key=lambda c: (-len(c), c)) if c in text), None)
        if found is not None:
            return f"{found[:80]!r}, the text of a control token"
    return "parts of a text that together are a control token"
