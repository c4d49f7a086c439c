"""The process behind `isolated.py`: one tokenizer.json, texts in, ids out, each under an alarm that ends the process.

Requests and answers are msgpack behind their length in eight bytes. The first request brings the file.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import Any

import msgspec


def main() -> None:
    """Serve until the other end closes."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, wherever it is
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    first = _read()
    if first is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (first["memory"], first["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import tokenizers

    signal.alarm(first["seconds"])
    library: Any = None
    try:
        library = tokenizers.Tokenizer.from_str(first["source"])
        library.no_truncation()
        library.no_padding()
        answer: dict[str, Any] = {}
    except BaseException as e:
        answer = {"error": str(e)[:300]}
    signal.alarm(0)
    _write(answer)
    while library is not None and (request := _read()) is not None:
        signal.alarm(request["seconds"])
        try:
            answer = {"ids": library.encode(request["text"], add_special_tokens=False).ids}
        except BaseException as e:  # the library's panics are outside Exception's tree
            answer = {"error": str(e)[:300]}
        signal.alarm(0)
        _write(answer)


def _read() -> Any:
    size = sys.stdin.buffer.read(8)
    if len(size) < 8:
        return None
    return msgspec.msgpack.decode(sys.stdin.buffer.read(struct.unpack("<Q", size)[0]))


def _write(answer: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode(answer)
    sys.stdout.buffer.write(struct.pack("<Q", len(data)) + data)
    sys.stdout.buffer.flush()
