"""`thinking` and `output_config.effort` of Anthropic's requests, as keywords for the model's chat template.

Thinking and effort are hints: a model that cannot follow them answers all the same, and `quire.notes` of the answer says so.
Only `disabled` is more than that, because reasoning that nobody wants costs tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.observe.errors import BadRequest
from quire.server.served import Served
from quire.server.shared import conversation

DISPLAYS = (None, "summarized", "omitted")


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """`thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None

    @property
    def omits(self) -> bool:
        """Whether the answer leaves out the text of its thinking blocks."""
        return self.display == "omitted"


def keywords(served: Served, wanted: Thinking | None, effort: str | None, notes: list[str]) -> dict[str, Any]:
    """Keywords for the template. No word means no thinking, as it does for Anthropic, where that can be said."""
    made = {} if effort is None else _hint(served, None, effort, "output_config.effort", notes)
    if wanted is None:
        return made or (
            conversation.thinking(served, False, None, "thinking") if conversation.can_switch(served) else {}
        )
    if wanted.display not in DISPLAYS:
        raise BadRequest("thinking.display: must be summarized or omitted", param="thinking.display")
    if wanted.omits and wanted.type != "disabled":
        notes.append("thinking.display: what is omitted cannot be sent back, so the model never sees it again")
    if wanted.type == "disabled":
        return made | conversation.thinking(served, False, None, "thinking")
    if wanted.type == "adaptive":  # as much as the model will, which may be nothing
        return made | _hint(served, True, None, "thinking", notes)
    if wanted.type != "enabled":
        raise BadRequest("thinking.type: must be enabled, disabled or adaptive", param="thinking.type")
    if wanted.budget_tokens is None:
        raise BadRequest("thinking.budget_tokens: Field required", param="thinking.budget_tokens")
    if wanted.budget_tokens < 1:
        raise BadRequest("thinking.budget_tokens: must be at least 1", param="thinking.budget_tokens")
    if "thinking_budget" in conversation.template_reads(served):
        made["thinking_budget"] = wanted.budget_tokens
    return made | _hint(served, True, None, "thinking", notes)


def _hint(served: Served, on: bool | None, effort: str | None, param: str, notes: list[str]) -> dict[str, Any]:
    """Keywords that ask for reasoning; none, and a note, where the model cannot be asked."""
    try:
        return conversation.thinking(served, on, effort, param)
    except BadRequest as error:
        if error.code != "unsupported_parameter":
            raise
        notes.append(f"{error.message}; no effect")
        return {}
