"""GGUF files put together byte by byte, so that any of them can be wrong in any way.

Written from the format's specification and on purpose without Quire's reader or the `gguf` package. A Maker remembers
where it put each integer of the header: the fuzzer aims at those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
SCALARS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
# ggml's types that Quire reads: number, elements of a block, bytes of a block.
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}


@dataclass
class Maker:
    """A header in the making. Values are written as they are given, right or wrong."""

    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32  # of the padding; says nothing in the file
    tensor_count: int | None = None  # None: the truth
    key_count: int | None = None
    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    key_fields: list[list[tuple[int, int]]] = field(default_factory=list)
    tensor_fields: list[list[tuple[int, int]]] = field(default_factory=list)

    def key(self, name: str | bytes, kind: int, value: object, *, length: int | None = None) -> Maker:
        """A key with a scalar, a string, or an array as (element kind, list)."""
        out = _Out()
        out.text(name, length)
        out.number("I", kind)
        out.value(kind, value)
        return self.raw_key(out.data, out.fields)

    def raw_key(self, entry: bytes, fields: Iterable[tuple[int, int]] = ()) -> Maker:
        self.keys.append(bytes(entry))
        self.key_fields.append(list(fields))
        return self

    def tensor(
        self,
        name: str | bytes,
        dims: Iterable[int],  # in the file's order: K first
        kind: str | int = "F32",
        *,
        payload: bytes | None = None,  # None: as many random bytes as it takes
        offset: int | None = None,  # None: after the one before
        ndims: int | None = None,
        length: int | None = None,
    ) -> Maker:
        dims = list(dims)
        number = TYPES[kind][0] if isinstance(kind, str) else kind
        if payload is None:
            block, nbytes = TYPES[kind][1:] if isinstance(kind, str) else (1, 4)
            size = int(np.prod(dims, dtype=object)) // block * nbytes if dims else 0
            payload = np.random.default_rng(len(self.tensors)).integers(0, 256, size, np.uint8).tobytes()
        out = _Out()
        out.text(name, length)
        out.number("I", len(dims) if ndims is None else ndims)
        for dim in dims:
            out.number("Q", dim)
        out.number("I", number)
        self.data += b"\0" * (-len(self.data) % self.alignment)
        out.number("Q", len(self.data) if offset is None else offset)
        self.data += payload
        self.tensors.append(bytes(out.data))
        self.tensor_fields.append(out.fields)
        return self

    def header(self) -> bytes:
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        keys = len(self.keys) if self.key_count is None else self.key_count
        return b"".join([self.magic, struct.pack("<IQQ", self.version, tensors, keys), *self.keys, *self.tensors])

    def build(self) -> bytes:
        head = self.header()
        return head + b"\0" * (-len(head) % self.alignment) + bytes(self.data)

    def fields(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each integer in the header."""
        found = [(4, 4), (8, 8), (16, 8)]
        at = 24
        for entry, fields in zip(self.keys + self.tensors, self.key_fields + self.tensor_fields, strict=True):
            found += [(at + offset, size) for offset, size in fields]
            at += len(entry)
        return found


class _Out:
    def __init__(self) -> None:
        self.data = bytearray()
        self.fields: list[tuple[int, int]] = []

    def number(self, code: str, value: object) -> None:
        raw = struct.pack("<" + code, value)
        self.fields.append((len(self.data), len(raw)))
        self.data += raw

    def text(self, text: str | bytes, length: int | None = None) -> None:
        raw = text.encode() if isinstance(text, str) else text
        self.number("Q", len(raw) if length is None else length)
        self.data += raw

    def value(self, kind: int, value: object) -> None:
        if kind == STRING:
            self.text(value)
        elif kind == ARRAY:
            element, items = value
            self.number("I", element)
            self.number("Q", len(items))
            for item in items:
                self.value(element, item)
        elif kind in SCALARS:
            self.number(SCALARS[kind], value)
        else:
            self.data += value


def every_type(version: int = 3) -> Maker:
    """A small file with every kind of value and every tensor type."""
    m = Maker(version)
    m.key("general.architecture", STRING, "llama").key("general.name", STRING, "Ærlig — 模型")
    for kind, value in ((U8, 255), (I8, -128), (U16, 65535), (I16, -32768), (U32, 2**32 - 1), (I32, -(2**31))):
        m.key(f"scalar.{kind}", kind, value)
    for kind, value in ((F32, 0.1), (BOOL, 1), (U64, 2**64 - 1), (I64, -(2**63)), (F64, -0.1)):
        m.key(f"scalar.{kind}", kind, value)
    for kind in SCALARS:
        m.key(f"array.{kind}", ARRAY, (kind, [0, 1, 1, 0, 1]))
    m.key("array.empty", ARRAY, (U32, [])).key("array.no_strings", ARRAY, (STRING, []))
    m.key("nested", ARRAY, (ARRAY, [(U32, [1, 2, 3]), (STRING, ["a", "b"]), (ARRAY, [(BOOL, [1])])]))
    m.key("llama.context_length", U32, 2048).key("llama.block_count", U32, 2)
    m.key("not_utf8", STRING, b"caf\xe9\xff")
    for i, (name, (_, block, _)) in enumerate(TYPES.items()):
        m.tensor(f"t.{name}", [max(block, 32), 2 + i % 3], name)
    return m


def vocabulary() -> Maker:
    """A tokenizer's arrays: short strings, empty ones, long ones, zeros, bytes that are not UTF-8."""
    rng = np.random.default_rng(1)
    words = [b"", b"\0", b"\xff\xfe", b"x" * 300, "Ġ模".encode(), b"\0" * 9, b"a\0\0\0\0\0\0\0\0b"]
    words += [bytes(rng.integers(1, 256, rng.integers(1, 12), np.uint8)) for _ in range(900)]
    m = Maker().key("general.architecture", STRING, "llama").key("tokenizer.ggml.model", STRING, "gpt2")
    m.key("tokenizer.ggml.tokens", ARRAY, (STRING, words))
    m.key("tokenizer.ggml.scores", ARRAY, (F32, [float(-i) for i in range(len(words))]))
    m.key("tokenizer.ggml.token_type", ARRAY, (I32, [1] * len(words)))
    m.key("tokenizer.ggml.merges", ARRAY, (STRING, [b"a b"] * 500))
    return m.tensor("token_embd.weight", [32, 8], "Q8_0").tensor("output_norm.weight", [32], "F32")


def stacked() -> Maker:
    """Version 2, a larger alignment, tensors of one, three and four dimensions."""
    m = Maker(2, alignment=64).key("general.alignment", U32, 64).key("general.architecture", STRING, "moe")
    m.key("moe.attention.head_count_kv", ARRAY, (I32, [4, 4, 2, 2]))
    m.tensor("experts", [64, 3, 4], "Q4_1").tensor("deep", [32, 2, 2, 2], "Q5_0").tensor("vector", [256], "Q6_K")
    return m.tensor("halves", [5, 3], "F16").tensor("brain", [7], "BF16")


SAMPLES = {"every_type": every_type, "vocabulary": vocabulary, "stacked": stacked}
