"""An end to the digits of a JSON number: a schema that allows any number allows one that no program can read.

Knows bytes and no grammar. JSON bounds neither digits nor exponents; Python reads no integer of five thousand digits, Go and
Rust none above 1e308, and a small model may write threes after a point for ever. Only ever narrows: where a schema leaves
nothing but further digits, they are written.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from quire.engine.types import Vocabulary

DIGITS = 32  # in a row, before a point or after it; a token that begins below may end above
EXPONENT = 2  # digits
_NUMBER = re.compile(rb"[-+0-9.eE]")
_HUGE = re.compile(rb"[eE][-+]?[0-9]{%d}" % (EXPONENT + 1))
_QUOTE, _ESCAPE = b'"'[0], b"\\"[0]


class Digits:
    """What tokens do to a number, by id. Made once for a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, width: int):
        self.tokens = vocabulary.tokens
        known = vocabulary.tokens[:width]
        self.leading: npt.NDArray[np.int32] = np.zeros(width, np.int32)  # digits at a token's beginning
        self.leading[: len(known)] = [len(t) - len(t.lstrip(b"0123456789")) for t in known]
        self.huge: npt.NDArray[np.bool_] = np.zeros(width, np.bool_)
        self.huge[: len(known)] = [_HUGE.search(t) is not None for t in known]
        self.longest = int(self.leading.max(initial=0))
        self.any_huge = bool(self.huge.any())


class NumberWatch:
    """Where one answer is: within a string, or at so many digits of a number."""

    __slots__ = ("_digits", "_escaped", "_number", "_string")

    def __init__(self, digits: Digits):
        self._digits = digits
        self._string = False
        self._escaped = False
        self._number = b""

    def take(self, tokens: list[int]) -> None:
        """Follow what was written."""
        for token in tokens:
            if token < len(self._digits.tokens):
                self._follow(self._digits.tokens[token])

    def _follow(self, data: bytes) -> None:
        for byte in data:
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif byte == _ESCAPE:
                    self._escaped = True
                elif byte == _QUOTE:
                    self._string = False
            elif byte == _QUOTE:
                self._string, self._number = True, b""
            elif _NUMBER.match(bytes((byte,))):
                self._number += bytes((byte,))
            else:
                self._number = b""

    def narrow(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """What may come next, less the digits that are too many; all of it, where there is nothing else."""
        number = self._number
        if self._string or not number or number in (b"e", b"E"):  # the letters of true and false
            return mask
        power = max(number.rfind(b"e"), number.rfind(b"E"))
        if power >= 0:
            room = EXPONENT - len(number[power + 1 :].lstrip(b"+-"))
        else:
            room = DIGITS - len(number[number.rfind(b".") + 1 :].lstrip(b"-"))
        if room >= self._digits.longest and not self._digits.any_huge:
            return mask
        less = mask & ~((self._digits.leading > max(room, 0)) | self._digits.huge)
        return less if less.any() else mask
