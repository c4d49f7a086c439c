"""What agents send, made fit to be kept: structure, names, schemas and lengths stay; prose, paths, ids and dates do not.

The texts in an agent's requests are its maker's, and some tell about the machine it ran on. Each is replaced by filler of the same length with
the line ends where they were; a tool's name, its parameters and their types are what a server has to read, and stay.
"""

from __future__ import annotations

import json
import re
from typing import Any

WORDS = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna aliqua "
IDS = ("id", "call_id", "tool_use_id", "tool_call_id", "prompt_cache_key", "session_id", "previous_response_id")
SCHEMAS = ("parameters", "input_schema")
# Values that are the protocol's own words, or those of the tests.
KEPT = {
    *("type", "role", "name", "model", "tool_choice", "effort", "summary", "include", "status", "phase", "display"),
    *("ttl", "edits", "keep", "service_tier", "verbosity", "encrypted_content", "signature", "format", "namespace"),
    "search_content_types",
}
BILLING = "x-anthropic-billing-header:"  # the server knows such a line by its beginning
PROSE = 24  # characters of a text from which on none of it may be found again


class Redactor:
    """Keeps ids apart from each other: the same one becomes the same placeholder everywhere."""

    def __init__(self, project: str):
        self.project = project  # the path that the tests' own arguments hold
        self._ids: dict[str, str] = {}
        self._own = ""  # arguments of calls, which are the tests' own words
        self.prose: set[str] = set()  # everything that was replaced, to look for afterwards

    def body(self, value: Any, key: str = "") -> Any:
        """A request's body, or a part of it that stands under `key`."""
        if isinstance(value, dict):
            return {name: self._member(name, inner, value) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.body(inner, key) for inner in value]
        if not isinstance(value, str) or key in KEPT:
            return value
        return self.filled(value)

    def _member(self, name: str, value: Any, around: dict[str, Any]) -> Any:
        if name in SCHEMAS:
            return self._schema(value)
        if name in IDS and isinstance(value, str):
            return self._id(value)
        if (name == "arguments" and isinstance(value, str)) or (
            name == "input" and isinstance(value, dict)
        ):  # of a call
            text = (value if isinstance(value, str) else json.dumps(value)).replace(self.project, "/project")
            self._own += text + "\n"
            return text if isinstance(value, str) else json.loads(text)
        if name == "encrypted_content" or (name in KEPT and not isinstance(value, dict | list)):
            return value
        return self.body(value, name)

    def _schema(self, value: Any) -> Any:
        """A JSON schema without its descriptions. A property may be called like a keyword."""
        if isinstance(value, list):
            return [self._schema(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            name: self.filled(inner)
            if name in ("description", "title", "$comment") and isinstance(inner, str)
            else self._schema(inner)
            for name, inner in value.items()
        }

    def filled(self, text: str) -> str:
        """Filler of the same length, in as many lines."""
        head = BILLING + " " if text.startswith(BILLING) else ""
        rest = text[len(head) :]
        if len(rest) >= PROSE:
            self.prose.add(rest)
        filler = (WORDS * (len(rest) // len(WORDS) + 1))[: len(rest)]
        return head + "".join("\n" if old == "\n" else new for old, new in zip(rest, filler, strict=True))

    def _id(self, text: str) -> str:
        if text not in self._ids:
            kind = (re.match(r"[a-z]+_", text) or [""])[0]
            self._ids[text] = f"{kind}{len(self._ids):0{max(1, len(text) - len(kind))}d}"
        return self._ids[text]

    def header(self, name: str, text: str) -> str:
        """A header's value without ids, and without what a program says of its machine."""
        kept = text.split()[0] if name == "user-agent" else text
        return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{16,}", lambda m: "0" * len(m[0]), kept)

    def leaks(self, kept: str) -> list[str]:
        """Pieces of what was replaced that are in `kept` all the same."""
        found = []
        for text in self.prose:
            pieces = [text[at : at + PROSE] for at in range(0, len(text) - PROSE + 1, PROSE)]
            found += [piece for piece in pieces if json.dumps(piece)[1:-1] in kept and piece not in self._own]
        return found
