"""The finder: what it says of a prompt, what it counts, what it forgets, and whom it tells."""

from __future__ import annotations

import random
from typing import Any

from quire.chat.prefixes import recent
from quire.chat.prefixes.finder import WORTH, Engine, Explained, Finder
from quire.chat.prefixes.recent import Recent
from quire.chat.types import Origin
from tests.unit.chat.prefixes.kit import template, tokenizer, tool

PAGE = 16
HOME = ("", "")
RULES = "Follow these rules: " + " ".join(f"rule {n} says to do thing number {n * 7}." for n in range(40))


class Asked:
    """One server's requests: prompts are rendered and their answers remembered; pages are found as the caller says."""

    def __init__(self) -> None:
        self.finder = Finder(tokenizer())
        self.template = template()

    def ids(self, messages: list[dict[str, Any]], **given: Any) -> list[int]:
        text = self.template.render(messages, **given)
        return self.finder.tokenizer.encode(text, add_special=False, parse_special=True)

    def ask(
        self,
        messages: list[dict[str, Any]],
        cached: int | None = None,
        answer: str = "",
        space: tuple[str, str] = HOME,
        agent: str = "coder",
        engine: Engine = Engine(),
        **given: Any,
    ) -> Explained:
        prompt = self.ids(messages, **given)
        entry = self.finder.begin(prompt, space, agent)
        if cached is None:  # as an endless cache has it
            shared = [recent.common(other.ids, entry.ids) for other in self.finder.recent.before(entry)]
            cached = min(max(shared, default=0), len(prompt) - 1) // PAGE * PAGE
        origin = Origin(messages, given | {"add_generation_prompt": True})
        made = self.finder.case(entry, cached, engine, origin, self.template).explain()
        said = self.finder.tokenizer.encode(answer, add_special=False, parse_special=True)
        told = self.finder.end(entry, said, engine, made)
        assert told is not None
        return told


def talk(system: str, *said: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return [{"role": "system", "content": system}, *turns]


def test_a_first_prompt_is_new_and_the_next_turn_goes_on():
    asked = Asked()
    assert asked.ask(talk(RULES, "hi"), answer="hello<|im_end|>").cause == "new"
    told = asked.ask(talk(RULES, "hi", "hello", "and now?"))
    assert (told.cause, told.lost_tokens) == ("continued", 0)


def test_a_change_is_found_with_its_place_its_text_and_its_price():
    asked = Asked()
    asked.ask(talk(f"Today is 2026-11-19.\n{RULES}", "hi"))
    told = asked.ask(talk(f"Today is 2026-11-20.\n{RULES}", "hi"))
    assert (told.cause, told.part, told.where, told.kind) == ("diverged", "system", "messages[0] (system)", "date")
    assert "2026-11-19" in told.before
    assert "2026-11-20" in told.now
    assert told.context.endswith("Today is ")
    prompt = asked.finder.tokenizer.decode(asked.ids(talk(f"Today is 2026-11-20.\n{RULES}", "hi")))
    assert told.position == prompt.index("20.\n") - len("<|im_start|>") + 1
    assert len(RULES) < told.lost_tokens < len(prompt) - told.position + PAGE
    assert "--canonicalize dates" in told.cure
    assert not told.volatile


def test_what_changes_each_time_is_volatile_and_is_one_place():
    asked = Asked()
    told = None
    for n in range(4):
        told = asked.ask(talk(f"Session 7d1f0a99b{n}, request {n}.\n{RULES}", "hi"))
    assert told is not None
    assert told.volatile
    assert told.times == 3
    (place,) = asked.finder.places("")
    assert (place.times, place.agent) == (3, "coder")
    assert place.lost_tokens > 3 * len(RULES)


def test_tools_in_another_order_are_found():
    asked = Asked()
    tools = [tool(f"tool_{n}", **{f"field_{n}": {"type": "string", "description": RULES[:80]}}) for n in range(5)]
    asked.ask(talk(RULES, "hi"), tools=tools)
    told = asked.ask(talk(RULES, "hi"), tools=[tools[0], tools[2], tools[1], *tools[3:]])
    assert (told.part, told.where, told.kind) == ("tools", "tools[1] (tool_2)", "order")
    assert told.counted_as == "tools"


def test_an_answer_that_comes_back_otherwise_is_found():
    asked = Asked()
    answer = '<tool_call>\n{"name": "f", "arguments": {"path":"a.py","text":"' + "x y z " * 30 + '"}}\n</tool_call>'
    asked.ask(talk(RULES, "hi"), answer=f"{answer}<|im_end|>")
    call = {"id": "c", "function": {"name": "f", "arguments": {"path": "a.py", "text": "x y z " * 30}}}
    back = [*talk(RULES, "hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    told = asked.ask(back)
    assert (told.cause, told.part) == ("diverged", "answer")
    assert "messages[2].tool_calls[0]" in told.where


def test_another_question_behind_the_same_rules_is_no_break():
    asked = Asked()
    asked.ask(talk(RULES, "tell me about the weather in Paris"))
    told = asked.ask(talk(RULES, "write a program that sorts numbers"))
    assert (told.cause, told.lost_tokens) == ("continued", 0)
    assert not list(asked.finder.places(""))


def test_pages_that_are_gone_are_told_with_the_reason():
    for cause, engine in (
        ("evicted", Engine(evictions=9)),
        ("restarted", Engine(restarts=1, evictions=9)),
        ("unkept", Engine()),
    ):
        asked = Asked()
        asked.ask(talk(RULES, "hi"))
        told = asked.ask(talk(RULES, "hi"), cached=64, engine=engine)
        assert (told.cause, told.position, told.counted_as) == (cause, 64, cause)
        prompt = len(asked.ids(talk(RULES, "hi")))
        assert told.lost_tokens == (prompt - 1) // PAGE * PAGE - 64


def test_a_prompt_that_is_still_computed_gives_nothing_yet():
    asked = Asked()
    prompt = asked.ids(talk(RULES, "hi"))
    asked.finder.begin(prompt, HOME, "coder")  # under way
    assert asked.ask(talk(RULES, "hi"), cached=0).cause == "computing"


def test_nothing_is_told_across_namespaces_and_adapters():
    asked = Asked()
    secret = f"My password is 2026-11-19.\n{RULES}"
    asked.ask(talk(secret, "hi"), space=("theirs", ""))
    asked.ask(talk(secret, "hi"), space=("", "an adapter"))
    told = asked.ask(talk(f"My password is 2026-11-20.\n{RULES}", "hi"))
    assert told.cause == "new"
    asked.ask(talk(f"My password is 2026-11-20.\n{RULES}", "hi"), space=("theirs", ""))
    assert not list(asked.finder.places(""))
    assert len(list(asked.finder.places("theirs"))) == 1
    assert [t.requests for t in asked.finder.traffic("")] == [1, 1]  # with and without the adapter


def test_the_agent_s_own_last_prompt_is_preferred():
    asked = Asked()
    asked.ask(talk(f"n 1111 Session\n{RULES}", "hi"), agent="one")
    asked.ask(talk("n 2222 quite another prompt", "x" * 600), agent="two")
    told = asked.ask(talk(f"n 1999 Session\n{RULES}", "hi"), agent="one")
    assert "1111" in told.before


def test_memory_is_bounded_in_bytes_entries_and_spaces():
    kept = Recent(entries=4, spaces=3, nbytes=40_000)
    chance = random.Random(1)
    held = []
    for n in range(300):
        entry = kept.add(
            (str(chance.randrange(6)), ""), "a", [chance.randrange(9) for _ in range(chance.randrange(4000))]
        )
        if n % 2:
            kept.grow(entry, range(chance.randrange(2000)))
        held.append(entry)
        if n % 3 == 0:
            entry.ended = kept.serial
            kept.supersede(entry)
        assert kept.nbytes <= 40_000
        assert len(kept) <= 12
        spaces = kept._spaces
        assert kept.nbytes == sum(e.nbytes for each in spaces.values() for e in each)
        assert len(spaces) <= 3
        assert all(each for each in spaces.values())
    assert kept.add(HOME, "a", range(20_000)).nbytes > 40_000
    assert kept.nbytes <= 40_000, "what is too large is not kept at all"


def test_a_longer_turn_takes_the_place_of_the_one_that_it_begins_with():
    asked = Asked()
    said = ["hi"]
    for n in range(recent.ENTRIES * 2):
        asked.ask(talk(RULES, *said), answer=f"answer {n}<|im_end|>")
        said += [f"answer {n}", f"question {n}"]
    assert len(asked.finder.recent) <= 2, "a conversation is one entry, not one for each turn"


def test_little_is_not_worth_a_word():
    asked = Asked()
    same = "s" * (WORTH - 1)
    asked.ask(talk("a", "b" * 600 + same))
    told = asked.ask(talk("a", "c" * 600 + same[: WORTH - 30]))
    assert told.lost_tokens == 0
