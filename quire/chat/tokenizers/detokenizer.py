"""Token ids to text as they come: exact, and constant work for each token.

Works on token bytes, so it never has to decode a window again. What it hands out is final: half a character waits for
the rest of it, and U+FFFD appears only where no later token could have completed the bytes. The texts of all `feed`
calls and of `finish`, joined, are what `Tokenizer.decode` says of all ids at once.
"""

from __future__ import annotations

import codecs

from quire.chat.tokenizers.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One stream of tokens. at_start=False is for a continuation, whose first space belongs to the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        at_start: bool = False,
        keep: frozenset[int] = frozenset(),
    ):
        """`keep` are special tokens that are written out where the others are skipped."""
        self._tokenizer = tokenizer
        self._keep = keep
        self._skip_special = skip_special
        self._strip = at_start and tokenizer.space_prefix
        self._decoder = _utf8("replace")

    def feed(self, token: int) -> str:
        """The text that is certain once this token is known; often that of the token, sometimes nothing yet."""
        if self._skip_special and self._tokenizer.is_special(token) and token not in self._keep:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was held back: U+FFFD for bytes that never became a character, or nothing."""
        return self._decoder.decode(b"", final=True)
