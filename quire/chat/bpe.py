"""Byte-level BPE ("gpt2" vocabularies): each byte is written as a printable character, merges are listed in the file.

Owns the byte alphabet and the merges. A merge that names a token the vocabulary lacks is a broken file. Control tokens
are kept out of the merging vocabulary, so plain text can never become one.
"""

from __future__ import annotations

from operator import add

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from quire.chat.pretokenizers import PreTokenizer
from quire.chat.vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, where
from quire.observe.errors import BadModelFile

_KEY = "tokenizer.ggml.merges"


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

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

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
        return text.encode()


def _mergeable(vocab: Vocabulary) -> dict[str, int]:
    kept = dict(zip(vocab.tokens, range(len(vocab.tokens)), strict=True))
    if len(kept) != len(vocab.tokens):
        kept.pop("", None)
        _refuse_duplicates(vocab)
    for i in where((vocab.types == CONTROL) | (vocab.types == UNKNOWN)):
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
    pairs: list[tuple[str, ...]] = [tuple(merge.split(" ", 1)) for merge in vocab.merges]
    if set(map(len, pairs)) <= {2}:
        lefts, rights = zip(*pairs, strict=True) if pairs else ((), ())
        sound = kept.keys() >= {*lefts, *rights, *map(add, lefts, rights)}
    else:
        sound = False
    if not sound:  # the library panics at a merge it cannot use, and does not say which
        pairs = _checked(vocab, kept, pairs)
    return models.BPE(kept, pairs, ignore_merges=ignore_merges)  # type: ignore[arg-type]


def _checked(vocab: Vocabulary, kept: dict[str, int], pairs: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The merges less those that would make plain text a control token; BadModelFile for one that makes no sense."""
    known = set(vocab.tokens)
    good = []
    for i, pair in enumerate(pairs):
        if len(pair) != 2 or not pair[0] or not pair[1]:
            raise BadModelFile(f"{_KEY}[{i}] is {vocab.merges[i][:80]!r}: two tokens with a space between are needed")
        for text in (*pair, "".join(pair)):
            if text not in known:
                raise BadModelFile(f"{_KEY}[{i}] is {vocab.merges[i][:80]!r}: no token is {text[:80]!r}")
        if all(text in kept for text in (*pair, "".join(pair))):
            good.append(pair)
    return good
