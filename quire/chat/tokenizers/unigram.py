"""SentencePiece unigram ("t5" vocabularies): the cut of a text whose pieces have the best sum of scores.

Owns what of a vocabulary takes part: ordinary pieces, under their texts. Control and byte tokens keep their ids under
names that nobody can write, so plain text never becomes one. What no piece covers becomes bytes, where there is a token
for each, or the unknown token.
"""

from __future__ import annotations

import secrets

from tokenizers import Tokenizer, models

from quire.chat.tokenizers.spm import byte_tokens
from quire.chat.tokenizers.spm_text import SPACE, Sentences
from quire.chat.tokenizers.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, not_text, raw
from quire.observe.errors import BadModelFile


class UnigramPieces:
    """Plain text to ids, and ids to bytes, for one unigram vocabulary."""

    unbounded = True  # characters that no piece covers are gathered into one token, and spaces may go

    def __init__(self, vocab: Vocabulary, space_prefix: bool):
        self._vocab = vocab
        self._sentences = Sentences(vocab, space_prefix)
        self._bytes = byte_tokens(vocab)
        self._token_of = {byte: token for token, byte in self._bytes.items()} if len(self._bytes) == 256 else None
        if vocab.unk_id is None:
            raise BadModelFile("the tokenizer is a unigram model without an unknown token")
        scores = vocab.scores
        assert scores is not None
        secret = secrets.token_hex(16)
        taking_part = (vocab.types == NORMAL) | (vocab.types == USER_DEFINED)
        taking_part[not_text(vocab.tokens)] = False
        lowest = float(scores[taking_part].min()) if taking_part.any() else 0.0
        table: list[tuple[str, float]] = []
        seen: dict[str, int] = {}
        for i, (text, score, plain) in enumerate(zip(vocab.tokens, scores.tolist(), taking_part.tolist(), strict=True)):
            if plain and text:
                if text in seen:
                    raise BadModelFile(f"token {i} is {text[:80]!r} again: token {seen[text]} has that text")
                seen[text] = i
                table.append((text, score))
            else:  # the lowest score, because the price of an unknown character is reckoned from that
                table.append((f"\0{secret}-{i}", lowest))
        try:
            self._tokenizer = Tokenizer(models.Unigram(table, vocab.unk_id, byte_fallback=False))
        except Exception as error:
            raise BadModelFile(f"the tokenizer's pieces cannot be used: {error}") from error

    def encode(self, text: str, first: bool, last: bool) -> list[int]:
        """Ids of plain text."""
        text = self._sentences.write(text, first, last)
        (made,) = self._tokenizer.encode_batch([text], add_special_tokens=False)  # which lets other threads run
        unknown, token_of = self._vocab.unk_id, self._token_of
        if token_of is None or unknown not in made.ids:
            return made.ids
        ids: list[int] = []
        for token, (begin, end) in zip(made.ids, made.offsets, strict=True):
            ids += map(token_of.__getitem__, text[begin:end].encode()) if token == unknown else [token]
        return ids

    def missing(self, data: bytes) -> bytes:
        """Bytes that cannot be expressed: none, the unknown token stands for every character."""
        return b""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text."""
        kind = self._vocab.types[token]
        if kind == BYTE:
            return bytes([self._bytes[token]])
        text = self._vocab.tokens[token]
        return raw(text if kind in (CONTROL, UNKNOWN, USER_DEFINED) else text.replace(SPACE, " "))
