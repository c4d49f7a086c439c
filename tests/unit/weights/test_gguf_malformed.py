"""Broken and hostile GGUF files: each is refused, with the byte, the key or tensor, and the numbers in the message."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.observe.errors import BadModelFile
from quire.weights.gguf import header as gguf_header
from quire.weights.gguf.file import GGUF
from tests.effort import at_most
from tests.fuzz import maker
from tests.fuzz.maker import ARRAY, BOOL, F32, I32, STRING, U8, U32, U64, Maker

Case = tuple[Callable[[], Maker | bytes], list[str]]
BIG = 2**64 - 1


def array_of(kind: int, count: int, rest: bytes = b"") -> bytes:
    """A key `a` whose value is an array that claims `count` elements."""
    return struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", ARRAY, kind, count) + rest


def nested(depth: int) -> object:
    value: object = (U8, [1])
    for _ in range(depth - 1):
        value = (ARRAY, [value])
    return value


def one(**how: object) -> Maker:
    """A file with one tensor `t`, wrong in one way."""
    arguments: dict[str, object] = {"name": "t", "dims": [32, 2], "kind": "F32", **how}
    return Maker().tensor(**arguments)


PREAMBLE: dict[str, Case] = {
    "a single byte": (lambda: b"G", ["byte 0", "b'G'"]),
    "another magic": (lambda: Maker(magic=b"GGML"), ["byte 0", "not a GGUF file", "b'GGML'"]),
    "a zip file": (lambda: b"PK\3\4" + bytes(100), ["byte 0", "not a GGUF file"]),
    "magic and nothing else": (
        lambda: b"GGUF",
        ["byte 4", "the version takes 4 bytes", "ends after 0", "fetch it again"],
    ),
    "half a version": (lambda: b"GGUF\3\0", ["byte 4", "ends after 2"]),
    "version 1": (lambda: Maker(version=1), ["byte 4", "version 1 is not supported"]),
    "version 4": (lambda: Maker(version=4), ["byte 4", "version 4 is not supported"]),
    "version 0": (lambda: Maker(version=0), ["byte 4", "version 0 is not supported"]),
    "big endian": (lambda: Maker(version=0x03000000), ["byte 4", "big endian"]),
    "big endian, version 2": (lambda: Maker(version=0x02000000), ["byte 4", "big endian"]),
    "no counts": (lambda: Maker().header()[:12], ["byte 8", "tensor count and the key count", "ends after 4"]),
    "countless tensors": (lambda: Maker(tensor_count=BIG), ["byte 8", f"claims {BIG} tensors", "at most 0"]),
    "countless keys": (lambda: Maker(key_count=BIG), ["byte 16", f"claims {BIG} keys", "at most"]),
    "more keys than bytes": (
        lambda: Maker(key_count=3).key("a", U8, 1).key("b", U8, 1).header(),
        ["byte 16", "claims 3 keys", "28 bytes are left", "at most 2"],
    ),
    "one tensor too many": (lambda: Maker(tensor_count=1), ["byte 8", "claims 1 tensors", "at most 0"]),
}

KEYS: dict[str, Case] = {
    "an endless key": (lambda: Maker().key("a", U8, 1, length=BIG), ["byte 24", "name of key 0", f"{BIG} bytes long"]),
    "a key past the end": (
        lambda: Maker().key("a", U8, 1, length=60000).header(),
        ["byte 32", "takes 60000 bytes", "ends after 6"],
    ),
    "a key over the bound": (lambda: Maker().key("k" * 65536, U8, 1), ["byte 24", "65536 bytes long", "1 to 65535"]),
    "an empty key": (lambda: Maker().key("", U64, 1), ["byte 24", "name of key 0", "0 bytes long"]),
    "a key that is not UTF-8": (lambda: Maker().key(b"ab\xffd", U8, 1), ["byte 34", "name of key 0", "not UTF-8"]),
    "a key twice": (
        lambda: Maker().key("a.b", U8, 1).key("c", U8, 1).key("a.b", U8, 2),
        ["byte 54", "'a.b' is there twice", "byte 24"],
    ),
    "no type": (
        lambda: Maker(key_count=1).key("k" * 12, U8, 1).build()[:44],
        ["byte 44", "type of key 'kkkkkkkkkkkk'"],
    ),
    "an unknown type": (lambda: Maker().key("a", 13, b"\0" * 8), ["byte 33", "key 'a' has value type 13"]),
    "a huge type": (lambda: Maker().key("a", 2**32 - 1, b"\0" * 8), ["byte 33", f"value type {2**32 - 1}"]),
    "half a number": (
        lambda: Maker().raw_key(struct.pack("<Q", 1) + b"a" + struct.pack("<I", U64) + b"\0" * 4).header(),
        ["byte 37", "value of key 'a' takes 8 bytes", "ends after 4"],
    ),
    "a boolean of 2": (lambda: Maker().key("a", BOOL, 2), ["byte 37", "key 'a'", "the value 2"]),
    "an endless string": (
        lambda: Maker().raw_key(struct.pack("<Q", 1) + b"a" + struct.pack("<IQ", STRING, BIG)),
        ["byte 45", "the string of key 'a'", f"takes {BIG} bytes"],
    ),
    "a string one byte too long": (
        lambda: Maker().raw_key(struct.pack("<Q", 1) + b"a" + struct.pack("<IQ", STRING, 6) + b"hello").header(),
        ["byte 45", "takes 6 bytes", "ends after 5"],
    ),
}

ARRAYS: dict[str, Case] = {
    "no element type": (
        lambda: Maker().raw_key(struct.pack("<Q", 1) + b"a" + struct.pack("<IH", ARRAY, 0)).header(),
        ["byte 37", "element type of key 'a'", "ends after 2"],
    ),
    "an unknown element type": (lambda: Maker().raw_key(array_of(77, 1, b"x")), ["byte 37", "array of value type 77"]),
    "no length": (
        lambda: Maker().raw_key(array_of(U8, 0)[:-3]).header(),
        ["byte 41", "array length of key 'a'", "ends after 5"],
    ),
    "endless numbers": (lambda: Maker().raw_key(array_of(U32, BIG)), ["byte 41", "key 'a'", f"claims {BIG} elements"]),
    "numbers that wrap to few bytes": (
        lambda: Maker().raw_key(array_of(U64, 2**61 + 1, bytes(64))),
        ["byte 41", str(2**61 + 1)],
    ),
    "one number too many": (
        lambda: Maker().raw_key(array_of(I32, 3, bytes(11))).header(),
        ["byte 41", "claims 3 elements", "11 bytes are left"],
    ),
    "endless strings": (
        lambda: Maker().raw_key(array_of(STRING, BIG)),
        ["byte 41", "key 'a'", f"claims {BIG} elements"],
    ),
    "more strings than bytes": (
        lambda: Maker().raw_key(array_of(STRING, 5, bytes(39))).header(),
        ["byte 41", "claims 5"],
    ),
    "a string that runs out of the file": (
        lambda: Maker().raw_key(array_of(STRING, 3, b"\1" + bytes(7) + b"a" + b"\xff" * 8 + bytes(8))),
        ["byte 58", "string 1 of key 'a'", f"takes {BIG + 8} bytes"],
    ),
    "a long vocabulary cut off": (
        lambda: Maker().key("a", ARRAY, (STRING, ["tok"] * 20000)).header()[:-1],
        [f"byte {49 + 19999 * 11}", "string 19999 of key 'a' takes 11 bytes", "ends after 10"],
    ),
    "a vocabulary of empty strings cut off": (
        lambda: Maker().raw_key(array_of(STRING, 6, bytes(40) + b"\1" + bytes(7))).header(),
        ["byte 89", "string 5 of key 'a' takes 9 bytes", "ends after 8"],
    ),
    "a boolean of 255 in an array": (
        lambda: Maker().key("a", ARRAY, (BOOL, [1, 0, 255, 1])),
        ["byte 51", "key 'a'", "element 2", "255"],
    ),
    "arrays too deep": (lambda: Maker().key("a", ARRAY, nested(5)), ["key 'a'", "nests arrays too deep", "4 deep"]),
    "arrays without end": (lambda: Maker().raw_key(array_of(ARRAY, BIG)), ["byte 41", f"claims {BIG} elements"]),
    "too many arrays": (
        lambda: Maker().key("a", ARRAY, (ARRAY, [(U8, [])] * (gguf_header.MAX_NESTED + 1))),
        ["byte 37", "key 'a'", "too often"],
    ),
    "an unknown type in an inner array": (
        lambda: Maker().raw_key(array_of(ARRAY, 1, struct.pack("<IQ", 99, 1))),
        ["byte 49", "key 'a'", "value type 99"],
    ),
}

ALIGNMENT: dict[str, Case] = {
    "zero": (lambda: Maker().key("general.alignment", U32, 0), ["byte 24", "'general.alignment' is 0", "power of two"]),
    "not a power of two": (lambda: Maker().key("general.alignment", U32, 48), ["'general.alignment' is 48"]),
    "too small": (lambda: Maker().key("general.alignment", U32, 4), ["'general.alignment' is 4", "from 8"]),
    "too large": (lambda: Maker().key("general.alignment", U32, 2**31), [f"'general.alignment' is {2**31}"]),
    "negative": (lambda: Maker().key("general.alignment", I32, -32), ["'general.alignment' is -32"]),
    "text": (
        lambda: Maker().key("general.alignment", STRING, "32"),
        ["byte 24", "'general.alignment' is not an integer"],
    ),
    "a float": (lambda: Maker().key("general.alignment", F32, 32.0), ["'general.alignment' is not an integer"]),
    "a boolean": (lambda: Maker().key("general.alignment", BOOL, 1), ["'general.alignment' is not an integer"]),
}

TENSORS: dict[str, Case] = {
    "an endless name": (lambda: one(length=BIG), ["byte 24", "name of tensor 0", f"{BIG} bytes long"]),
    "a name over the bound": (lambda: one(name="n" * 257), ["byte 24", "257 bytes long", "1 to 256"]),
    "an empty name": (lambda: one(name="", dims=[32, 2, 2]), ["byte 24", "name of tensor 0", "0 bytes long"]),
    "a name that is not UTF-8": (lambda: one(name=b"\xc3("), ["byte 32", "name of tensor 0", "not UTF-8"]),
    "a name twice": (
        lambda: Maker().tensor("t", [32]).tensor("u", [32]).tensor("t", [32]),
        ["byte 90", "tensor 't' is there twice", "byte 24"],
    ),
    "no dimensions": (lambda: one(ndims=0), ["byte 33", "tensor 't' has 0 dimensions"]),
    "five dimensions": (lambda: one(dims=[32, 1, 1, 1, 1]), ["byte 33", "tensor 't' has 5 dimensions", "1 to 4"]),
    "countless dimensions": (lambda: one(ndims=2**32 - 1), ["byte 33", f"has {2**32 - 1} dimensions"]),
    "a dimension of zero": (lambda: one(dims=[32, 0]), ["byte 45", "tensor 't' has shape [0, 32]", "zero"]),
    "dimensions whose product wraps to zero": (
        lambda: one(dims=[2**32, 2**32], payload=b""),
        ["byte 24", "tensor 't'", f"shape [{2**32}, {2**32}]", f"takes {2**66} bytes"],
    ),
    "dimensions whose product wraps to the truth": (
        lambda: one(dims=[2**32 + 32, 2**32], payload=bytes(128)),
        ["tensor 't'", f"takes {(2**32 + 32) * 2**32 * 4} bytes"],
    ),
    "the largest dimension": (lambda: one(dims=[BIG], payload=b""), ["tensor 't'", f"takes {BIG * 4} bytes"]),
    "an entry that ends early": (
        lambda: one().header()[:-5],
        ["byte 37", "entry of tensor 't'", "takes 28 bytes", "after 23"],
    ),
    "no type 4 any more": (lambda: one(kind=4), ["tensor 't' has type Q4_2 (4)", "not supported"]),
    "Q8_K": (lambda: one(kind=15), ["byte 24", "tensor 't' has type Q8_K (15)", "supported types: BF16, F16"]),
    "NVFP4": (lambda: one(kind=40), ["tensor 't' has type NVFP4 (40)"]),
    "NVFP4 and others": (
        lambda: Maker().tensor("t", [32], 40).tensor("u", [32], 40).tensor("v", [32], 26),
        ["tensor 't' has type NVFP4 (40)", "1 more of type NVFP4", "1 more of type I32"],
    ),
    "an unknown type": (lambda: one(kind=12345), ["byte 24", "tensor 't' has type 12345", "no known GGML type"]),
    "rows that are not whole blocks": (
        lambda: one(dims=[48, 2], kind="Q4_0", payload=bytes(64)),
        ["byte 24", "tensor 't' has rows of 48", "Q4_0 needs a multiple of 32"],
    ),
    "whole blocks in all, but not in a row": (
        lambda: one(dims=[128, 2], kind="Q6_K", payload=bytes(210)),
        ["tensor 't' has rows of 128", "Q6_K needs a multiple of 256"],
    ),
    "an offset that is not aligned": (
        lambda: one(offset=16, payload=bytes(1024)),
        ["byte 24", "tensor 't' has offset 16", "multiple of the alignment, 32"],
    ),
    "an offset that suits only the default alignment": (
        lambda: Maker(alignment=64).key("general.alignment", U32, 64).tensor("t", [8], offset=32, payload=bytes(256)),
        ["tensor 't' has offset 32", "alignment, 64"],
    ),
    "an offset past the end": (
        lambda: one(offset=2**20),
        ["tensor 't'", "takes 256 bytes", f"from byte {2**20 + 96} on"],
    ),
    "an offset that wraps": (lambda: one(offset=2**64 - 96), ["tensor 't'", f"from byte {2**64} on"]),
    "a tensor one byte too long": (
        lambda: one(payload=bytes(255)),
        ["tensor 't' (F32, shape [2, 32]) takes 256 bytes from byte 96 on", "file ends at byte 351", "fetch it again"],
    ),
    "tensors without data": (lambda: one().header(), ["tensor 't'", "from byte 96 on", "file ends at byte 65"]),
    "two tensors in one place": (
        lambda: Maker().tensor("t", [32]).tensor("u", [32], offset=0),
        ["byte 57", "tensor 'u' (bytes 96 to 224) overlaps tensor 't' (bytes 96 to 224)"],
    ),
    "a tensor that reaches into another": (
        lambda: Maker().tensor("a", [32], offset=64).tensor("t", [32], offset=0, payload=bytes(256)),
        ["byte 24", "tensor 'a' (bytes 160 to 288) overlaps tensor 't' (bytes 96 to 224)"],
    ),
    "a part of a split model": (
        lambda: Maker().key("split.count", U32, 3).key("split.no", U32, 1),
        ["is part 2 of 3", "'split.count'", "opened by its first file", "-00001-of-00003.gguf"],
    ),
    "a first part under another name": (
        lambda: Maker().key("split.count", U32, 3).key("split.no", U32, 0),
        ["is part 1 of 3", "opened by its first file"],
    ),
    "more parts than there can be": (
        lambda: Maker().key("split.count", U32, 2**31),
        ["key 'split.count' is 2147483648", "0 to 1024"],
    ),
    "a split count that is no number": (
        lambda: Maker().key("split.count", STRING, "3"),
        ["'split.count' is the string '3'"],
    ),
}
CASES = {
    f"{group}: {name}": case
    for group, cases in (
        ("preamble", PREAMBLE),
        ("keys", KEYS),
        ("arrays", ARRAYS),
        ("alignment", ALIGNMENT),
        ("tensors", TENSORS),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_reasons(name: str, tmp_path: Path) -> None:
    make, words = CASES[name]
    made = make()
    path = tmp_path / "bad.gguf"
    path.write_bytes(made if isinstance(made, bytes) else made.build())
    tracemalloc.start()
    try:
        with pytest.raises(BadModelFile) as caught:
            GGUF.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(path) in message
    for word in words:
        assert word in message
    assert peak < 8 << 20, "a lie in the header cost memory"


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    with pytest.raises(BadModelFile, match=r"empty\.gguf is empty: 0 bytes"):
        GGUF.open(path)


@pytest.mark.parametrize("sample", maker.SAMPLES)
def test_cut_anywhere(sample: str, tmp_path: Path) -> None:
    """Many lengths up to the whole file: refused until the last tensor is whole."""
    made = maker.SAMPLES[sample]()
    whole = made.build()
    path = tmp_path / "cut.gguf"
    lengths = [*range(1, 700), *range(700, len(whole), 61), len(whole) - 1]
    for n in lengths:
        path.write_bytes(whole[:n])
        with pytest.raises(BadModelFile, match=r"byte \d+"):
            GGUF.open(path)
        path.unlink()  # cheaper than cutting it to nothing before the next
    path.write_bytes(whole)
    GGUF.open(path).close()


def test_a_header_over_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is a gigabyte; a small one stands in for it here."""
    monkeypatch.setattr(gguf_header, "MAX_HEADER", 64)
    path = tmp_path / "long.gguf"
    path.write_bytes(Maker().key("a", STRING, "x" * 100).build())
    with pytest.raises(
        BadModelFile, match="byte 45: the string of key 'a' takes 100 bytes, which goes past the first 64"
    ):
        GGUF.open(path)


@pytest.mark.parametrize("fill", [0, 1, 255])
def test_many_odd_strings_take_little_time(fill: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty and long strings defeat the fast path: the slow one still takes well under a microsecond each."""
    n = 400_000
    data = bytes(8 * n) if fill == 0 else (struct.pack("<Q", 256) + bytes([fill]) * 256) * (n // 33)
    count = n if fill == 0 else n // 33
    path = tmp_path / "many.gguf"
    path.write_bytes(Maker().raw_key(array_of(STRING, count, data)).build())
    with at_most(3.0), GGUF.open(path) as ours:
        assert len(ours.metadata.get_strings("a")) == count
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", count - 1)
    with pytest.raises(BadModelFile, match=f"byte 41: key 'a' brings the file to {count} strings: at most {count - 1}"):
        GGUF.open(path)
