"""A model as Codex reads it: what `GET /v1/models` has under `models`, and a file of `model_catalog_json`.

Codex asks for it where its provider has an `auth` command, and takes its context window from it: see docs/clients.md. A model that it
knows nothing of gets a window of 272,000 tokens, and a conversation would be cut by an error instead of being compacted. Fields that it
needs are all here; a list without one of them would be refused as a whole.
"""

from __future__ import annotations

from typing import Any

# Codex puts these before every conversation, in place of its own for models that it does not know, which are some 20,000 characters.
INSTRUCTIONS = """\
You are a coding agent that works in the user's terminal, on the files of the current folder. Go on until the task is done.
- Look before you change: read the files that matter with shell commands (rg, sed -n, ls). Never guess what is in a file.
- Change files with shell commands, and only what the task needs. Keep to the style that is there.
- Run the tests or the program afterwards, and mend what fails.
- Do not delete files, rewrite git history or use the network unless you were asked to.
- At the end say in a few sentences what you did and what is left."""
LEVELS = ("low", "medium", "high")


def codex_model(card: dict[str, Any], place: int) -> dict[str, Any]:
    """A card of `/v1/models`, in Codex's shape. `place` is its place in the list: the first is offered first."""
    able = card["capabilities"]
    reasons = able["reasoning"]
    context = card["context_window"]
    return {
        "slug": card["id"],
        "display_name": card["display_name"],
        "description": f"Served by Quire with a context of {context} tokens",
        "default_reasoning_level": "medium" if reasons else None,
        "supported_reasoning_levels": [{"effort": one, "description": one} for one in LEVELS] if reasons else [],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "upgrade": None,
        "availability_nux": None,
        "base_instructions": INSTRUCTIONS,
        "model_messages": None,
        "supports_reasoning_summaries": reasons,
        "supports_reasoning_summary_parameter": reasons,
        "default_reasoning_summary": "none",
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,  # its other form is a tool with a grammar of its own, which no template has a place for
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": able["tools"],
        "supports_image_detail_original": False,
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": None,  # nine tenths of the window
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
        "supports_search_tool": False,
    }
