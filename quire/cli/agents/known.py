"""The agents that `quire launch` knows, and the settings of each: its address, its model, a context to stay within, and patience."""

from __future__ import annotations

import json
from typing import Any

from quire.cli.agents.settings import PATIENCE_MS, Agent, Settings, Target


def _toml(value: str) -> str:
    return json.dumps(value)  # a basic string of TOML has JSON's escapes


def codex(to: Target) -> Settings:
    """Overrides of its config.toml, by `-c`; web search is a tool of OpenAI's servers that this one does not have."""
    provider = {
        "name": '"Quire"',
        "base_url": _toml(to.openai),
        "wire_api": '"responses"',
        "stream_idle_timeout_ms": str(PATIENCE_MS),
    }
    if to.key:
        provider["env_key"] = '"QUIRE_API_KEY"'
    features = {f"features.{name}": "false" for name in ("multi_agent", "goals")} if to.lean else {}
    table = ",".join(f"{name}={value}" for name, value in provider.items())
    options = {
        "model": _toml(to.model),
        "model_context_window": str(to.context),
        "model_provider": '"quire"',
        "model_providers.quire": f"{{{table}}}",
        "web_search": '"disabled"',
        **features,
    }
    arguments = tuple(word for name, value in options.items() for word in ("-c", f"{name}={value}"))
    return Settings(arguments, {"QUIRE_API_KEY": to.key} if to.key else {})


def claude(to: Target) -> Settings:
    """Variables. Each of its kinds of models is the one there is; the last three are what makes it wait longer than five minutes."""
    return Settings(
        arguments=("--tools=Bash,Edit,Read,Write",) if to.lean else (),
        variables={
            "ANTHROPIC_BASE_URL": to.url,
            "ANTHROPIC_AUTH_TOKEN": to.secret,
            "ANTHROPIC_MODEL": to.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": to.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.answer),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(PATIENCE_MS),
            "API_FORCE_IDLE_TIMEOUT": "0",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
        },
        removed=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"),
    )


def opencode(to: Target) -> Settings:
    """A configuration in a variable, which it lays over the user's own."""
    options: dict[str, Any] = {"baseURL": to.openai, "apiKey": to.secret, "timeout": False}
    limit = {"context": to.context, "output": to.answer}
    config: dict[str, Any] = {
        "model": f"quire/{to.model}",
        "small_model": f"quire/{to.model}",
        "provider": {
            "quire": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Quire",
                "options": options,
                "models": {to.model: {"name": to.model, "limit": limit}},
            }
        },
    }
    if to.lean:
        config["tools"] = dict.fromkeys(("task", "todowrite", "webfetch", "skill"), False)
    return Settings(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config, separators=(",", ":"))})


_QWEN_BESIDE = (
    *("agent", "skill", "todo_write", "web_fetch", "monitor", "task_stop", "send_message"),
    "tool_search",
)


def qwen(to: Target) -> Settings:
    """Variables for the address, and a settings file beside the user's own for what has no variable: patience and the context."""
    answer = {"timeout": PATIENCE_MS, "contextWindowSize": to.context, "samplingParams": {"max_tokens": to.answer}}
    settings: dict[str, Any] = {"model": {"generationConfig": answer}}
    if to.lean:
        settings["tools"] = {"exclude": list(_QWEN_BESIDE)}
    return Settings(
        arguments=("--auth-type", "openai", "--model", to.model),
        variables={
            "OPENAI_BASE_URL": to.openai,
            "OPENAI_API_KEY": to.secret,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(to.folder / "settings.json"),
        },
        files={"settings.json": json.dumps(settings, indent=2) + "\n"},
    )


def aider(to: Target) -> Settings:
    """Flags, and a file that tells it the model's context, which it looks up elsewhere for models it knows."""
    name = f"openai/{to.model}"
    card = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": to.context - to.answer,
        "max_output_tokens": to.answer,
        "max_tokens": to.answer,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    flags = ("--model", name, "--openai-api-base", to.openai, "--timeout", str(PATIENCE_MS // 1000))
    file = str(to.folder / "models.json")
    return Settings(
        arguments=(*flags, "--model-metadata-file", file, "--no-show-model-warnings"),
        variables={"OPENAI_API_KEY": to.secret},
        files={"models.json": json.dumps({name: card}, indent=2) + "\n"},
    )


def llm(to: Target) -> Settings:
    """A folder of its own, with the model and with its log of conversations."""
    models = [
        "- model_id: quire",
        f"  model_name: {json.dumps(to.model)}",  # JSON is YAML
        f"  api_base: {json.dumps(to.openai)}",
        "  api_key_name: quire",
        "  supports_tools: true",
        "  supports_schema: true",
    ]
    return Settings(
        variables={"LLM_USER_PATH": str(to.folder), "OPENAI_API_KEY": to.secret},
        files={"extra-openai-models.yaml": "\n".join(models) + "\n", "default_model.txt": "quire\n"},
    )


AGENTS: dict[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent("codex", "Codex", "codex", "npm install -g @openai/codex", True, 8_000, codex),
        Agent(
            "claude",
            "Claude Code",
            "claude",
            "npm install -g @anthropic-ai/claude-code",
            True,
            18_000,
            claude,
        ),
        Agent("opencode", "opencode", "opencode", "npm install -g opencode-ai", True, 7_000, opencode),
        Agent("qwen", "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", True, 17_000, qwen),
        Agent("aider", "aider", "aider", "pip install aider-chat", False, 700, aider),
        Agent("llm", "llm", "llm", "pip install llm", False, 0, llm),
    )
}
