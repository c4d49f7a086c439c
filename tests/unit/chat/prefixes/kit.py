"""A tokenizer with a token for each byte, and chat templates that do unlike things with what they are given."""

from __future__ import annotations

from typing import Any

from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from tests.unit.chat.toys import byte_level

TOOLS_FIRST = """{%- if tools %}{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + '\\n# Tools' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '\\n# End<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
STARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content.startswith('/') %}!{% endif %}{{ m.content }}{% endfor %}"
)
COUNTS = "{% for m in messages %}[{{ m.role }} {{ m.content | length }}]{{ m.content }}{% endfor %}"


def tokenizer() -> Tokenizer:
    """A token for each byte, and three control tokens."""
    return Tokenizer.from_gguf(byte_level())


def template(source: str = TOOLS_FIRST) -> ChatTemplate:
    """A compiled template."""
    return ChatTemplate(source)


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """A tool as templates are given it."""
    schema = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}
