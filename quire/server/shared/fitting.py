"""Conversations and prompts that are longer than the context, where a client asks that they be cut.

Nothing is cut unless a request says so. Then the oldest turns of a conversation are left out until the rest leaves room for the answer. System
turns stay, and so does the newest: the last question, and where a model has called tools since, its last calls with their results.
A result is never left without its call. Cuts lie on a grid that depends on what is left out alone, so the turns that follow in a growing
conversation are cut at the same place and find their prefix in the cache; only when that no longer fits does the cut move on by a stride.
A search by halves finds it: whatever the number of turns, a handful of prompts is rendered. What was left out is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from quire.observe.errors import BadRequest
from quire.server.served import Served
from quire.server.shared import conversation
from quire.server.shared.conversation import Conversation, Dropped

HEADER = "x-quire-dropped"
SHARE = 8  # an answer of no given length gets room for one token of so many of the context
TOO_LONG = "context_length_exceeded"
SYSTEM = ("system", "developer")
Turns = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Fit:
    """A client's wish that a conversation be cut where it does not fit."""

    param: str  # the field that says so
    answer: int | None = None  # tokens that the answer shall have room for; None: a share of the context
    context: int | None = None  # what prompt and answer may have together; None: the model's context

    def room(self, context: int) -> int:
        """Tokens that a prompt may have."""
        return context - (max(1, context // SHARE) if self.answer is None else self.answer)


def shifted_note(param: str, tokens: int) -> str:
    """The note on an answer that went on past the context."""
    return f"{param}: the answer went on past the context, and {tokens} tokens before it were left out on the way"


async def encode(served: Served, said: Conversation, fit: Fit | None, param: str = "messages") -> list[int]:
    """Tokens of a conversation. Where it does not fit and `fit` asks for it, `said` becomes what was kept and tells what was not."""
    if fit is None:
        return await conversation.encode(served, said, param)
    context = served.info.context if fit.context is None else fit.context
    room = fit.room(context)
    whole = await _measured(served, said, param)
    if whole is not None and len(whole) <= room:
        return whole
    cuts = _cuts(said.turns, context)
    low, high, best = 0, len(cuts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        shorter = replace(said, turns=cuts[middle].kept(said.turns))
        tokens = await _measured(served, shorter, param)
        if tokens is not None and len(tokens) <= room:
            best, high = (cuts[middle], tokens, shorter.origin), middle - 1
        else:
            low = middle + 1
    if best is None:
        raise await _refusal(served, said, fit, cuts, whole, context, param)
    cut, tokens, said.origin = best
    said.dropped = cut.told(said.turns, fit.param, None if whole is None else len(whole) - len(tokens))
    said.notes.append(said.dropped.note)
    said.turns = cut.kept(said.turns)
    return tokens


async def _measured(served: Served, said: Conversation, param: str) -> list[int] | None:
    """The tokens, or None where the texts are so long that no tokens of the context could hold them."""
    try:
        return await conversation.encode(served, said, param)
    except BadRequest as error:
        if error.code == TOO_LONG:
            return None
        raise


async def _refusal(
    served: Served,
    said: Conversation,
    fit: Fit,
    cuts: Sequence[_Cut],
    whole: list[int] | None,
    context: int,
    param: str,
) -> BadRequest:
    """What cannot be left out is too long by itself."""
    least = whole
    if cuts:  # raises the error that names what is too long to be counted
        least = await conversation.encode(served, replace(said, turns=cuts[-1].kept(said.turns)), param)
    elif least is None:
        await conversation.encode(served, said, param)
    return BadRequest(
        f"{param}: the system messages and the newest turn alone have {len(least or ())} tokens: this model's maximum context length is "
        f"{context} tokens, and {context - fit.room(context)} of them are for the answer",
        cure="shorten these, which are never cut, or ask for a shorter answer",
        param=param,
        code=TOO_LONG,
    )


# ---- where a conversation may be cut


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place to cut: turns before `end` are left out, save those of the system and the newest question (`asked` to `answered`) where
    the cut lies behind it."""

    end: int
    asked: int = 0
    answered: int = 0

    def drops(self, i: int, turn: dict[str, Any]) -> bool:
        return i < self.end and not self.asked <= i < self.answered and turn.get("role") not in SYSTEM

    def kept(self, turns: Turns) -> Turns:
        return [turn for i, turn in enumerate(turns) if not self.drops(i, turn)]

    def told(self, turns: Turns, param: str, tokens: int | None) -> Dropped:
        gone = [(i, str(turn.get("role"))) for i, turn in enumerate(turns) if self.drops(i, turn)]
        places = []
        if gone[0][0] < self.asked or not self.answered:
            places.append("from the beginning of the conversation")
        if gone[-1][0] >= self.answered > 0:
            places.append("from what follows the newest question")
        return Dropped(
            param, tokens, len(gone), dict(Counter(role for _, role in gone)), len(turns), " and ".join(places)
        )


def _cuts(turns: Turns, stride: int) -> list[_Cut]:
    """Places to cut, the least first. `stride` in bytes of what is left out: of the places within one, only the first is taken, and
    the last of all. With as many bytes as the context has tokens, that is about a quarter of it."""
    parted = _parted(turns)
    begun = [i for i, turn in enumerate(turns) if turn.get("role") == "user" and _before(turns, i) != "user"]
    asked = begun[-1] if begun else 0
    answered = next((i for i in range(asked, len(turns)) if turns[i].get("role") not in ("user", *SYSTEM)), len(turns))
    questions = [_Cut(i) for i in begun if i not in parted and _before(turns, i)]
    steps = [
        _Cut(i, asked, answered)
        for i in range(answered + 1, len(turns))
        if turns[i].get("role") == "assistant" and i not in parted
    ]
    sizes = [sum(len(text.encode("utf-8", "replace")) for text in conversation.texts(turn)) for turn in turns]
    made: list[_Cut] = []
    for places in (questions, steps):
        reached = -1
        at = dropped = 0
        for cut in places:
            while at < cut.end:
                dropped += sizes[at] if cut.drops(at, turns[at]) else 0
                at += 1
            if dropped // stride > reached or cut is places[-1]:
                made.append(cut)
            reached = dropped // stride
    return made


def _before(turns: Turns, i: int) -> str:
    """The role of the turn before, the system's left aside; "" where there is none."""
    return next((str(turns[j].get("role")) for j in range(i - 1, -1, -1) if turns[j].get("role") not in SYSTEM), "")


def _parted(turns: Turns) -> set[int]:
    """Places where a cut would leave a result without its call."""
    calls: dict[str, int] = {}
    opened = [0] * (len(turns) + 2)
    for i, turn in enumerate(turns):
        for call in turn.get("tool_calls") or ():
            calls[call["id"]] = i
        if turn.get("role") == "tool" and (called := calls.get(turn.get("tool_call_id", ""))) is not None:
            opened[called + 1] += 1
            opened[i + 1] -= 1
    return {i for i, depth in enumerate(accumulate(opened)) if depth}


# ---- prompts that are no conversation


def last_tokens(
    served: Served, tokens: list[int], keep: int | None, side: str | None, answer: int | None
) -> tuple[list[int], Dropped | None]:
    """vLLM's `truncate_prompt_tokens`: the last so many tokens of a prompt, or with `truncation_side` right the first. -1 keeps as many as
    leave room for the answer."""
    name, context = "truncate_prompt_tokens", served.info.context
    if side not in (None, "left", "right"):
        raise BadRequest("truncation_side must be left or right", param="truncation_side")
    if keep is None:
        return tokens, None
    if keep < -1 or keep == 0:
        raise BadRequest(f"{name} is {keep}: it must be at least 1, or -1 for what the context holds", param=name)
    if keep > context:
        raise BadRequest(
            f"{name} is {keep}: this model's maximum context length is {context} tokens", param=name, code=TOO_LONG
        )
    most = max(1, context - (answer or 1)) if keep == -1 else keep
    over = len(tokens) - most
    if over <= 0:
        return tokens, None
    if side == "right":
        return tokens[:most], Dropped(name, over, where="from the end of the prompt")
    return tokens[over:], Dropped(name, over, where="from the beginning of the prompt")


def without_middle(
    tokens: list[int], fit: Fit, context: int, param: str, keep: int = 0, newest: int = 1
) -> tuple[list[int], Dropped | None]:
    """A prompt without tokens after the first `keep`, as many strides as it takes to make it fit. A stride is a quarter of the context.
    The last `newest` tokens stay."""
    room = fit.room(context)
    over = len(tokens) - room
    if over <= 0:
        return tokens, None
    if keep + newest > room:
        raise BadRequest(
            f"{param}: {keep + newest} of its {len(tokens)} tokens are never cut, and there is room for {max(room, 0)} of a context of {context}",
            cure="shorten it",
            param=param,
            code=TOO_LONG,
        )
    stride = max(1, context // 4)
    gone = -(-over // stride) * stride
    if keep + gone + newest > len(tokens):  # a stride more than there is
        gone = over
    where = "from the beginning of the prompt" + (f", after the first {keep}" if keep else "")
    return [*tokens[:keep], *tokens[keep + gone :]], Dropped(fit.param, gone, where=where)
