"""A request of POST /v1/responses as a conversation, its prompt, and the `Generation` made of them. The fields are `fields.py`.

A request becomes a `Prepared`: items, prompt and tools, whether it is answered, streamed, counted or kept. One that ends with a
`compaction_trigger` asks for a summary instead of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from quire.chat.types import Generation
from quire.observe.errors import BadRequest, NotFound
from quire.server.openai.responses import items as response_items
from quire.server.openai.responses import tools as response_tools
from quire.server.openai.responses.calls import Item
from quire.server.openai.responses.fields import LOGPROBS, Reasoning, ResponseRequest, TextConfig
from quire.server.openai.responses.items import SEAL_SUMMARY, unsealed
from quire.server.openai.responses.stored import UNFINISHED, StoredResponses
from quire.server.openai.responses.tools import Toolset
from quire.server.openai.responses.turns import brought, compacted, turns
from quire.server.served import Served
from quire.server.shared import conversation, fitting
from quire.server.shared.conversation import Conversation, check_prompt, template_kwargs
from quire.server.shared.fitting import Fit
from quire.server.shared.sampling import generation
from quire.server.shared.tools import NO_TOOLS, Raw, at

MAX_SUMMARY = 4096  # tokens
SUMMARIZE = (
    "The conversation so far is about to be replaced by a summary. Write that summary now, for an assistant that goes on from it and sees "
    "nothing else of what came before. Say what was asked for, what was done and found, what was decided and why, what the user wants and does "
    "not want, and what is left to do; keep names, paths, numbers and texts that will be needed as they are. Call no tools. Write "
    "the summary alone."
)


@dataclass(slots=True)
class Prepared:
    """A request, ready."""

    asked: ResponseRequest  # with the settings that items changed
    items: list[Item]  # the whole conversation
    new_from: int  # where the request's own input begins
    tools: Toolset
    prompt: list[int]
    said: Conversation  # as it went into the prompt
    no_effect: dict[str, str] = field(default_factory=dict)  # what was asked for and changes nothing, with why

    @property
    def input(self) -> list[Item]:
        """The request's own items."""
        return self.items[self.new_from :]

    @property
    def compacts(self) -> bool:
        """Whether a summary is asked for."""
        return self.items[-1]["type"] == "compaction_trigger"

    @property
    def fit(self) -> Fit | None:
        """The wish that a conversation be cut where it does not fit."""
        return _fit(self.asked, self.compacts)


async def prepare(served: Served, stored: StoredResponses, asked: ResponseRequest, compacts: bool = False) -> Prepared:
    """The conversation and its prompt. `compacts`: a summary is asked for, as if the input said so."""
    notes: dict[str, str] = {}
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = compacted(await _before(stored, served.caller.owner, asked.previous_response_id))
    given = response_items.read(asked.input, notes, served.reading)
    places = [*("previous_response_id" for _ in before), *(where for where, _ in given)]
    new = [await _resolved(stored, served.caller.owner, where, item) for where, item in given]
    if compacts and (not new or new[-1]["type"] != "compaction_trigger"):
        new.append({"id": response_items.new_id("compaction_trigger"), "type": "compaction_trigger"})
        places.append("input")
    items, new_from = [*before, *new], len(before)
    if not items or items[0]["type"] == "compaction_trigger":
        raise BadRequest("input is missing", param="input")
    notes |= _lost(items[new_from:], places[new_from:])
    asked = _configured(served, asked, items, places)
    tools = response_tools.read(
        asked.tools or (), brought(items, places), asked.tool_choice, asked.parallel_tool_calls, served.reading
    )
    kwargs = template_kwargs(asked.chat_template_kwargs)
    effort = asked.reasoning.effort if asked.reasoning else None
    no_effect = _hints(served, asked)
    if effort is not None and "reasoning.effort" not in no_effect:
        kwargs = conversation.thinking(served, None, effort, "reasoning.effort") | kwargs
    said = Conversation(turns(served, asked.instructions, items, places, tools.known_as), tools.choice, kwargs)
    compacts = items[-1]["type"] == "compaction_trigger"
    if compacts:
        said.turns.append({"role": "user", "content": SUMMARIZE})
    prompt = await fitting.encode(served, said, _fit(asked, compacts), "input")
    no_effect |= _thresholds(asked, len(prompt))
    return Prepared(asked, items, new_from, tools, prompt, said, no_effect | notes | tools.no_effect)


async def generated(served: Served, ready: Prepared) -> Generation:
    """The Generation that the engine is asked for."""
    asked = ready.asked
    most = asked.max_output_tokens
    if ready.compacts:  # tools stay in the prompt, so that its beginning is found, but a call of one is no summary
        check_prompt(served, ready.prompt, None, "input", "max_output_tokens")
        most = min(most or MAX_SUMMARY, MAX_SUMMARY, served.info.context - len(ready.prompt))
    sampling = asked.params(
        served.info.vocab_size,
        max_tokens=most,
        logprobs=(asked.top_logprobs or 0) if asked.includes(LOGPROBS) else None,
    )
    check_prompt(served, ready.prompt, sampling.max_tokens, "input", "max_output_tokens")
    made = generation(asked, ready.prompt, sampling)
    tools, must = (NO_TOOLS, None) if ready.compacts else (ready.said.tools, made.constraint)
    reading, constraint = await conversation.answering(served, ready.prompt, tools, must)
    return replace(made, reading=reading, constraint=constraint, origin=ready.said.origin)


def _fit(asked: ResponseRequest, compacts: bool) -> Fit | None:
    # A summary is as long as what is left of the context lets it be.
    return Fit("truncation", None if compacts else asked.max_output_tokens) if asked.truncation == "auto" else None


def _configured(served: Served, asked: ResponseRequest, items: list[Item], places: list[str]) -> ResponseRequest:
    """The request with what items say about the answers that follow them; the last word counts."""
    for where, item in zip(places, items, strict=True):
        if item["type"] != "configuration_update":
            continue
        if (given := item.get("reasoning")) is not None:
            new = at(f"{where}.reasoning", Raw(msgspec.json.encode(given)), Reasoning, served.reading)
            old = asked.reasoning or Reasoning()
            asked = msgspec.structs.replace(asked, reasoning=msgspec.structs.replace(old, effort=new.effort))
        if (given := item.get("text")) is not None:
            text = at(f"{where}.text", Raw(msgspec.json.encode(given)), TextConfig, served.reading)
            asked = msgspec.structs.replace(asked, text=text)
    return asked


def _lost(items: list[Item], places: list[str]) -> dict[str, str]:
    """Summaries that another server wrote."""
    why = "the summary was not written by this server and cannot be read; the model is told so"
    return {
        f"{where}.encrypted_content": why
        for where, item in zip(places, items, strict=True)
        if item["type"] == "compaction" and unsealed(item["encrypted_content"], SEAL_SUMMARY) is None
    }


def _thresholds(asked: ResponseRequest, size: int) -> dict[str, str]:
    """Conversations are compacted when they are asked to be, not by their length."""
    asks = [one.compact_threshold for one in asked.context_management or () if one.type == "compaction"]
    over = [most for most in asks if most is None or size > most]
    if not over:
        return {}
    return {
        "context_management": f"the input has {size} tokens and is not compacted by itself: send a compaction_trigger"
    }


def _hints(served: Served, asked: ResponseRequest) -> dict[str, str]:
    """The fields of a request that ask for something this model cannot be told and that does not change what an answer is, with why."""
    made: dict[str, str] = {}
    effort = asked.reasoning.effort if asked.reasoning else None
    if effort is not None and (why := conversation.effort_ignored(served, effort)):
        made["reasoning.effort"] = why
    if asked.summary is not None and not conversation.reasons_apart(served):
        made["reasoning.summary"] = (
            f"{served.model.name} does not reason apart from its answers: there is nothing to tell"
        )
    elif asked.summary == "concise":
        made["reasoning.summary"] = "nothing here writes a shorter one than the reasoning itself: it is told as it is"
    if asked.text is not None and asked.text.verbosity not in (None, "medium"):
        made["text.verbosity"] = "a model here cannot be told how much to write but in words"
    if asked.service_tier not in (None, "auto", "default"):
        made["service_tier"] = "there is one tier"
    return made


async def _before(stored: StoredResponses, owner: str, previous: str) -> list[Item]:
    """The conversation up to and in a stored response."""
    where = "previous_response_id"
    record = await stored.get(previous, owner)
    if record is not None and record.body["status"] in UNFINISHED:
        raise BadRequest(f"{where}: that response is still {record.body['status']}", param=where)
    if record is not None and record.body["status"] == "failed":
        raise BadRequest(f"{where}: that response failed", param=where)
    try:
        return await stored.context(previous, owner)
    except NotFound as error:
        raise BadRequest(f"{where}: {error}", param=where, code="previous_response_not_found") from None


async def _resolved(stored: StoredResponses, owner: str, where: str, item: Item) -> Item:
    if item["type"] != "item_reference":
        return item
    found = await stored.item(item["id"], owner)
    if found is None:
        place = f"{where}.id"
        raise BadRequest(f"{place}: there is no stored item {item['id'][:80]!r}", param=place, code="item_not_found")
    return found
