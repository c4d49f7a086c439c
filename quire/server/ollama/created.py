"""Defaults of names that were made by /api/create, added to a request.

An option of the name holds where the request has none. Its system text and messages come before the conversation, the system text unless the
conversation has one. Its template takes the place of the model's. `names.py` says which names are answered, and with which template.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.observe.errors import BadRequest
from quire.weights.store.manifest import Defaults


def options(made: Defaults | None, given: msgspec.Raw) -> msgspec.Raw:
    """The options of a request over the name's own."""
    if made is None or not made.parameters:
        return given
    if bytes(given) == b"null":
        return msgspec.Raw(msgspec.json.encode(made.parameters))
    try:
        asked = msgspec.json.decode(given, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest("options must be an object", param="options") from None
    return msgspec.Raw(msgspec.json.encode({**made.parameters, **asked}))


def conversation(made: Defaults | None, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation after the name's own system text and messages. A system text that it begins with takes the place of the name's."""
    if made is None:
        return said
    system, rest = (said[:1], said[1:]) if said and said[0]["role"] == "system" else ([], said)
    if not system and made.system:
        system = [{"role": "system", "content": made.system}]
    return [*system, *made.messages, *rest]
