"""Filling in the middle: the tokens by which a model was taught what stands before a gap, what after it, and where to write.

Owns which tokens those are (named by a GGUF's metadata, else known by their texts) and the order they are written in: prefix, suffix,
middle. What a client sends stays text: no part of it becomes a control token. Knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.chat.tokenizers.vocab import Vocabulary

# Prefix, suffix and middle, as families of models call them. A family is taken whole or not at all.
FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, Codegemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder's later cousins
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder, Granite code
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
# What such models write once the gap is filled: padding, or the beginning of another file.
ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    *("▁<EOT>", "<EOT>", "<|cursor|>"),
)


@dataclass(frozen=True, slots=True)
class Infill:
    """The infill tokens of a model."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]  # any of them ends the text that fills the gap


class PromptTokenizer(Protocol):
    """The methods of a tokenizer that are needed here."""

    bos_id: int | None
    add_bos: bool

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...


def find(vocab: Vocabulary) -> Infill | None:
    """The infill tokens, or None: such a model only continues a text."""
    wanted = {text for family in FAMILIES for text in family}.union(ENDS)
    ids = {text: i for i, text in enumerate(vocab.tokens) if text in wanted}
    named = vocab.infill
    if named is None:
        known = [family for family in FAMILIES if all(text in ids for text in family)]
        if not known:
            return None
        named = (ids[known[0][0]], ids[known[0][1]], ids[known[0][2]])
    ends = {ids[text] for text in ENDS if text in ids} | set(named)
    return Infill(*named, tuple(sorted(ends)))


def write(tokenizer: PromptTokenizer, tokens: Infill, before: str | list[int], after: str) -> list[int]:
    """The ids of a prompt whose answer goes between `before` and `after`."""
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    if isinstance(before, str):
        before = tokenizer.encode(before, add_special=False, parse_special=False) if before else []
    rest = tokenizer.encode(after, add_special=False, parse_special=False) if after else []
    return [*start, tokens.prefix, *before, tokens.suffix, *rest, tokens.middle]
