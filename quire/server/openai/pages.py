"""Pagination of OpenAI's lists: `after`, `limit` and `order`, and the object that holds a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from quire.observe.errors import BadRequest

MAX_ID = 128


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a list that is asked for."""

    limit: int
    after: str | None
    newest_first: bool


def window(request: Request, *, default: int = 20, most: int = 100, order: str = "desc") -> Window:
    """The query's fields, bounded."""
    query = request.query_params
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= most:
        raise BadRequest(f"limit must be a number from 1 to {most}", param="limit")
    order = query.get("order", order)
    if order not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc", param="order")
    after = query.get("after") or None
    if after is not None and len(after) > MAX_ID:
        raise BadRequest(f"after is no id: it has {len(after)} characters", param="after")
    return Window(limit, after, order == "desc")


def no_such_after() -> BadRequest:
    """`after` names nothing in the list."""
    return BadRequest("after is not the id of anything in this list", param="after")


def page(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """The list object. OpenAI's schema wants both ids as text, also of an empty one."""
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": has_more,
    }


def cut(items: Sequence[dict[str, Any]], asked: Window) -> dict[str, Any]:
    """A page of a list that is whole in memory, oldest first."""
    ordered = list(reversed(items)) if asked.newest_first else list(items)
    start = 0
    if asked.after is not None:
        at = next((i for i, item in enumerate(ordered) if item["id"] == asked.after), None)
        if at is None:
            raise no_such_after()
        start = at + 1
    end = start + asked.limit
    return page(ordered[start:end], end < len(ordered))
