"""A model's chat template: messages in, the prompt text out.

Owns what a template is given and what its failures mean; `sandbox.py` owns how it is kept in bounds. A template that
does not compile is a BadModelFile; one that refuses the messages, or needs more than its budget, is a BadRequest. The
caller's messages are never changed, and no content is dropped in silence: parts that are not text are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError

from quire.chat.templates.budget import Budget, OverBudget, measure
from quire.chat.templates.sandbox import BoundedEnvironment
from quire.observe.errors import BadModelFile, BadRequest

if TYPE_CHECKING:
    from quire.chat.tokenizers.tokenizer import Tokenizer

MAX_SOURCE = 128 * 1024  # characters; the longest public templates have under 20 thousand
SECONDS = 2.0
SLACK = 1_000_000  # characters a value or the output may have beyond four times the input
_NEEDLE = "needle in the message"
_STOPPED = "template_limit"
_SEARCHING = frozenset(
    [
        *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex"),
        *("count", "replace", "removeprefix", "removesuffix"),
    ]
)
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """The values that a template is given, in fresh lists and dicts of plain values."""

    template: ChatTemplate  # the one that writes it
    messages: list[dict[str, Any]]
    tools: Any
    kwargs: dict[str, Any]
    add_generation_prompt: bool
    continues: bool = False  # ends with the last message's own text, so that the answer goes on with it

    def write(self) -> str:
        """The prompt."""
        prompt = self.template._run(self.messages, self.add_generation_prompt, self.tools, self.kwargs)
        return _up_to(prompt, self.messages[-1].get("content")) if self.continues else prompt


class ChatTemplate:
    """One compiled template. Safe to use from several threads."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        seconds: float = SECONDS,
        now: Callable[[], datetime] = datetime.now,
        where: str = "tokenizer.chat_template",
        more: Mapping[str, str] = {},
        with_tools: ChatTemplate | None = None,
    ):
        """`where` is what complaints call the source; `more` are further named tokens; `with_tools` renders instead of this
        one where there are tools."""
        self.source = source
        self._tokens = {**more, "bos_token": bos_token, "eos_token": eos_token}
        self._with_tools = with_tools
        self._seconds = seconds
        self._now = now
        self._environment = BoundedEnvironment({"strftime_now": lambda form: _strftime(now(), form)})
        if len(source) > MAX_SOURCE:
            raise BadModelFile(f"{where} has {len(source)} characters: at most {MAX_SOURCE} are allowed")
        try:
            self._template = self._environment.template(source)
        except TemplateSyntaxError as error:
            raise BadModelFile(f"{where}, line {error.lineno}: {error.message}") from error
        except (TemplateError, SyntaxError, ValueError, TypeError, OverBudget) as error:
            raise BadModelFile(f"{where} does not compile: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise BadModelFile(f"{where} does not compile: it is nested too deeply") from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a model file, or None: such a model takes completions, not chat."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise BadModelFile(f"tokenizer.chat_template is a {type(source).__name__}: a string is needed")
        bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(source, bos, eos)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. Other keywords reach the template as they are (`enable_thinking=False`)."""
        return self.conversation(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs).write()

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> Conversation:
        """Check what a caller gives, and bring it into the form that the template reads."""
        if tools and self._with_tools is not None:
            return self._with_tools.conversation(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=documents,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        taken = _OURS & kwargs.keys()
        if taken:
            raise BadRequest(
                f"{min(taken)} is set by the server and cannot be passed to the template", param=min(taken)
            )
        if not messages:
            raise BadRequest("messages is empty: at least one is needed", param="messages")
        plain = [self._message(i, message) for i, message in enumerate(messages)]
        given = None if tools is None else _plain(list(tools))
        words = _plain(kwargs if documents is None else kwargs | {"documents": list(documents)})
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt contradict each other", param="continue_final_message"
            )
        return Conversation(self, plain, given, words, add_generation_prompt, continue_final_message)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names that the template takes from what it is given, `messages` and `enable_thinking` say."""
        found = meta.find_undeclared_variables(self._environment.parse(self.source))
        return frozenset(found) if self._with_tools is None else frozenset(found) | self._with_tools.reads

    @cached_property
    def _asks_functions(self) -> bool:
        """Whether it wants its tools as a text called `functions`, as templates from before `tools` did."""
        asked = meta.find_undeclared_variables(self._environment.parse(self.source))
        return "functions" in asked and "tools" not in asked

    @property
    def whole_source(self) -> str:
        """The source, with that of the template for tools where there is one."""
        return self.source if self._with_tools is None else f"{self.source}\n{self._with_tools.source}"

    @cached_property
    def looked_for(self) -> frozenset[str]:
        """Texts that the template compares with, or searches, cuts or replaces in another: what it may look for in a message is
        among them, and what it merely prints is not."""
        found: set[str] = set()
        for node in self._environment.parse(self.source).find_all(
            (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)
        ):
            if isinstance(node, nodes.Compare):
                looked = [node.expr, *(operand.expr for operand in node.ops)]
            elif isinstance(node, nodes.Call):
                method = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
                looked = node.args if method in _SEARCHING else []
            else:
                looked = node.args if isinstance(node, nodes.Test) or node.name == "replace" else []
            found.update(c.value for c in looked if isinstance(c, nodes.Const) and isinstance(c.value, str) and c.value)
        return frozenset(found)

    def _run(self, messages: list[Any], add_generation_prompt: bool, tools: Any, kwargs: dict[str, Any]) -> str:
        size = measure([messages, tools, kwargs], 1 << 30)
        budget = Budget(self._seconds, 32 * SLACK + 64 * size, SLACK + 4 * size, given=[messages, tools, kwargs])
        variables = {
            "documents": None,
            **kwargs,
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if self._asks_functions:
            given = {"functions": json.dumps(tools or [], indent=4), "datetime": _strftime(self._now(), "%Y-%m-%d")}
            variables = {**given, **variables}
        try:
            return self._environment.render(self._template, variables, budget)
        except OverBudget as error:
            raise BadRequest(f"the chat template was stopped: {error}", param="messages", code=_STOPPED) from error
        except SecurityError as error:
            raise BadRequest(f"the chat template tried what it may not: {error.message}", param="messages") from error
        except TemplateError as error:
            raise BadRequest(f"the chat template refused the messages: {error.message}", param="messages") from error
        except RecursionError as error:
            raise BadRequest("the chat template was stopped: it calls itself without end", param="messages") from error
        except MemoryError as error:
            raise BadRequest("the chat template failed: there is no memory for it", param="messages") from error
        except Exception as error:
            what = f"{type(error).__name__}: {str(error)[:500]}"
            raise BadRequest(f"the chat template failed on these messages ({what})", param="messages") from error

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{where} is not an object with a role", param=where)
        made = _plain(dict(message))
        content = made.get("content")
        if isinstance(content, list):
            texts = [_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
            parts = [{"type": "text", "text": text} for text in texts]
            made["content"] = parts if self.takes_parts else "\n".join(texts)
        elif isinstance(content, str) and self.needs_parts:
            made["content"] = [{"type": "text", "text": content}]
        elif content is not None and not isinstance(content, str):
            raise BadRequest(f"{where}.content is a {type(content).__name__}: text is needed", param=f"{where}.content")
        for call in made.get("tool_calls") or ():
            _write_arguments(call) if self.needs_text_arguments else _parse_arguments(call)
        if made.get("tool_calls") and made.get("content") == "" and self.needs_null_content:
            made["content"] = None
        # Reasoning goes by several names; a template knows one of them.
        reasoning = next((made[name] for name in _REASONING if made.get(name) is not None), None)
        if reasoning is None:
            return made
        text = made.get("content")
        if isinstance(reasoning, str) and (text is None or isinstance(text, str)) and self.needs_thinking_parts:
            spoken = [{"type": "text", "text": text}] if text else []
            made["content"] = [{"type": "thinking", "thinking": reasoning}, *spoken]
        return {**dict.fromkeys(_REASONING, reasoning), **made, "reasoning_content": reasoning}

    # What the template does with content is found by trying it: whether a needle comes out when the content is text,
    # and when it is a list of one text part. A list that is merely printed, as Python writes it, does not count.

    @cached_property
    def takes_parts(self) -> bool:
        """The template reads content given as a list of parts; otherwise text parts are joined with newlines."""
        return self._finds([{"type": "text", "text": _NEEDLE}])

    @cached_property
    def needs_parts(self) -> bool:
        """The template reads content only as a list of parts, so plain text is given to it as one part."""
        return not self._finds(_NEEDLE) and self.takes_parts

    @cached_property
    def takes_system(self) -> bool:
        """The template writes a system message that stands before the first question."""
        system = {"role": "system", "content": _NEEDLE}
        if self.needs_parts:
            system["content"] = [{"type": "text", "text": _NEEDLE}]  # type: ignore[assignment]
        return _NEEDLE in self._tried([system, {"role": "user", "content": "x"}])

    @cached_property
    def needs_text_arguments(self) -> bool:
        """The template reads a call's arguments only as text, as the APIs carry them; others expect an object."""

        as_object, as_text = {"a": _NEEDLE}, json.dumps({"a": _NEEDLE})
        return not any(self._calls(as_object, c) for c in ("", None)) and any(
            self._calls(as_text, c) for c in ("", None)
        )

    @cached_property
    def needs_null_content(self) -> bool:
        """The template writes calls only beside content that is null, as the APIs carry it; empty text hides them."""
        given = json.dumps({"a": _NEEDLE}) if self.needs_text_arguments else {"a": _NEEDLE}
        return not self._calls(given, "") and self._calls(given, None)

    @cached_property
    def needs_thinking_parts(self) -> bool:
        """The template writes reasoning only as a part of the content, and not as a field of the message."""

        def writes(turn: dict[str, Any]) -> bool:
            text = self._tried([{"role": "user", "content": "x"}, {"role": "assistant", **turn}])
            return _NEEDLE in text and not re.search(r"""['"]thinking['"]\s*:\s*['"]""" + _NEEDLE, text)

        field = {**dict.fromkeys(_REASONING, _NEEDLE), "content": "y"}
        parts = [{"type": "thinking", "thinking": _NEEDLE}, {"type": "text", "text": "y"}]
        return "thinking" in self.source and not writes(field) and writes({"content": parts})

    def _calls(self, arguments: Any, content: str | None) -> bool:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "123456789", "type": "function", "function": function}
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        return _NEEDLE in self._tried([{"role": "user", "content": "x"}, turn])

    def _finds(self, content: Any) -> bool:
        text = self._tried([{"role": "user", "content": content}])
        return _NEEDLE in text and not re.search(r"""['"]text['"]\s*:\s*['"]""" + _NEEDLE, text)

    def _tried(self, messages: list[Any]) -> str:
        try:
            return self._run(messages, True, None, {})
        except BadRequest as error:
            if error.code == _STOPPED:
                raise  # it would not get further with the real messages
            return ""


def _plain(value: Any) -> Any:
    """The value in fresh lists and dicts, so that a template gets nothing with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise BadRequest(f"a {type(value).__name__} cannot be given to a chat template", param="messages")


def _up_to(prompt: str, content: Any) -> str:
    """The prompt up to the end of what its last message says."""
    text = content[-1]["text"] if isinstance(content, list) and content else content
    text = text if isinstance(text, str) else ""
    at = prompt.rfind(text.strip()) if text.strip() else -1
    if at < 0:
        raise BadRequest(
            "the last message cannot be continued: it is empty, or the chat template does not write it as it is",
            param="messages",
        )
    # A template may trim what it writes; then so is what is continued.
    begun = text.lstrip()
    return prompt[: at + len(begun)] if prompt.startswith(begun, at) else prompt[: at + len(text.strip())]


def _part_text(where: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text"):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise BadRequest(f"{where} is {str(kind)[:80]!r}: only text parts are supported", param=where)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text is not a string", param=where)
    return part["text"]


def _parse_arguments(call: Any) -> None:
    """Templates expect a call's arguments as an object; the APIs carry them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            parsed = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return  # the template gets the text, as the caller wrote it
        if isinstance(parsed, dict):
            function["arguments"] = parsed


def _write_arguments(call: Any) -> None:
    """Some templates print arguments as they are, and so need the text."""
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


def _strftime(now: datetime, form: Any) -> str:
    if not isinstance(form, str) or len(form) > 200 or re.search(r"%[^a-zA-Z%]*\d", form):
        raise OverBudget("strftime_now with a format that may be wide")
    return now.strftime(form)
