"""A tokenizer whose regular expressions are not known to be linear, in a process of its own: bounded time, bounded memory.

A regular expression cannot be stopped from outside the call that runs it, a process can: the kernel ends it when its
alarm rings or its memory is spent. What remains here is an error for that one request, and a fresh process for the next.
The process reads requests from its standard input and ends with it, so it never outlives this one. It costs a start (a
few tenths of a second) and a copy of the vocabulary, and it is for such files alone.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading

import msgspec

from quire.observe.errors import BadModelFile, BadRequest

LOAD_SECONDS = 30
SECONDS = 3  # for one text, and one more for every MEGABYTE of it
MEGABYTE = 1 << 20
MEMORY = 4 << 30  # bytes of address space
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from quire.chat.tokenizers.isolated_main import main; main()"


class IsolatedTokenizer:
    """Text to ids by one tokenizer.json, at a distance. Safe to use from several threads; they take turns."""

    def __init__(self, where: str, source: str):
        self._where = where
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, special tokens in it read as such. Raises BadRequest where that takes too long."""
        seconds = SECONDS + len(text) // MEGABYTE
        with self._lock:
            if self._process is None:
                self._start()
            reply = self._ask({"text": text, "seconds": seconds})
        if reply is None:
            raise BadRequest(
                f"the text was not tokenized within {seconds} seconds and {MEMORY >> 30} GiB: the model's tokenizer has "
                "a regular expression that takes too long on it",
                param="prompt",
                code="tokenizer_limit",
            )
        if "error" in reply:
            raise BadRequest(f"the text cannot be tokenized: {reply['error']}", param="prompt")
        return reply["ids"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, _ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        reply = self._ask({"source": self._source, "seconds": LOAD_SECONDS, "memory": MEMORY})
        if reply is None or "error" in reply:
            self.close()
            why = "it took too much time or memory" if reply is None else reply["error"]
            raise BadModelFile(f"{self._where} cannot be used: {why}")

    def _ask(self, question: dict[str, object]) -> dict | None:
        """The answer, or None where the process ended over it."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        data = msgspec.msgpack.encode(question)
        try:
            process.stdin.write(struct.pack("<Q", len(data)) + data)
            process.stdin.flush()
            size = process.stdout.read(8)
            reply = process.stdout.read(struct.unpack("<Q", size)[0]) if len(size) == 8 else b""
            return msgspec.msgpack.decode(reply)
        except (OSError, msgspec.DecodeError):
            self.close()
            return None
