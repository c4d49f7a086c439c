"""Why a prompt was not found in the prefix cache as far as an earlier one could have been: what broke it, where, and what that cost.

    entry = finder.begin(prompt, space, agent)             when a request begins
    case = finder.case(entry, cached, engine, ...)         when its receipt is there
    finder.end(entry, generated, engine, case.explain())   an `Explained`, which takes some milliseconds and may be made in a thread

One Finder stands beside one model. It compares token ids with those of recent prompts of the same space (`recent.py`), asks which part of the request the first
token that differs came from (`parts.py`) and what kind of change it is (`change.py`), and keeps count of what breaks again and again. It never changes a
prompt, and knows neither HTTP nor dialects. All but `Case.explain` is called from one thread.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.chat.prefixes.change import Resync, describe, resync
from quire.chat.prefixes.cures import cure
from quire.chat.prefixes.parts import Part, part_of
from quire.chat.prefixes.recent import Entry, Recent, Space, common

if TYPE_CHECKING:
    from quire.chat.templates.template import ChatTemplate
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.chat.types import Origin

LEAST = 512  # tokens of a prompt that is worth watching
WORTH = 48  # tokens computed again that make a break
LOOKED = 3  # recent prompts of an agent that are compared beside the one with the longest common prefix
PLACES = 256  # that are counted
AGENTS = 256
CONTEXT = 24  # characters before a change that tell its place from others

CONTINUED = "continued"  # the cache gave all that an earlier prompt shared
NEW = "new"  # no earlier prompt shared anything worth a word
DIVERGED = "diverged"
EVICTED = "evicted"
RESTARTED = "restarted"
COMPUTING = "computing"
UNKEPT = "unkept"
WHY = {
    CONTINUED: "all that an earlier prompt shares was found",
    NEW: "no recent prompt begins like this one",
    DIVERGED: "an earlier prompt goes on in the same way behind a change",
    EVICTED: "an earlier prompt was the same, but its pages were given up for room",
    RESTARTED: "an earlier prompt was the same, but the engine was started again since",
    COMPUTING: "an earlier prompt is the same, but was still being computed",
    UNKEPT: "an earlier prompt was the same, but its pages cannot be resumed there: the model's layers need a checkpoint, or the cache is off",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine's counts that say whether pages can have gone."""

    evictions: int = 0
    restarts: int = 0
    page_size: int = 16


@dataclass(frozen=True, slots=True)
class Explained:
    """How a prompt stands to the prompts before it. Fields without a meaning for its cause are empty."""

    cause: str
    prompt_tokens: int
    cached_tokens: int
    lost_tokens: int = 0  # computed again, though an earlier prompt had them
    position: int = 0  # the first token that differs, or is no longer cached
    part: str = ""  # system, tools, message, answer, template, prompt or unknown
    where: str = ""
    kind: str = ""  # of the change: date, id, number, order, ...
    context: str = ""
    before: str = ""
    now: str = ""
    times: int = 0  # that this place broke, this one included
    cure: str = ""

    @property
    def broken(self) -> bool:
        """Whether tokens were computed that an earlier prompt had."""
        return self.lost_tokens > 0

    @property
    def counted_as(self) -> str:
        """The break's cause for a counter: the part where prompts diverged, else why pages were gone."""
        return self.part if self.cause == DIVERGED else self.cause

    @property
    def volatile(self) -> bool:
        """Whether the same place broke before."""
        return self.cause == DIVERGED and self.times > 1


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, those before it, and what was found of it in the cache."""

    entry: Entry
    earlier: list[Entry]  # the newest first
    cached: int
    engine: Engine
    tokenizer: Tokenizer
    origin: Origin | None
    template: ChatTemplate | None

    def explain(self) -> Explained:
        """How the prompt stands to those before it."""
        entry, engine, cached = self.entry, self.engine, self.cached
        prompt, size = entry.ids[: entry.prompt], engine.page_size
        earlier = [(common(other.ids, prompt), other) for other in self.earlier]
        if not earlier:
            return Explained(NEW, entry.prompt, cached)
        shared, nearest = max(earlier, key=lambda each: (each[0], each[1].serial))
        could = min(shared, entry.prompt - 1) // size * size
        if could - cached >= max(WORTH, size):
            part = part_of(self.origin, self.template, self.tokenizer, prompt[:cached])
            cause = _gone(nearest, entry, engine)
            return Explained(
                cause,
                entry.prompt,
                cached,
                could - cached,
                cached,
                part.kind,
                part.where,
                cure=cure(cause, "", ""),
            )
        found = self._parted(prompt, earlier)
        if found is None or found[2].again < WORTH:
            return Explained(CONTINUED if could else NEW, entry.prompt, cached)
        at, other, same = found
        change = describe(other.ids, prompt, at, same, self._decode)
        part = part_of(self.origin, self.template, self.tokenizer, prompt[:at])
        if at >= other.prompt:
            part = Part("answer", f"what was generated, as {part.where} brings it back")
        return Explained(
            DIVERGED,
            entry.prompt,
            cached,
            change.again,
            at,
            part.kind,
            part.where,
            change.kind,
            change.context,
            change.before,
            change.now,
            cure=cure(DIVERGED, part.kind, change.kind),
        )

    def _parted(self, prompt: array[int], earlier: list[tuple[int, Entry]]) -> tuple[int, Entry, Resync] | None:
        """The earlier prompt that most of this one is in, before and behind the place where they part."""
        longest = max(earlier, key=lambda each: (each[0], each[1].serial))
        same = [each for each in earlier if each[1].agent == self.entry.agent][:LOOKED]
        best: tuple[int, Entry, Resync] | None = None
        for at, other in {each[1].serial: each for each in (longest, *same)}.values():
            if at == len(other.ids) or at == len(prompt):
                found = Resync(0, 0, 0)  # the one goes on where the other ends
            else:
                found = resync(other.ids, prompt, at)
            if best is None or at + found.again > best[0] + best[2].again:
                best = at, other, found
        return best

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, at_start=False)


@dataclass(slots=True)
class Place:
    """A place that breaks prompts, over all requests of an agent."""

    agent: str
    last: Explained
    times: int = 0
    lost_tokens: int = 0
    seen: float = 0.0  # when it broke last, by the wall clock


@dataclass(slots=True)
class Traffic:
    """An agent's prompts so far."""

    agent: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class Finder:
    """The recent prompts of one model, and what broke them."""

    tokenizer: Tokenizer
    recent: Recent = field(default_factory=Recent)
    _places: OrderedDict[tuple[Space, str, str, str, str], Place] = field(default_factory=OrderedDict)
    _traffic: OrderedDict[tuple[Space, str], Traffic] = field(default_factory=OrderedDict)

    def begin(self, prompt: Iterable[int], space: Space, agent: str = "") -> Entry:
        """A request with that prompt begins."""
        return self.recent.add(space, agent, prompt)

    def case(
        self,
        entry: Entry,
        cached: int,
        engine: Engine,
        origin: Origin | None = None,
        template: ChatTemplate | None = None,
    ) -> Case:
        """All that says how a prompt of which `cached` tokens were found stands to those before it."""
        return Case(entry, self.recent.before(entry), cached, engine, self.tokenizer, origin, template)

    def end(
        self, entry: Entry, generated: Sequence[int], engine: Engine, made: Explained | None = None
    ) -> Explained | None:
        """The request ended; None: without a receipt."""
        if made is not None:
            if made.broken:
                made = self._count(entry, made)
            traffic = self._of(entry)
            traffic.requests += 1
            traffic.prompt_tokens += entry.prompt
            traffic.cached_tokens += made.cached_tokens
            traffic.lost_tokens += made.lost_tokens
        entry.ended, entry.evictions, entry.restarts = self.recent.serial, engine.evictions, engine.restarts
        self.recent.grow(entry, generated)
        self.recent.supersede(entry)
        return made

    def places(self, namespace: str) -> Iterator[Place]:
        """What broke prompts of a namespace, the newest first."""
        return (place for key, place in reversed(self._places.items()) if key[0][0] == namespace)

    def traffic(self, namespace: str) -> Iterator[Traffic]:
        """Agents that asked in a namespace, the latest first."""
        return (traffic for key, traffic in reversed(self._traffic.items()) if key[0][0] == namespace)

    def _count(self, entry: Entry, made: Explained) -> Explained:
        """Count a break at its place. A place is told from others by what stands before it."""
        before = "".join("#" if c.isdigit() else c for c in made.context[-CONTEXT:])
        key = (entry.space, entry.agent, made.counted_as, made.kind, before)
        place = self._places.pop(key, None) or Place(entry.agent, made)
        place.times += 1
        place.lost_tokens += made.lost_tokens
        place.seen = time.time()
        made = place.last = replace(made, times=place.times)
        self._places[key] = place
        if len(self._places) > PLACES:
            self._places.popitem(last=False)
        return made

    def _of(self, entry: Entry) -> Traffic:
        key = (entry.space, entry.agent)
        traffic = self._traffic.pop(key, None) or Traffic(entry.agent)
        self._traffic[key] = traffic
        if len(self._traffic) > AGENTS:
            self._traffic.popitem(last=False)
        return traffic


def _gone(earlier: Entry, entry: Entry, engine: Engine) -> str:
    """Why pages that an earlier prompt had are not cached."""
    if earlier.ended is None or earlier.ended >= entry.serial:
        return COMPUTING
    if engine.restarts != earlier.restarts:
        return RESTARTED
    return EVICTED if engine.evictions > earlier.evictions else UNKEPT
