"""Tensors of the KServe v2 protocol: JSON, or JSON with the bytes of the tensors after it (the binary extension), both ways.

Owns the shapes of a request's inputs and outputs and every check on them: names, types, shapes, sizes. What a tensor means is
`routes.py`'s business. A tensor here is short and flat: numbers, truths or texts.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeAlias

import msgspec

from quire.observe.errors import BadRequest
from quire.server.shared import bodies

MAX_ELEMENTS = 4096
Value: TypeAlias = str | bool | int | float
# KServe's names of types -> how one element is packed
PACKED = {
    "BOOL": "<?",
    "INT8": "<b",
    "INT16": "<h",
    "INT32": "<i",
    "INT64": "<q",
    "UINT8": "<B",
    "UINT16": "<H",
    "UINT32": "<I",
    "UINT64": "<Q",
    "FP16": "<e",
    "FP32": "<f",
    "FP64": "<d",
}


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """One input."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class OutputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """One output that the client wants."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(msgspec.Struct, kw_only=True):
    """The body of /infer, or its JSON part."""

    inputs: list[InputTensor]
    outputs: list[OutputTensor] | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


def split(body: bytes, header: str | None) -> tuple[bytes, bytes]:
    """The JSON part, and the tensors' bytes that follow it."""
    if header is None:
        return body, b""
    if not header.isascii() or not header.isdigit() or int(header) > len(body):
        raise BadRequest(
            "the header inference-header-content-length must be the length of the body's JSON part",
            param="inference-header-content-length",
        )
    return body[: int(header)], body[int(header) :]


def read(inputs: list[InputTensor], tail: bytes) -> dict[str, list[Value]]:
    """The elements of every input, by its name."""
    found: dict[str, list[Value]] = {}
    for i, tensor in enumerate(inputs):
        where = f"inputs[{i}]"
        if tensor.name in found:
            raise BadRequest(f"{where}: there are two inputs called {tensor.name[:64]!r}", param=f"{where}.name")
        if tensor.datatype not in PACKED and tensor.datatype != "BYTES":
            raise BadRequest(f"{where}.datatype is {tensor.datatype[:32]!r}: no such type", param=f"{where}.datatype")
        if any(n < 0 for n in tensor.shape) or len(tensor.shape) > 8 or math.prod(tensor.shape) > MAX_ELEMENTS:
            raise BadRequest(f"{where}.shape must hold at most {MAX_ELEMENTS} elements", param=f"{where}.shape")
        count = math.prod(tensor.shape)
        size = (tensor.parameters or {}).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(tail) or tensor.data is not None:
                raise BadRequest(f"{where}: binary_data_size does not fit the body", param=f"{where}.parameters")
            values, tail = unpack(tail[:size], tensor.datatype, count, where), tail[size:]
        else:
            values = _flat(tensor, where)
        if len(values) != count:
            raise BadRequest(
                f"{where} has {len(values)} elements: its shape {tensor.shape} says {count}", param=f"{where}.data"
            )
        found[tensor.name] = values
    if tail:
        raise BadRequest(f"{len(tail)} bytes follow the last tensor", param="inputs")
    return found


def _flat(tensor: InputTensor, where: str) -> list[Value]:
    if tensor.data is None:
        raise BadRequest(f"{where}.data is missing", param=f"{where}.data")
    bodies.bounded(f"{where}.data", tensor.data)
    values: list[Any] = tensor.data
    while any(isinstance(v, list) for v in values):  # nested as its shape, or flat: both are allowed
        if not all(isinstance(v, list) for v in values):
            raise BadRequest(f"{where}.data mixes lists and values", param=f"{where}.data")
        values = [v for row in values for v in row]
    want: tuple[type, ...] = (str,)
    if tensor.datatype != "BYTES":
        want = (bool,) if tensor.datatype == "BOOL" else (int, float) if tensor.datatype.startswith("FP") else (int,)
    if not all(isinstance(v, want) and (bool in want or not isinstance(v, bool)) for v in values):
        raise BadRequest(f"{where}.data does not hold {tensor.datatype} values", param=f"{where}.data")
    return values


def unpack(data: bytes, kind: str, count: int, where: str) -> list[Value]:
    """Elements from their bytes: little-endian; each text after its length."""
    if kind != "BYTES":
        size = struct.calcsize(PACKED[kind])
        if len(data) != size * count:
            raise BadRequest(f"{where} has {len(data)} bytes: {count} of {kind} are {size * count}", param=where)
        return [struct.unpack_from(PACKED[kind], data, size * i)[0] for i in range(count)]
    texts: list[Value] = []
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at + 4 > len(data) or end > len(data) or len(texts) >= count:
            raise BadRequest(f"{where}: its bytes are not {count} texts with their lengths", param=where)
        try:
            texts.append(data[at + 4 : end].decode())
        except UnicodeDecodeError:
            raise BadRequest(f"{where}: element {len(texts)} is not UTF-8", param=where) from None
        at = end
    return texts


def pack(texts: list[str]) -> bytes:
    """Texts as a BYTES tensor."""
    return b"".join(struct.pack("<I", len(data)) + data for data in (text.encode() for text in texts))
