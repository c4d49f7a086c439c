"""What a name that was made by /api/create adds to a request: its options stand where the request has none; its system text and its
messages come before a conversation that has no system text of its own. Which names are answered at all, `_ollama.py` says.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.observe.errors import BadRequest
from quire.weights.manifest import Defaults


def options(defaults: Defaults, given: msgspec.Raw) -> msgspec.Raw:
    """The options of a request over the name's own."""
    if not defaults.parameters:
        return given
    if bytes(given) == b"null":
        return msgspec.Raw(msgspec.json.encode(defaults.parameters))
    try:
        asked = msgspec.json.decode(given, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest("options must be an object", param="options") from None
    return msgspec.Raw(msgspec.json.encode({**defaults.parameters, **asked}))


def before(defaults: Defaults, roles: list[str]) -> list[dict[str, Any]]:
    """What comes before the messages of a conversation with these roles: the system text, if it has none, and the name's own messages."""
    system = [{"role": "system", "content": defaults.system}] if defaults.system and roles[:1] != ["system"] else []
    return [*system, *defaults.messages]
