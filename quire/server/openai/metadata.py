"""OpenAI's `metadata`: up to 16 short pairs of strings that belong to the client."""

from __future__ import annotations

from quire.observe.errors import BadRequest

PAIRS, NAME, VALUE = 16, 64, 512


def check(metadata: dict[str, str] | None) -> None:
    """Refuse what OpenAI refuses."""
    if not metadata:
        return
    if len(metadata) > PAIRS:
        raise BadRequest(f"metadata has {len(metadata)} pairs: {PAIRS} are the most", param="metadata")
    for name, value in metadata.items():
        if len(name) > NAME or len(value) > VALUE:
            raise BadRequest(f"metadata: names have up to {NAME} characters, values up to {VALUE}", param="metadata")
