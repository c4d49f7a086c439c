"""SentencePiece BPE ("llama" vocabularies): pieces carry scores, a space is written as U+2581, bytes are the last resort.

SentencePiece joins the neighbours whose union is the best-scored piece. A compiled encoder (native/src/words.cpp) does that;
where it was not built, the `tokenizers` library does, from merges: every way to cut a piece into two pieces is one, ranked
by the score of the whole. Only ordinary pieces take part: plain text can never become a control token or a byte token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

from quire.chat.tokenizers.bpe import ids_of
from quire.chat.tokenizers.spm_text import SPACE, Sentences
from quire.chat.tokenizers.vocab import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    not_text,
    raw,
    where,
)
from quire.observe.errors import BadModelFile

Encode = Callable[[str], list[int]]
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd: every power is invertible modulo 2**64


class ScoredPieces:
    """Plain text to ids, and ids to bytes, for one SentencePiece vocabulary."""

    def __init__(self, vocab: Vocabulary, space_prefix: bool):
        self._vocab = vocab
        self._sentences = Sentences(vocab, space_prefix)
        self._bytes = byte_tokens(vocab)
        if vocab.unk_id is None and len(self._bytes) < 256:
            raise BadModelFile(
                f"tokenizer.ggml.tokens has {len(self._bytes)} of 256 byte tokens and no unknown token: "
                "some texts could not be expressed"
            )
        self._ids = _compiled(vocab, self._bytes) or _by_library(vocab)

    @property
    def unbounded(self) -> bool:
        """Whether characters without a token are gathered into one unknown token, or spaces are dropped."""
        return len(self._bytes) < 256 or self._sentences.shrinks

    def encode(self, text: str, first: bool, last: bool) -> list[int]:
        """Ids of plain text; a space goes before it when the vocabulary asks for that."""
        return self._ids(self._sentences.write(text, first, last))

    def missing(self, data: bytes) -> bytes:
        """Bytes that cannot be expressed: none, a byte or unknown token stands for every character."""
        return b""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text."""
        kind = self._vocab.types[token]
        if kind == BYTE:
            return bytes([self._bytes[token]])
        text = self._vocab.tokens[token]
        if kind not in (CONTROL, UNKNOWN, USER_DEFINED):
            text = text.replace(SPACE, " ")
        return raw(text)


def _compiled(vocab: Vocabulary, known: dict[int, int]) -> Encode | None:
    """The compiled encoder, or None where it was not built. It needs no merges, so a large vocabulary is ready at once."""
    try:
        from quire.chat.tokenizers._words import ScoredWords  # type: ignore[import-not-found]
    except ImportError:
        return None
    texts = [raw(text) for text in vocab.tokens]
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
    if offsets[-1] >= 1 << 32:
        raise BadModelFile(f"tokenizer.ggml.tokens has {offsets[-1]} bytes of text: less than {1 << 32} is allowed")
    types = vocab.types
    uses = np.where((types == NORMAL) | (types == USER_DEFINED), 2, np.where(types == UNUSED, 1, 0)).astype(np.uint8)
    uses[not_text(vocab.tokens)] = 0
    if vocab.unk_id is not None:
        uses[vocab.unk_id] = 0
    byte_ids = np.full(256, -1, np.int32)
    byte_ids[list(known.values())] = list(known)
    scores = vocab.scores if vocab.scores is not None else np.zeros(len(texts), np.float32)
    unknown = -1 if vocab.unk_id is None else vocab.unk_id
    try:
        words = ScoredWords(b"".join(texts), offsets.astype(np.uint32), scores, uses, byte_ids, unknown)
    except ValueError as e:
        twice, first = map(int, str(e).split())
        raise _again(vocab, twice, first) from None
    return lambda text: words.encode(text.encode())


def _by_library(vocab: Vocabulary) -> Encode:
    """An encoder whose merges the `tokenizers` library does."""
    kept = _pieces(vocab)
    unk = vocab.tokens[vocab.unk_id] if vocab.unk_id is not None else None
    try:
        model = models.BPE(kept, _merges(vocab, kept), unk_token=unk, fuse_unk=True, byte_fallback=True)
    except Exception as error:
        raise BadModelFile(f"tokenizer.ggml.tokens cannot be used: {error}") from error
    library = Tokenizer(model)
    return lambda text: ids_of(library, text)


def _again(vocab: Vocabulary, twice: int, first: int) -> BadModelFile:
    text = vocab.tokens[twice][:80]
    return BadModelFile(f"tokenizer.ggml.tokens[{twice}] is {text!r} again: token {first} has that text")


def byte_tokens(vocab: Vocabulary) -> dict[int, int]:
    """Token -> byte, for tokens of the byte kind."""
    found: dict[int, int] = {}
    for i in where(vocab.types == BYTE):
        text = vocab.tokens[i]
        try:
            if len(text) != 6 or text[:3] != "<0x" or text[5] != ">":
                raise ValueError
            found[i] = int(text[3:5], 16)
        except ValueError:
            raise BadModelFile(
                f"tokenizer.ggml.tokens[{i}] is {text[:80]!r}: a byte token is written like <0x0A>"
            ) from None
    if len(set(found.values())) != len(found):
        raise BadModelFile("tokenizer.ggml.tokens has two byte tokens for one byte")
    return found


def _pieces(vocab: Vocabulary) -> dict[str, int]:
    """Text -> id of everything plain text may become: pieces, bytes, and the unknown token."""
    kept: dict[str, int] = {}
    for i in where((vocab.types != CONTROL) & (vocab.types != UNKNOWN)):
        text = vocab.tokens[i]
        if text in kept and text:
            raise _again(vocab, i, kept[text])
        kept[text] = i
    for i in not_text(vocab.tokens):
        kept.pop(vocab.tokens[i], None)
    kept.pop("", None)
    if vocab.unk_id is not None:
        kept[vocab.tokens[vocab.unk_id]] = vocab.unk_id
    return kept


def _merges(vocab: Vocabulary, kept: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of what plain text may become."""
    ordinary = (vocab.types == NORMAL) | (vocab.types == USER_DEFINED)
    scores = vocab.scores if vocab.scores is not None else np.zeros(len(vocab.tokens), np.float32)
    return merges_of([(t, i) for t, i in kept.items() if ordinary[i] and i != vocab.unk_id], scores)


def merges_of(listed: list[tuple[str, int]], scored: npt.NDArray[np.float32]) -> list[tuple[str, str]]:
    """Every pair (left, right) of pieces whose union is a piece, best-scored union first.

    The candidates come from rolling hashes of all prefixes and suffixes at once; each is then checked as text, so a
    vocabulary built to collide gains nothing.
    """
    texts = [text for text, _ in listed]
    pieces = np.array([i for _, i in listed], np.int64)
    if not pieces.size:
        return []
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    chars = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32).astype(np.uint64) + np.uint64(1)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # Prefix sums of char * base**position; the hash of [a, b) is their difference, moved to position a by base**-a.
    with np.errstate(over="ignore"):
        powers = _powers(int(lengths.max()) + 1)
        local = np.arange(chars.size) - np.repeat(starts, lengths)
        sums = np.concatenate([[np.uint64(0)], np.cumsum(chars * powers[local], dtype=np.uint64)])
        whole = sums[ends] - sums[starts]
        inner = np.flatnonzero(local > 0)  # cut before this character
        piece = np.repeat(np.arange(pieces.size), lengths)[inner]
        left = sums[inner] - sums[starts[piece]]
        right = (sums[ends[piece]] - sums[inner]) * _inverse_powers(powers.size)[local[inner]]
    order = np.argsort(whole)
    ranked = whole[order]
    left_at = _lookup(ranked, left)
    right_at = _lookup(ranked, right)
    hit = np.flatnonzero((left_at >= 0) & (right_at >= 0))
    scores = scored[pieces]
    hit = hit[np.lexsort((pieces[piece[hit]], -scores[piece[hit]]))]
    merges = []
    for p, a, b in zip(piece[hit].tolist(), order[left_at[hit]].tolist(), order[right_at[hit]].tolist(), strict=True):
        if texts[a] + texts[b] == texts[p]:
            merges.append((texts[a], texts[b]))
    return merges


def _lookup(ranked: npt.NDArray[np.uint64], wanted: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    at = np.minimum(np.searchsorted(ranked, wanted), ranked.size - 1)
    return np.where(ranked[at] == wanted, at, -1)


def _powers(count: int) -> npt.NDArray[np.uint64]:
    steps = np.full(count, _BASE, np.uint64)
    steps[0] = 1
    return np.cumprod(steps, dtype=np.uint64)


def _inverse_powers(count: int) -> npt.NDArray[np.uint64]:
    steps = np.full(count, pow(int(_BASE), -1, 1 << 64), np.uint64)
    steps[0] = 1
    return np.cumprod(steps, dtype=np.uint64)
