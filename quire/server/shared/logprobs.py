"""Log probabilities in the three shapes that clients know: chat's, the legacy completions one, and vLLM's for prompts.

A token is named by its text; bytes that are no text of their own are named as OpenAI names them, `bytes:\\xe2\\x80`, so
that two different tokens never share a name. JSON has no infinity: -9999.0 stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.chat.types import TokenLogprob, TokenText

LOWEST = -9999.0


def finite(value: float) -> float:
    """A number that JSON can hold."""
    return value if value > LOWEST else LOWEST


def name(token: TokenText) -> str:
    """The token as text, or as its bytes where it is not text."""
    try:
        return token.bytes.decode() if token.bytes else token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in token.bytes)


def chat(entries: list[TokenLogprob]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`."""
    return [
        {
            "token": name(e.token),
            "logprob": finite(e.logprob),
            "bytes": list(e.token.bytes),
            "top_logprobs": [{"token": name(t), "logprob": finite(p), "bytes": list(t.bytes)} for t, p in e.top],
        }
        for e in entries
    ]


def prompt(entries: list[TokenLogprob], prompt_len: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then a dict by token id."""
    body: list[dict[str, Any] | None] = [None] * (prompt_len - len(entries))
    for e in entries:
        top = {
            str(t.id): {"logprob": finite(p), "rank": i + 1, "decoded_token": name(t)} for i, (t, p) in enumerate(e.top)
        }
        top[str(e.token.id)] = {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": name(e.token)}
        body.append(top)
    return body


@dataclass(slots=True)
class Legacy:
    """The completions shape, built token by token; `text_offset` counts characters of the choice's whole text."""

    characters: int = 0  # begun so far
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: TokenText, entry: TokenLogprob | None) -> None:
        """One position; no entry for a token that nothing predicted (the first of a prompt)."""
        self.tokens.append(name(token))
        self.token_logprobs.append(None if entry is None else finite(entry.logprob))
        if entry is None:
            self.top_logprobs.append(None)
        else:
            top = {name(t): finite(p) for t, p in entry.top}
            top.setdefault(name(token), finite(entry.logprob))
            self.top_logprobs.append(top)
        # A character begins at each byte that is not a continuation; a token may begin inside one.
        begun = sum(b & 0xC0 != 0x80 for b in token.bytes)
        inside = bool(token.bytes) and token.bytes[0] & 0xC0 == 0x80
        self.text_offset.append(max(0, self.characters - inside))
        self.characters += begun

    def take(self) -> dict[str, Any]:
        """What has been added since the last take."""
        body = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return body
