"""A request as Claude Code 2.1 sends it, in the middle of a task: every field that it sets, with texts of our own."""

from __future__ import annotations

from typing import Any

BETAS = [
    "claude-code-20250219",
    "interleaved-thinking-2025-05-14",
    "context-management-2025-06-27",
    "prompt-caching-scope-2026-01-05",
    "effort-2025-11-24",
]
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": ",".join(BETAS),
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.34 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}
CACHED = {"type": "ephemeral"}


def tool(name: str, description: str, *needed: str, **optional: str) -> dict[str, Any]:
    """A tool whose parameters, all of them needed but the optional ones, are described by their names or types."""
    properties: dict[str, Any] = {one: {"type": "string", "description": f"The {one}"} for one in needed}
    properties |= {one: {"type": kind} for one, kind in optional.items()}
    return {
        "name": name,
        "description": description,
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": properties,
            "required": list(needed),
            "additionalProperties": False,
        },
        "eager_input_streaming": True,
    }


TOOLS: list[dict[str, Any]] = [
    tool("Bash", "Runs a command in a shell.", "command", timeout="number", run_in_background="boolean"),
    tool("Read", "Reads a file.", "file_path", offset="integer", limit="integer"),
    tool("Edit", "Replaces text in a file.", "file_path", "old_string", "new_string", replace_all="boolean"),
    tool("Write", "Writes a file.", "file_path", "content"),
    tool("Glob", "Finds files by a pattern.", "pattern", path="string"),
    tool("Grep", "Finds lines by a pattern.", "pattern", path="string", multiline="boolean"),
    tool("Task", "Gives a task to another agent.", "description", "prompt", "subagent_type"),
    tool("WebFetch", "Reads a page.", "url", "prompt"),
    tool("AskUserQuestion", "Asks the user.", "question"),
    tool("mcp__notes__add", "Adds a note.", "text") | {"cache_control": CACHED},
]


def thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "c2lnbmF0dXJl"}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


BODY: dict[str, Any] = {
    "model": "set by the test",
    "max_tokens": 32_000,
    "stream": True,
    "temperature": 1,
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.34.ab1; cc_entrypoint=cli; cch=7d1f0;"),
        text("You are a coding agent that works in a terminal.", cache_control=CACHED),
        text("Use the tools. Be brief.\n\n# Environment\nPlatform: linux", cache_control=CACHED | {"ttl": "1h"}),
    ],
    "messages": [
        {
            "role": "user",
            "content": [text("<system-reminder>\nToday is Monday.\n</system-reminder>"), text("What is in a.txt?")],
        },
        {
            "role": "assistant",
            "content": [
                thinking("I should read the file."),
                text("I read it."),
                {
                    "type": "tool_use",
                    "id": "toolu_01A",
                    "name": "Read",
                    "input": {"file_path": "/src/a.txt"},
                    "caller": {"type": "direct"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01A", "content": [text("     1\tapples")]},
                text("<system-reminder>\nThe file is short.\n</system-reminder>"),
            ],
        },
        {
            "role": "assistant",
            "content": [
                thinking("And who uses it?"),
                {"type": "tool_use", "id": "toolu_01B", "name": "Grep", "input": {"pattern": "a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01B",
                    "content": "no such folder",
                    "is_error": True,
                    "cache_control": CACHED,
                }
            ],
        },
    ],
    "tools": TOOLS,
    "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"device_id":"d0","account_uuid":"","session_id":"5e"}'},
}
# What counting takes: all but what is of the answer.
COUNTED = {k: v for k, v in BODY.items() if k not in ("max_tokens", "stream", "temperature", "metadata")}
