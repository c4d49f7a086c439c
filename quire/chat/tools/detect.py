"""The detection of a model's format of tool calls and reasoning: from what its chat template renders, never from the model's
name.

The template renders conversations with calls and with reasoning, because a model was trained to write them as its template does. First,
each format that has a file of its own (`formats/`; the listing is the registry) says whether the rendered turns are its own. Then three
common shapes are derived from them, whatever marks they use. Some templates drop the reasoning of earlier turns: there
the marks are taken from the template's source.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Protocol

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools import named, objects, probe, tagged
from quire.chat.tools.lark import Cut
from quire.chat.tools.marked import Marked, Section, Think
from quire.chat.tools.types import SIGNS, Format
from quire.observe.errors import BadRequest

# Reasoning marks that templates mention where they cut them away; the first that both are in the source.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)

# What known marks are called. A template with others gets a name that says how its shape was found.
NAMES = {
    ("objects", "<tool_call>"): "hermes",
    ("objects", "[TOOL_CALLS]"): "mistral",
    ("objects", "<tool_calls>"): "tool-calls",  # MiniMax M1, Apriel
    ("objects", "<TOOLCALL>"): "nemotron",
    ("objects", "<|START_ACTION|>"): "command-r7b",
    ("objects", "functools"): "firefunction",
    ("objects", "<|tool_call|>"): "granite",
    ("named", "[TOOL_CALLS]"): "mistral-args",
    ("named", "<function="): "functionary",
    ("named", "<｜tool▁calls▁begin｜>"): "deepseek",
    ("named", "<|tool_calls_section_begin|>"): "kimi-k2",
    ("objects", "<|function_call|>"): "gigachat",
    ("named", "<|tool_calls|>"): "solar",
    ("tagged", "<seed:tool_call>"): "seed",
    ("tagged", "<tool_calls:opensource>"): "hunyuan",
    ("tagged", "<parameter="): "qwen-xml",
    ("tagged", "<arg_key>"): "glm",
    ("tagged", '<parameter name="'): "minimax-m2",
    ("tagged", '<param name="'): "minicpm",
    ("tagged", '<｜DSML｜parameter name="'): "deepseek-dsml",
}


class SpecialTokens(Protocol):
    """The methods of a tokenizer that are needed here."""

    eos_ids: tuple[int, ...]

    def token_text(self, token: int) -> str: ...

    def controls(self, text: str) -> list[str | int]: ...


class Style(Protocol):
    """A file of `formats/`: a format that recognizes a template by what it writes."""

    NAME: str

    def found(self, seen: probe.RenderedTurns, cut: Cut) -> Format | None: ...


@cache
def styles() -> dict[str, Style]:
    """The formats with a file of their own, in the order of their names."""
    from quire.chat.tools import formats

    names = sorted(info.name for info in pkgutil.iter_modules(formats.__path__))
    modules = [importlib.import_module(f"{formats.__name__}.{name}") for name in names]
    return {module.NAME: module for module in modules}  # type: ignore[misc]


def detect_format(template: ChatTemplate, tokenizer: SpecialTokens, name: str | None = None) -> Format | None:
    """The format of the answers; None: the template shows neither reasoning nor calls, and all is text. `name` overrides."""
    if name is None and not any(word in template.whole_source for word in SIGNS):
        return None
    ends = [tokenizer.token_text(i) for i in tokenizer.eos_ids]
    seen = probe.render_turns(template, ends)
    if name is not None:
        return _by_name(name, seen, tokenizer.controls)
    for style in styles().values():
        made = style.found(seen, tokenizer.controls)
        if made is not None:
            return made
    return derived(seen, tokenizer.controls)


def derived(seen: probe.RenderedTurns, cut: Cut) -> Format | None:
    """A format of one of the common shapes."""
    think = think_of(seen)
    made = ((kind, derive(seen)) for kind, derive in _SHAPES.items()) if seen.one else ()
    kind, section = next((pair for pair in made if pair[1] is not None), ("", None))
    if think is None and section is None:
        return None
    if section is None:
        return Marked("think", think, None, cut, header_of(seen, think), seen.wrap)
    marks = [section.openers[0], *([section.key_open.strip()] if isinstance(section, tagged.TaggedSection) else [])]
    name = next((NAMES[kind, mark] for mark in marks if (kind, mark) in NAMES), f"derived-{kind}")
    return Marked(name, think, section, cut, header_of(seen, think), seen.wrap)


_SHAPES: dict[str, Callable[[probe.RenderedTurns], Section | None]] = {
    "objects": objects.derive,
    "named": named.derive,
    "tagged": tagged.derive,
}


def think_of(seen: probe.RenderedTurns) -> Think | None:
    """The marks of reasoning: as they were written, or as the source names them."""
    marks = seen.think or next((pair for pair in MARKS if all(mark in seen.source for mark in pair)), None)
    if marks is None and "</think>" in seen.source:
        marks = MARKS[0]
    return None if marks is None else Think(*marks)


def header_of(seen: probe.RenderedTurns, think: Think | None) -> str:
    """The text that begins an answer, without reasoning that is opened (and closed) there."""
    if think is not None and think.open in seen.header:
        return seen.header[: seen.header.index(think.open)]
    return seen.header


def _by_name(name: str, seen: probe.RenderedTurns, cut: Cut) -> Format:
    made = None
    if name in styles():
        made = styles()[name].found(seen, cut)
    elif name == "think":
        think = think_of(seen) or Think("<think>", "</think>")
        made = Marked("think", think, None, cut, header_of(seen, think), seen.wrap)
    else:
        made = derived(seen, cut)
        made = made if made is not None and made.name == name else None
    if made is None:
        known = ", ".join(sorted({*styles(), *NAMES.values(), "think"}))
        raise BadRequest(
            f"answers: this model's template does not write {name!r}", cure=f"there are {known}", param="answers"
        )
    return made
