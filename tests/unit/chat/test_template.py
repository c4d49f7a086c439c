from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.chat.template import ChatTemplate
from quire.chat.tokenizer import Tokenizer
from quire.observe.errors import BadModelFile, BadRequest
from quire.weights.gguf import GGUF
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
# Where jinja2's markup type makes transformers escape quotes as HTML; there is no markup here, and JSON stays JSON.
DIFFERENT = {("meetkai-functionary-medium-v3.1.jinja", "tools")}


def reference(source: str, messages: list[dict[str, Any]], tools: Any, generate: bool) -> str | None:
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
        )
    except Exception:
        return None
    return rendered[0][0]


def ours(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, generate: bool) -> str | None:
    try:
        return template.render(messages, tools=tools, add_generation_prompt=generate)
    except BadRequest:
        return None


def compare(name: str, source: str) -> int:
    template = ChatTemplate(source, "<s>", "</s>")
    same = 0
    for kind, messages in CONVERSATIONS.items():
        for generate in (True, False):
            tools = TOOLS if kind == "tools" else None
            if (name, kind) in DIFFERENT:
                continue
            expected = reference(source, messages, tools, generate)
            assert ours(template, messages, tools, generate) == expected, (name, kind, generate)
            same += expected is not None
    return same


def test_public_templates_render_as_transformers_does(shared_data: Path):
    files = sorted((shared_data / "templates").glob("*.jinja"))
    assert len(files) > 50
    assert sum(compare(file.name, file.read_text(encoding="utf-8")) for file in files) > 400


def test_the_default_model(model_path: Path):
    with GGUF.open(model_path) as file:
        template = ChatTemplate.from_gguf(file.metadata, Tokenizer.from_gguf(file.metadata))
    assert template is not None
    assert compare("default", template.source) == 8
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
