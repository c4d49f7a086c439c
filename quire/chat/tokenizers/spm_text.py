"""How SentencePiece writes a text before it cuts it: characters normalized, spaces gathered, one put in front, each as U+2581.

Owns the compiled character map of such vocabularies: a trie of UTF-8 texts (a double array of 32-bit units) and what each
becomes. The longest text in the trie that begins at a place is exchanged, else one character goes through. The map comes
from a file: its sizes are checked at once, every step in the trie is checked as it is taken, and no text becomes more than
MAX_REPLACEMENT bytes, so that a prompt cannot be blown up.
"""

from __future__ import annotations

import re

import numpy as np

from quire.chat.tokenizers.vocab import Vocabulary
from quire.observe.errors import BadModelFile

SPACE = "\u2581"
MAX_CHARSMAP = 16 << 20  # bytes; nmt_nfkc has 240 thousand
MAX_REPLACEMENT = 64  # bytes; the longest of Unicode's own have 33
_MEMO = 1 << 16  # pairs of characters whose exchange is remembered
_SPACES = re.compile(" {2,}")


class Sentences:
    """Text as one vocabulary wants it written."""

    def __init__(self, vocab: Vocabulary, space_prefix: bool):
        self._prefix = SPACE if space_prefix else ""
        self._collapse = vocab.collapse_spaces
        self._map = CharacterMap(vocab.charsmap) if vocab.charsmap else None
        self.shrinks = self._collapse or self._map is not None  # a text may lose characters

    def write(self, text: str, first: bool, last: bool) -> str:
        """The text, normalized. `first`: it begins here and may get a space in front; `last`: it ends here."""
        if self._map is not None:
            text = self._map.apply(text)
        if self._collapse:
            text = _SPACES.sub(" ", text)
            text = text.lstrip(" ") if first else text
            text = text.rstrip(" ") if last else text
        if not text and last:
            return ""
        return (self._prefix if first else "") + text.replace(" ", SPACE)


class CharacterMap:
    """SentencePiece's precompiled_charsmap."""

    def __init__(self, blob: bytes):
        if len(blob) > MAX_CHARSMAP:
            raise BadModelFile(
                f"the tokenizer's character map has {len(blob)} bytes: at most {MAX_CHARSMAP} are allowed"
            )
        size = int.from_bytes(blob[:4], "little")
        if len(blob) < 4 or size % 4 or not 0 < size <= len(blob) - 4:
            raise BadModelFile(
                f"the tokenizer's character map has {len(blob)} bytes, but a trie of {size} is said to be in it"
            )
        self._units: list[int] = np.frombuffer(blob, "<u4", size // 4, 4).tolist()
        self._texts = blob[4 + size :]
        longest = max(map(len, self._texts.split(b"\0")))
        if longest > MAX_REPLACEMENT:
            raise BadModelFile(
                f"the tokenizer's character map makes {longest} bytes of one text: at most {MAX_REPLACEMENT} are allowed"
            )
        try:
            self._texts.decode()
        except UnicodeDecodeError as e:
            raise BadModelFile(f"the tokenizer's character map has texts that are not UTF-8: {e}") from None
        self._known: dict[str, tuple[str, int] | None] = {}

    def apply(self, text: str) -> str:
        """The text with everything exchanged that the map holds."""
        made: list[str] = []
        at, size, known = 0, len(text), self._known
        while at < size:
            pair = text[at : at + 2]
            found = known.get(pair, _UNKNOWN)
            if found is _UNKNOWN:
                found, whole = self._longest(pair)
                if whole and len(known) < _MEMO and len(pair) == 2:
                    known[pair] = found
                if not whole:  # more than two characters may be exchanged at once
                    found, _ = self._longest(text[at : at + 64])
            if found is None:
                made.append(text[at])
                at += 1
            else:
                made.append(found[0])
                at += found[1]
        return "".join(made)

    def _longest(self, text: str) -> tuple[tuple[str, int] | None, bool]:
        """What the longest text in the trie that this one begins with becomes, and how many characters it has; and whether
        the trie was left before the text ended."""
        units, count = self._units, len(self._units)
        node = _offset(units[0])
        best, leaf = None, 0
        for chars, char in enumerate(text, 1):
            for byte in char.encode("utf-8", "surrogatepass"):
                node ^= byte
                if node >= count or units[node] & 0x800000FF != byte:
                    return best, True
                unit = units[node]
                node ^= _offset(unit)
                leaf = unit >> 8 & 1
            if leaf and node < count:
                best = self._text(units[node] & 0x7FFFFFFF), chars
        return best, False

    def _text(self, at: int) -> str:
        end = self._texts.find(b"\0", at)
        return self._texts[at : end if end >= 0 else len(self._texts)].decode("utf-8", "replace")


_UNKNOWN: tuple[str, int] | None = ("", -1)


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)
