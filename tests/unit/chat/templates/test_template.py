from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import BadModelFile, BadRequest
from quire.weights.gguf.file import GGUF
from tests.unit.chat.toys import byte_level

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}},
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": 'Hello <b>"x"</b>'}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "How are you?"},
    ],
    "long": [
        {"role": "user", "content": "a\n b  "},
        {"role": "assistant", "content": "<think>hm</think>ok"},
        {"role": "user", "content": "é 🙂"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "rain"},
    ],
}
CALLS = {
    "one": CALL,
    "two": {
        **CALL,
        "id": "ABCDEFGHI",
        "function": {"name": "get_weather", "arguments": {"city": "Rome", "n": [1, None]}},
    },
}
CONVERSATIONS |= {
    "system and tools": [{"role": "system", "content": "Be brief."}, *CONVERSATIONS["tools"]],
    "tools, many turns": [
        {"role": "user", "content": "Weather in two places?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALLS["one"], CALLS["two"]]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"t": 3}'},
        {"role": "tool", "tool_call_id": "ABCDEFGHI", "name": "get_weather", "content": "sun"},
        {"role": "assistant", "content": "Cold and sunny."},
        {"role": "user", "content": "Thanks <3"},
    ],
    "reasoning": [
        {"role": "user", "content": "17 * 3?"},
        {"role": "assistant", "reasoning_content": "17 and 17 and 17", "content": "51"},
        {"role": "user", "content": "And 17 * 4?"},
    ],
    "reasoning and tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning_content": "look it up", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "rain"},
    ],
    "assistant last": [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "hi"}],
}
WITH_TOOLS = {"tools", "system and tools", "tools, many turns", "reasoning and tools"}
KEYWORDS: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"enable_thinking": True, "reasoning_effort": "high"}]
# Where the two differ, and why. "markup": jinja2's own type for HTML makes transformers write quotes as entities inside
# what a macro printed; there is no markup here, and JSON stays JSON.
DIFFERENT = {("meetkai-functionary-medium-v3.1.jinja", kind): "markup" for kind in WITH_TOOLS}
# A template that prints arguments as they are gets them as text, and transformers fails on an object.
DIFFERENT |= {("meetkai-functionary-medium-v3.2.jinja", kind): "arguments as text" for kind in WITH_TOOLS}
# It writes calls beside content that is null; beside "" transformers loses them.
DIFFERENT |= {("deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja", kind): "null content" for kind in WITH_TOOLS}
# Reasoning has a third name here, `reasoning`, and these know no other.
REASONING = ("reasoning", "reasoning and tools")
DIFFERENT |= {("upstage-Solar-Open-100B.jinja", kind): "named reasoning" for kind in REASONING}
# It knows reasoning as a part of the content.
DIFFERENT |= {("mistralai-Ministral-3-14B-Reasoning-2512.jinja", kind): "thinking parts" for kind in REASONING}
# They queue ids in a list, which transformers' sandbox forbids, with calls in the history; see the test of their own.
QUEUES = ("Kimi-K2-Instruct.jinja", "Kimi-K2-Thinking.jinja")
DIFFERENT |= {(name, kind): "queues" for name in QUEUES for kind in WITH_TOOLS}
# It wants its tools under another name, and the date.
DIFFERENT |= {("fireworks-ai-llama-3-firefunction-v2.jinja", kind): "functions" for kind in CONVERSATIONS}

# Templates that refuse some of these conversations, in transformers and here, and what they say.
REFUSED = {
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja": "'NoneType' object is not iterable",  # wants tools
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja": "'NoneType' object is not iterable",  # wants tools
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja": "'NoneType' object is not iterable",
    "fireworks-ai-llama-3-firefunction-v2.jinja": "'functions' is undefined",  # wants a variable of its own
    "google-gemma-2-2b-it.jinja": "System role not supported|roles must alternate",
    "llama-cpp-deepseek-r1.jinja": "generator is not JSON serializable",
    "meetkai-functionary-medium-v3.2.jinja": "can only concatenate str",  # wants arguments as text
    "meta-llama-Llama-3.1-8B-Instruct.jinja": "only supports single tool-calls",
    "meta-llama-Llama-3.2-3B-Instruct.jinja": "only supports single tool-calls",
    "meta-llama-Llama-3.3-70B-Instruct.jinja": "only supports single tool-calls",
}


def reference(source: str, messages: list[dict[str, Any]], tools: Any, generate: bool, **kwargs: Any) -> str | None:
    """What transformers renders, or None where it refuses."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    try:
        rendered = utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            add_generation_prompt=generate,
            bos_token="<s>",
            eos_token="</s>",
            **kwargs,
        )
    except Exception:
        return None
    return rendered[0][0]


def ours(
    name: str, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, generate: bool, **kwargs: Any
) -> str | None:
    try:
        return template.render(messages, tools=tools, add_generation_prompt=generate, **kwargs)
    except BadRequest as error:
        assert re.search(REFUSED.get(name, "nothing"), error.message), (name, error.message)
        return None


def compare(name: str, source: str, keywords: Sequence[dict[str, Any]] = ({},)) -> int:
    template = ChatTemplate(source, "<s>", "</s>")
    same = 0
    for n, (kind, messages) in enumerate(CONVERSATIONS.items()):
        tools = TOOLS if kind in WITH_TOOLS else None
        if (name, kind) in DIFFERENT:
            continue
        for (k, kwargs), generate in product(enumerate(keywords), (True, False)):
            if len(keywords) > 1 and (n + k) % 2 == generate:
                continue  # every two of conversation, keywords and ending meet in the other half
            expected = reference(source, messages, tools, generate, **kwargs)
            assert ours(name, template, messages, tools, generate, **kwargs) == expected, (name, kind, generate, kwargs)
            same += expected is not None
    return same


def test_public_templates_render_as_transformers_does(shared_data: Path):
    files = sorted((shared_data / "templates").glob("*.jinja"))
    assert len(files) == 68
    counts = {file.name: compare(file.name, file.read_text(encoding="utf-8"), KEYWORDS) for file in files}
    assert sum(counts.values()) > 1500
    nothing = [name for name, count in counts.items() if not count]
    assert nothing == ["fireworks-ai-llama-3-firefunction-v2.jinja"]
    source = (shared_data / "templates" / nothing[0]).read_text(encoding="utf-8")
    own = {"functions": "[]", "datetime": "today"}  # with which it renders
    want = reference(source, CONVERSATIONS["one"], None, True, **own)
    assert want and ours("", ChatTemplate(source, "<s>", "</s>"), CONVERSATIONS["one"], None, True, **own) == want


@pytest.mark.parametrize("name", QUEUES)
def test_templates_that_queue_ids_render_as_transformers_would_without_its_ban(
    name: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch
):
    from jinja2.sandbox import SandboxedEnvironment

    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    source = (shared_data / "templates" / name).read_text(encoding="utf-8")
    assert reference(source, CONVERSATIONS["tools"], TOOLS, True) is None
    monkeypatch.setattr(utils, "ImmutableSandboxedEnvironment", SandboxedEnvironment)
    other = source + "{# another text: compiled templates are remembered #}"
    template = ChatTemplate(source, "<s>", "</s>")
    for kind in sorted(WITH_TOOLS):
        before = json.dumps(CONVERSATIONS[kind])
        want = reference(other, CONVERSATIONS[kind], TOOLS, True)
        assert want and "functions.get_weather:0" in want
        for _ in range(2):  # what it queued is gone with the render
            assert template.render(CONVERSATIONS[kind], tools=TOOLS) == want, kind
        assert json.dumps(CONVERSATIONS[kind]) == before


def test_a_list_of_its_own_may_grow():
    source = "{% set l = [] %}{% for m in messages %}{{ l.append(m.content) or '' }}{% endfor %}{{ l.pop(0) }}{{ l }}"
    assert render(source) == "x[]"
    assert render("{% set l = messages[:] %}{{ l.pop().content }}{{ messages | length }}") == "x1"


def test_a_template_that_wants_arguments_as_text(shared_data: Path):
    source = (shared_data / "templates" / "meetkai-functionary-medium-v3.2.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, "<s>", "</s>")
    assert template.needs_text_arguments
    call = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [CONVERSATIONS["tools"][0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    want = reference(source, messages, TOOLS, True)
    assert want and template.render(messages, tools=TOOLS) == want


def test_the_default_model(model_path: Path):
    with GGUF.open(model_path) as file:
        template = ChatTemplate.from_gguf(file.metadata, Tokenizer.from_gguf(file.metadata))
    assert template is not None
    assert compare("default", template.source) == 2 * len(CONVERSATIONS)
    assert template.render([{"role": "user", "content": "hi"}]).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_from_gguf_without_and_with_a_template():
    data = byte_level()
    tokenizer = Tokenizer.from_gguf(data)
    assert ChatTemplate.from_gguf(data, tokenizer) is None
    template = ChatTemplate.from_gguf({**data, "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"}, tokenizer)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<|im_start|>|<|im_end|>"
    with pytest.raises(BadModelFile, match="chat_template is a list"):
        ChatTemplate.from_gguf({**data, "tokenizer.chat_template": ["x"]}, tokenizer)


def render(source: str, content: Any = "x", **kwargs: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render([{"role": "user", "content": content}], **kwargs)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>', 'b': [1, true, none]}|tojson }}", '{"a": "<é>", "b": [1, true, null]}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ 'é'|tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ {'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("a\n{% generation %}b{{ 1 }}{% endgeneration %}\nc", "a\nb1c"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2026-01-02"),
        ("{% set ns = namespace(n=0) %}{% for m in [1, 2] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro m(a, b='c') %}[{{ a }}{{ b }}]{% endmacro %}{{ m('x') }}{{ m('x', b=1) }}", "[xc][x1]"),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'abc'[1:] }}{{ [1, 2, 3][::-1] }}", "bbc[3, 2, 1]"),
        ("{{ '{}-{:>3}'.format('a', 1) }}{{ '%s%d' % ('x', 2) }}{{ 1 ~ 'a' ~ none }}", "a-  1x21aNone"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ') }}", "x"),
        ("{{ 'x' in ['x'] }}{{ {'a': 1} == {'a': 1} }}{{ [3, 1]|sort|first }}{{ 7 // 2 }}{{ 2 ** 3 }}", "TrueTrue138"),
        ("{{ [1, 2]|length }}{{ ' a '|trim }}{{ 'a<b'|safe }}{{ 'a<b'|e }}{{ nope|default('d') }}", "2aa<ba&lt;bd"),
    ],
)
def test_what_templates_need(source: str, expected: str):
    template = ChatTemplate(source, now=lambda: datetime(2026, 1, 2))
    assert template.render([{"role": "user", "content": "x"}]) == expected


def test_keywords_reach_the_template():
    assert (
        render("{{ enable_thinking }}{{ tools }}{{ add_generation_prompt }}", enable_thinking=False) == "FalseNoneTrue"
    )
    with pytest.raises(BadRequest, match="bos_token is set by the server"):
        render("{{ bos_token }}", bos_token="x")


def test_errors_say_whose_they_are():
    with pytest.raises(BadRequest, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadModelFile, match=r"chat_template, line 2: .*endfor"):
        ChatTemplate("{{ 1 }}\n{% endfor %}")
    with pytest.raises(BadModelFile, match="No filter named 'nonsense'"):
        ChatTemplate("{{ 1|nonsense }}")
    with pytest.raises(BadModelFile, match="at most"):
        ChatTemplate("x" * 1_000_000)
    with pytest.raises(BadRequest, match=r"failed on these messages .*ZeroDivisionError"):
        render("{{ 1 / 0 }}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["x"], r"messages\[0\] is not an object with a role"),
        ([{"content": "x"}], r"messages\[0\] is not an object with a role"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is a int"),
        ([{"role": "user", "content": object()}], "object cannot be given"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"content\[0\] is 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text is not a string"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is 'str'"),
    ],
)
def test_bad_messages(messages: list[Any], message: str):
    with pytest.raises(BadRequest, match=message):
        ChatTemplate("{{ messages[0].content }}").render(messages)


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LIST_ONLY = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
EITHER = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endif %}{% endfor %}"


def test_content_in_parts_follows_what_the_template_reads():
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", PARTS) == "one\ntwo"
    assert render("{% for m in messages %}{{ m.content|tojson }}{% endfor %}", PARTS) == '"one\\ntwo"'
    assert render(EITHER, PARTS) == "one;two;"
    assert render(EITHER, "x") == "x"
    assert render(LIST_ONLY, PARTS) == "one;two;"
    assert render(LIST_ONLY, "x") == "x;"


def test_tool_arguments_as_text_become_objects_and_messages_stay_untouched():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = json.dumps(messages)
    source = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}"
    assert ChatTemplate(source).render(messages) == "1"
    assert json.dumps(messages) == before


def test_reasoning_and_calls_in_the_form_a_template_knows(shared_data: Path):
    def template(name: str) -> ChatTemplate:
        return ChatTemplate((shared_data / "templates" / f"{name}.jinja").read_text(encoding="utf-8"), "<s>", "</s>")

    asked = {"role": "user", "content": "17 * 3?"}
    thought = {"role": "assistant", "reasoning_content": "17 and 17 and 17", "content": "51"}
    ministral = template("mistralai-Ministral-3-14B-Reasoning-2512").render([asked, thought, asked])
    assert "[THINK]17 and 17 and 17[/THINK]51" in ministral
    solar = template("upstage-Solar-Open-100B").render([asked, thought], add_generation_prompt=False)
    assert "<|think|>17 and 17 and 17<|end|>" in solar
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    distilled = template("deepseek-ai-DeepSeek-R1-Distill-Llama-8B")
    assert distilled.needs_null_content and distilled.needs_text_arguments
    assert "get_weather\n```json\n{" in distilled.render([asked, called])
    fire = template("fireworks-ai-llama-3-firefunction-v2").render([asked], tools=TOOLS)
    assert '"name": "get_weather"' in fire and "Today is 2" in fire
