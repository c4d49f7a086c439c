"""What callers of the library may hand over, checked before anything runs: what is refused is named, with its place.

Python passes values of any type on, and an error deep inside would not tell the caller which argument was wrong. Nothing here knows a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from quire.config import parse_size
from quire.engine.types import Constraint
from quire.llm.outputs import Message, Prompt
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams

if TYPE_CHECKING:
    from quire.chat.tools.types import Tools

MESSAGES = 'a conversation is [{"role": "user", "content": "…"}]'
PROMPTS = "give text, a list of texts, or lists of token ids"
# Options that are not texts; None is a word for "decide it" where the other is a number.
NUMBERS = (
    "threads",
    "context",
    "max_seqs",
    "max_batch_tokens",
    "max_waiting",
    "itl_slo",
    "depth",
    "draft_tokens",
    "max_lora_rank",
)
FLAGS = ("deterministic", "prefix_cache", "progress")
OTHERS = ("kv_memory", "loras", "default_params")


def model_name(model: object) -> str:
    """What the model is called. A path object always is a path, however short."""
    if isinstance(model, str):
        return model
    if isinstance(model, os.PathLike):
        return os.path.abspath(os.fsdecode(model))
    raise BadRequest(f"the model is a {type(model).__name__}: give its name or its path", param="model")


def check_kinds(options: Mapping[str, object]) -> None:
    """Raises BadRequest for an option of the wrong type."""
    for name, value in options.items():
        if value is None or name in OTHERS:
            continue
        wanted, word = (str, "a text")
        if name in NUMBERS:
            wanted, word = (int, "a whole number")
        elif name in FLAGS:
            wanted, word = (bool, "True or False")
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise BadRequest(f"{name} is {value!r}: it must be {word}", param=name)


def one_of_ours(params: object, where: str) -> SamplingParams:
    """Raises BadRequest for anything but SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise BadRequest(
            f"{where} is a {type(params).__name__}",
            cure="give SamplingParams(temperature=…, max_tokens=…)",
            param=where,
        )
    return params


def must_constrain(constraint: object) -> None:
    """Raises BadRequest for anything but a Constraint, or none."""
    if constraint is not None and not isinstance(constraint, Constraint):
        cure = "give Constraint.json_schema({…}), .regex(…), .choice([…]), .json_object(), .lark(…) or .gbnf(…)"
        raise BadRequest(f"constraint is a {type(constraint).__name__}", cure=cure, param="constraint")


def tools_of(tools: Sequence[Mapping[str, Any]], choice: str | None, parallel: bool) -> Tools:
    """Tools as OpenAI's API writes them. `choice` is none, auto, required, or the name of one."""
    from quire.chat.tools.types import Tool, Tools

    made: list[Tool] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise BadRequest(f'tools[{i}] is not {{"type": "function", "function": {{"name": …}}}}', param="tools")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise BadRequest(f"tools[{i}].function.parameters is not a schema", param="tools")
        schema = None if parameters is None else dict(parameters)
        made.append(Tool(name, str(function.get("description") or ""), schema, function.get("strict") is True))
    if choice in (None, "none", "auto", "required"):
        return Tools(made, choice or "auto", None, parallel)
    return Tools(made, "named", choice, parallel)


def to_bytes(size: int | str | None) -> int | None:
    if not isinstance(size, str):
        return size
    try:
        return parse_size(size)
    except ValueError as e:
        raise BadRequest(f"kv_memory: {e}", param="kv_memory") from None


def as_prompts(prompts: str | Sequence[Prompt] | Sequence[int]) -> list[Prompt]:
    """One text, several texts, several token lists, or one token list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes | bytearray) or not isinstance(prompts, Iterable):
        raise BadRequest(f"the prompts are a {type(prompts).__name__}: {PROMPTS}", param="prompts")
    listed = list(prompts)
    if listed and all(isinstance(p, int) for p in listed):
        return [cast("list[int]", listed)]
    for i, prompt in enumerate(listed):
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, str | Sequence):
            raise BadRequest(f"prompt {i} is a {type(prompt).__name__}: {PROMPTS}", param="prompts")
    return cast("list[Prompt]", listed)


def token_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    ids = list(prompt)
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise BadRequest(
                f"{token!r} at place {i} of a prompt is not a token id under {vocab_size}", param="prompts"
            )
    if not ids:
        raise BadRequest("a prompt has no tokens", param="prompts")
    return ids


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation, or several."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise BadRequest(f"messages is a {type(messages).__name__}", cure=MESSAGES, param="messages")
    if not messages:
        raise BadRequest("there are no messages", cure=MESSAGES, param="messages")
    several = not isinstance(messages[0], Mapping)
    listed = list(cast("Sequence[Sequence[Message]]", messages)) if several else [cast("Sequence[Message]", messages)]
    for n, conversation in enumerate(listed):
        where = f"conversation {n}: " if several else ""
        if isinstance(conversation, str | bytes | Mapping) or not isinstance(conversation, Sequence):
            raise BadRequest(f"{where}it is a {type(conversation).__name__}", cure=MESSAGES, param="messages")
        for i, message in enumerate(conversation):
            _check_message(f"{where}messages[{i}]", message)
    return listed


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} has no role", cure=MESSAGES, param="messages")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise BadRequest(
            f"{where}: its content is a {type(content).__name__}",
            cure="give text, or a list of parts",
            param="messages",
        )
