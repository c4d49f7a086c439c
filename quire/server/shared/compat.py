"""The vocabulary of the compatibility table: what becomes of every field of every route. docs/compat.md is written from it.

A dialect says it beside its structs, in `COMPAT`: which struct reads the body, which fields are taken without effect and why, which are
refused unless they ask for nothing. The struct itself is the list of what is honoured, so that table and code cannot part.
`quire/server/compat.py` gathers the tables and writes them down; the tests send every row to the server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

HONOURED = "honoured"
NO_EFFECT = "no effect"
NEUTRAL = "refused unless"
REFUSED = "refused"

# Why a field of OpenAI's or vLLM's is taken without effect, wherever `bodies.IGNORED` has it.
WHY: dict[str, str] = {
    "user": "who asks does not change the answer",
    "safety_identifier": "who asks does not change the answer",
    "metadata": "the client's own notes; they are not kept",
    "prompt_cache_key": "prefixes are found without being told",
    "prompt_cache_retention": "prefixes are kept while there is room",
    "prompt_cache_options": "prefixes are found without being told",
    "prediction": "a hint for speed",
    "parallel_tool_calls": "means nothing without tools",
    "include_reasoning": "a model without reasoning has none to include",
    "cache_prompt": "prefixes are found without being told",
    "id_slot": "there are no slots",
    "n_keep": "nothing is cut here: `truncation` says what is",
    "n_discard": "nothing is cut here: `truncation` says what is",
    "n_cache_reuse": "prefixes are found without being told",
    "session_id": "prefixes are found without being told",
    "cache_control": "prefixes are shared without being told",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One field."""

    name: str  # with the object that it is in: options.seed
    verdict: str
    note: str = ""
    neutral: tuple[object, ...] = ()
    probe: Any = None  # of a refused field of the struct: a value that is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of a body, or of an object in it."""

    shape: type[msgspec.Struct]
    inside: str = ""  # the object, for instance "options"
    ignored: Collection[str] = ()  # names; with their reasons where it is a mapping
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, str]] = field(
        default_factory=dict
    )  # in the struct, to be refused: a value, and why
    notes: Mapping[str, str] = field(default_factory=dict)  # of honoured fields

    def rows(self) -> Iterator[Row]:
        """Every field, in the struct's order, then by name."""
        before = f"{self.inside}." if self.inside else ""
        honoured = [f.encode_name for f in msgspec.structs.fields(self.shape)]
        for name in honoured:
            if name in self.refused:
                probe, why = self.refused[name]
                yield Row(before + name, REFUSED, why, probe=probe)
            else:
                yield Row(before + name, HONOURED, self.notes.get(name, ""))
        reasons: Mapping[str, str] = self.ignored if isinstance(self.ignored, Mapping) else {}
        for name in sorted(set(self.ignored) - set(honoured)):
            yield Row(before + name, NO_EFFECT, reasons.get(name) or WHY.get(name, ""))
        for name in sorted(set(self.neutral) - set(honoured) - set(self.ignored)):
            yield Row(before + name, NEUTRAL, neutral=self.neutral[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One route."""

    dialect: str
    method: str
    path: str
    what: str = ""
    fields: tuple[Fields, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)  # the smallest body that is answered
    surface: str = ""  # names in the API's public description that the table must account for
    task: str = "generate"  # what kind of model answers: generate, embed, or any

    def rows(self) -> list[Row]:
        """The fields of the body, those of objects in it after it."""
        return [row for part in self.fields for row in part.rows()]


@dataclass(frozen=True, slots=True)
class Absent:
    """A route of somebody's API that is not here."""

    dialect: str
    path: str
    why: str
    status: int = 404


# What is to be said of the sampling fields, which several routes share.
SAMPLING: dict[str, str] = {
    "response_format": "enforced: `text`, `json_object`, `json_schema` or `structural_tag`; `strict` changes nothing",
    "structured_outputs": "enforced: `json`, `regex`, `choice`, `grammar`, `json_object` or `structural_tag`",
    "guided_json": "enforced",
    "guided_regex": "enforced",
    "guided_choice": "enforced",
    "guided_grammar": "enforced: GBNF or Lark",
    "guided_whitespace_pattern": "between the parts of a JSON answer; a pattern of blanks alone",
    "json_schema": "enforced; llama.cpp's name",
    "grammar": "enforced: GBNF; llama.cpp's name",
    "model": "the served model, or left out",
    "temperature": "0 to 100; 0 is greedy",
    "top_p": "above 0, to 1",
    "top_k": "0 and -1: no limit",
    "min_p": "0 to 1",
    "typical_p": "above 0, to 1",
    "repetition_penalty": "over prompt and answer",
    "presence_penalty": "-2 to 2, over the answer",
    "frequency_penalty": "-2 to 2, over the answer",
    "logit_bias": "token id to -100 … 100; up to 1024",
    "seed": "the same request with the same seed gives the same tokens",
    "stop": "a string, or up to 16",
    "stop_token_ids": "up to 128",
    "include_stop_str_in_output": "",
    "min_tokens": "not beside structured output",
    "max_tokens": "never more than the context leaves: more is refused",
    "ignore_eos": "not beside structured output",
    "n": "1 to 64",
    "prompt_logprobs": "0 to 20",
    "skip_special_tokens": "true by default",
    "stream_options": "`include_usage`, and with it vLLM's `continuous_usage_stats`; `include_obfuscation` only false",
    "priority": "lower runs first",
    "cache_salt": "requests with different salts never share cached prefixes",
    "request_id": "becomes part of the answer's id",
    "return_token_ids": "",
    "truncate_prompt_tokens": "the last so many tokens of the prompt, -1: what the context holds; what was cut is told in `quire`",
    "truncation_side": "`left`, the default: the end of the prompt is kept; `right`: its beginning",
    "receipts": "Quire's: what happened to the request",
    "itl_slo_ms": "Quire's: milliseconds between two tokens that prompts of others may take; 1 to 60000",
}
