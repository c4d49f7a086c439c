"""A request's watch on the prefix cache: what the finder of its model (`quire/chat/prefixes/`) says of its prompt, told in the receipt and counted.

Only prompts of some hundred tokens and more are watched; `Feed` asks for a watch and hands it the chunks of the first choice. What the finder compares
never leaves the space (namespace and adapter) that the request's pages are in.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from typing import TYPE_CHECKING, Any

from quire.chat.prefixes.finder import WHY, Case, Engine, Explained, Finder
from quire.chat.types import Chunk, Generation
from quire.engine.types import Receipt

if TYPE_CHECKING:
    from quire.server.served import Served

SMALL = 2048  # tokens: the comparison of a shorter prompt takes less than handing it to a thread is worth
log = logging.getLogger("quire.server")
_PRODUCT = re.compile(r"[!-.0-~]{1,64}")  # of a User-Agent, up to its version or its notes


class Told(Receipt, frozen=True, kw_only=True, omit_defaults=True):
    """A receipt that also tells how the prompt stood to the prompts before it."""

    prefix: dict[str, Any] = {}


class Watch:
    """Follows one request from its beginning to its receipt."""

    def __init__(self, served: Served, generation: Generation):
        model = served.model
        if model.finder is None:
            model.finder = Finder(served.tokenizer)
        self._served = served
        self._origin = generation.origin
        self._finder: Finder = model.finder
        self._entry = self._finder.begin(
            generation.prompt, (generation.namespace, generation.adapter), agent_of(served.agent)
        )
        self._generated: list[int] = []
        self._open = True

    async def take(self, chunk: Chunk) -> None:
        """News of the request. The last of the first choice gets a receipt that explains the prompt."""
        if chunk.index or not self._open:
            return
        self._generated += chunk.tokens
        if chunk.finish is None:
            return
        made, receipt, engine = None, chunk.receipt, self._engine()
        if receipt is not None:
            case = self._finder.case(
                self._entry, receipt.cached_tokens, engine, self._origin, self._served.completer.template
            )
            made = await _explained(case)
        made = self._finder.end(self._entry, self._generated, engine, made)
        self._open = False
        if receipt is None or made is None:
            return
        fields = {name: getattr(receipt, name) for name in Receipt.__struct_fields__}
        told = body(made) | ({"changes": list(self._origin.changes)} if self._origin and self._origin.changes else {})
        chunk.receipt = Told(**fields, prefix=told)
        metrics = self._served.metrics
        if metrics is not None and made.broken:
            metrics.prefix_broke(made.counted_as, made.lost_tokens)

    def close(self) -> None:
        """The request ended, whether or not its receipt came."""
        if self._open:
            self._open = False
            self._finder.end(self._entry, self._generated, self._engine())

    def _engine(self) -> Engine:
        served = self._served
        return Engine(served.client.stats().evictions, served.model.restarted, served.info.page_size)


async def _explained(case: Case) -> Explained | None:
    """The explanation; None where making it failed, which must not cost the answer."""
    try:
        small = len(case.entry.ids) < SMALL
        return case.explain() if small else await asyncio.to_thread(case.explain)
    except Exception:
        log.exception("why a prompt was not cached could not be told")
        return None


def agent_of(header: str) -> str:
    """The program's name in a User-Agent header, without its version."""
    match = _PRODUCT.match(header)
    return match.group() if match else ""


def body(made: Explained) -> dict[str, Any]:
    """What was found, as clients see it: `cause`, what it means, and what has a value beside it."""
    fields = {name: value for name, value in dataclasses.asdict(made).items() if value or name == "lost_tokens"}
    for name in ("prompt_tokens", "cached_tokens"):
        fields.pop(name, None)  # the receipt has them
    if made.cause == "diverged":
        fields |= {"before": made.before, "now": made.now, "volatile": made.volatile}
    return {"cause": made.cause, "why": WHY[made.cause], **fields}
