"""How long a sequence may be and how many pages each KV pool has: pure, from what was asked and the memory there is.

What was asked for and cannot be is refused, with the numbers. Every decision is a line in `Sizes.lines`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.backends.ops import KV, Backend
from quire.config import PAGE_SIZE, EngineConfig, Environment, parse_size, resolve_pool
from quire.engine.construction.memory import Budget, alone, holds, window_pools
from quire.models import Model
from quire.observe.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Sizes:
    """The context, pages and rows of an engine, and the sentences that say why."""

    context: int
    groups: tuple[int, ...]  # pages of each
    lines: list[str]

    @property
    def pages(self) -> int:
        """The pages of the first group, which keeps the whole context if any does."""
        return self.groups[0]


def resolve_sizes(config: EngineConfig, env: Environment, model: Model, budget: Budget) -> Sizes:
    """The context and the KV pool. Pure; refuses what was asked for and cannot be."""
    trained = model.config.context
    if config.context is not None and config.context > trained:
        raise BadRequest(
            f"a context of {config.context} was asked for: the model was made for {trained}",
            param="context",
            cure=f"ask for at most {trained}",
        )
    context = config.context or trained
    asked = config.kv_memory
    if asked is None and env.kv_memory is not None:
        try:
            asked = parse_size(env.kv_memory)
        except ValueError as e:
            raise BadRequest(f"QUIRE_KV_MEMORY: {e}", param="kv_memory") from None
    page, step = pool_of(config, model), config.max_batch_tokens or PAGE_SIZE
    page_bytes = sum(k.page_bytes for k in page.groups if not k.forgets)  # of the layers that keep everything
    windows = alone(page, context, step)
    if asked is not None and asked < page_bytes + windows:
        what = "states" if any(k.state for k in page.groups) else "windows"
        least = f", and the {what} of one sequence {windows}" if windows else ""
        raise BadRequest(
            f"{asked} bytes were asked for as KV memory: one page of {PAGE_SIZE} tokens takes {page_bytes}{least}",
            param="kv_memory",
        )
    budget.check(asked if asked is not None else page_bytes + windows, page_bytes, windows)
    pages, lines = _share_out(config, page, page_bytes, asked, budget, context, step)
    nbytes, held = page.sized(pages).nbytes, holds(page, pages, step)
    if config.context is not None and held is not None and held < config.context:
        needed = -(-config.context // PAGE_SIZE) * page_bytes + (nbytes - pages[0] * page_bytes)
        raise BadRequest(
            f"a context of {config.context} was asked for: the KV pool of {nbytes / 2**20:.0f} MiB holds {held} tokens",
            param="context",
            cure=f"give it {-(-needed // 2**20)} MiB of KV memory",
        )
    most = context if held is None else min(context, held)
    if config.context is not None:
        why = f"asked for; the model was made for {trained}"
    else:
        why = "what the model was made for" if most == context else f"what the KV pool holds; the model: {trained}"
    lines.insert(1, f"context: {most} tokens ({why})")
    if budget.needs is not None:
        lines.append(budget.line(nbytes))
    return Sizes(most, pages, lines)


def _share_out(
    config: EngineConfig, page: KV, page_bytes: int, asked: int | None, budget: Budget, context: int, step: int
) -> tuple[tuple[int, ...], list[str]]:
    """Pages of every group: first what windows need, then the rest for layers that keep the whole context."""
    if not any(k.forgets for k in page.groups):
        pages, line = resolve_pool(asked, budget.room, page_bytes, context, config.max_seqs, own=budget.own)
        return (pages,) * len(page.groups), [line]
    depth = int(budget.own) if config.depth is None else config.depth
    room = asked if asked is not None else budget.room if budget.own else budget.room // 2
    own, lines = window_pools(page, room, context, config.max_seqs, step, step * (depth + 1))
    if not page_bytes:
        return tuple(own[g] for g in range(len(page.groups))), lines
    used = sum(n * page.groups[g].page_bytes for g, n in own.items())
    rest = None if asked is None else asked - used
    left = budget.room - (used if budget.own else 2 * used)
    pages, line = resolve_pool(rest, max(0, left), page_bytes, context, config.max_seqs, own=budget.own)
    return tuple(own.get(g, pages) for g in range(len(page.groups))), [line, *lines]


def choose_kv(config: EngineConfig, model: Model, backend: Backend) -> EngineConfig:
    """The KV type where none was asked for: what is best on this backend. Latent keys are f16 whatever is best."""
    latent = any(k.latent for k in model.kv(1, PAGE_SIZE).groups)
    if config.kv_dtype != "auto" or backend.kv_dtype == "f16" or latent:
        return config
    return replace(config, kv_dtype=backend.kv_dtype)


def pool_of(config: EngineConfig, model: Model) -> KV:
    """The pools, with one page each."""
    kv = model.kv(1, PAGE_SIZE)
    return kv if config.kv_dtype == "auto" else kv.sized([1] * len(kv.groups), config.kv_dtype)
