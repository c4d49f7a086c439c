"""SamplingParams from the fields of a dialect, and what is wrong with them in that dialect's own words.

Knows no dialect: whoever calls says what its fields are called. A field that was not sent, or is null, has the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams


def sampling(
    given: Mapping[str, Any],
    vocab_size: int,
    *,
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    within: str = "",
) -> SamplingParams:
    """SamplingParams, range-checked. `defaults` are the dialect's, and so are `names` of fields that are called otherwise there;
    `within` is the object that has them."""
    chosen = {**(defaults or {}), **{k: v for k, v in given.items() if v is not None}}
    try:
        return SamplingParams(**chosen).validate(vocab_size)
    except BadRequest as error:
        ours = error.param or ""
        name = (names or {}).get(ours, ours)
        said = name + error.message.removeprefix(ours) if error.message.startswith(f"{ours} ") else error.message
        error.message = f"{within}: {said}" if within else said
        error.param = f"{within}.{name}" if within else name
        raise
