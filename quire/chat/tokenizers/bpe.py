"""Byte-level BPE ("gpt2" vocabularies): each byte is written as a printable character, merges are listed in the file.

Owns the byte alphabet and the merges. A merge that names a token the vocabulary lacks is a broken file. Control tokens
are kept out of the merging vocabulary, so plain text can never become one. `ids_of` is how every kind of vocabulary calls
the `tokenizers` library.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from quire.chat.tokenizers.pretokenizers import PreTokenizer
from quire.chat.tokenizers.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, not_text, raw, where
from quire.observe.errors import BadModelFile

_KEY = "tokenizer.ggml.merges"
LONG = 2048  # characters, about a millisecond


def ids_of(library: Tokenizer, text: str) -> list[int]:
    """The ids of a text, without the tokens that a model wants around it.

    The library's `encode` keeps the interpreter lock to the end, so that a prompt of 32K tokens would stop every stream of a server
    for a tenth of a second; its batch call lets the lock go. Short texts take the plain call, which costs less to make. The
    ids are the same.
    """
    if len(text) < LONG:
        return library.encode(text, add_special_tokens=False).ids
    return library.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _alphabet() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 stands for itself; the other bytes take 256, 257, … in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(own)]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(rest)}


ALPHABET = _alphabet()
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


class BytePieces:
    """Plain text to ids, and ids to bytes, for one byte-level vocabulary."""

    def __init__(self, vocab: Vocabulary, pre: PreTokenizer):
        self._vocab = vocab
        kept = _mergeable(vocab)
        self._tokenizer = Tokenizer(_model(vocab, kept, pre.ignore_merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [
                *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
            ]
        )
        if pre.nfc:
            self._tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
        have = {byte for char, byte in ALPHABET.items() if char in kept}
        self._have = bytes(sorted(have))
        self._lacking = bool(set(range(256)) - have - _NEVER_IN_UTF8)

    unbounded = False

    def encode(self, text: str, first: bool, last: bool) -> list[int]:
        """Ids of plain text; spaces are part of its words wherever it lies."""
        return ids_of(self._tokenizer, text)

    def missing(self, data: bytes) -> bytes:
        """The bytes of `data` that no token can express (the library would drop them without a word)."""
        return data.translate(None, self._have) if self._lacking else b""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text."""
        text = self._vocab.tokens[token]
        if self._vocab.types[token] not in (CONTROL, UNKNOWN, USER_DEFINED):
            try:
                return bytes(map(ALPHABET.__getitem__, text))
            except KeyError:
                pass  # added as it is, not in the byte alphabet
        return raw(text)


def _mergeable(vocab: Vocabulary) -> dict[str, int]:
    kept = dict(zip(vocab.tokens, range(len(vocab.tokens)), strict=True))
    if len(kept) != len(vocab.tokens):
        kept.pop("", None)
        _refuse_duplicates(vocab)
    for i in where((vocab.types == CONTROL) | (vocab.types == UNKNOWN)):
        kept.pop(vocab.tokens[i], None)
    for i in not_text(vocab.tokens):
        kept.pop(vocab.tokens[i], None)
    kept.pop("", None)
    return kept


def _refuse_duplicates(vocab: Vocabulary) -> None:
    seen: dict[str, int] = {}
    for i, text in enumerate(vocab.tokens):
        if text and text in seen:
            raise BadModelFile(f"tokenizer.ggml.tokens[{i}] is {text!r} again: token {seen[text]} has that text")
        seen[text] = i


def _model(vocab: Vocabulary, kept: dict[str, int], ignore_merges: bool) -> models.BPE:
    pairs = _sound(vocab, kept)
    if pairs is None:  # the library panics at a merge it cannot use, and does not say which
        pairs = _checked(vocab, kept)
    return models.BPE(kept, pairs, ignore_merges=ignore_merges)


def _sound(vocab: Vocabulary, kept: dict[str, int]) -> list[tuple[str, str]] | None:
    """The merges as pairs, when all are well formed and their parts and results are tokens; else None.

    Whole-text operations: a Python step for each of the fifty to three hundred thousand merges would be felt at start.
    """
    merges, tokens = vocab.merges, vocab.tokens
    text = "\n".join(merges)
    if not merges or not _alternate(text, len(merges)):
        return None
    # A vocabulary lists what its merges make in the order of the merges: then one comparison finds every result.
    results = text.replace(" ", "")
    first = kept.get(results.partition("\n")[0], 0)
    span = range(first, first + len(merges))
    in_order = "\n".join(tokens[first : span.stop]) == results and not any(
        i in span for i in where(np.isin(vocab.types, (CONTROL, UNKNOWN)))
    )
    if not in_order and not all(map(kept.__contains__, results.split("\n"))):
        return None
    parts = text.replace(" ", "\n").split("\n")
    return list(zip(parts[::2], parts[1::2], strict=True)) if all(map(kept.__contains__, parts)) else None


def _alternate(text: str, count: int) -> bool:
    """Whether there are `count` lines of valid text with one space in each."""
    try:
        data = np.frombuffer(text.encode(), np.uint8)
    except UnicodeEncodeError:
        return False
    marks = data[(data == ord(" ")) | (data == ord("\n"))]
    return marks.size == 2 * count - 1 and bool((marks[::2] == ord(" ")).all() and (marks[1::2] == ord("\n")).all())


def _checked(vocab: Vocabulary, kept: dict[str, int]) -> list[tuple[str, str]]:
    """The merges less those that would make plain text a control token; BadModelFile for one that makes no sense."""
    known = set(vocab.tokens)
    good = []
    for i, merge in enumerate(vocab.merges):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise BadModelFile(f"{_KEY}[{i}] is {merge[:80]!r}: two tokens with a space between are needed")
        for text in (left, right, left + right):
            if text not in known:
                raise BadModelFile(f"{_KEY}[{i}] is {merge[:80]!r}: no token is {text[:80]!r}")
        if left in kept and right in kept and left + right in kept:
            good.append((left, right))
    return good
