"""What an agent needs to talk to a server, as data: variables, arguments and files. Shared by `quire launch`, which applies the settings,
`--print`, which shows them, and docs/agents.md, which is made of what `--print` shows.

Settings never touch a user's own configuration: files go into a folder of Quire's own, and a variable tells the agent where that is.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

KEYLESS = "unused"  # what an agent that wants a key gets where the server asks for none
PATIENCE_MS = (
    3_600_000  # how long an agent may wait for an answer, or for its next piece: a CPU reads a long prompt for minutes
)
KEY = "$QUIRE_API_KEY"  # stands for the server's key in what is printed


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a server, as agents are pointed at it."""

    url: str  # of the server, without /v1
    model: str  # as the server calls it
    context: int  # tokens of prompt and answer together
    key: str | None  # what the server asks for
    folder: Path  # for files that the agent needs
    lean: bool = False  # only the tools that work on code: shorter instructions, which a CPU reads sooner

    @property
    def openai(self) -> str:
        """The base of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def answer(self) -> int:
        """Tokens that an answer may have: agents ask for many thousands, which a small context cannot give beside their prompt."""
        return min(8192, self.context // 4)

    @property
    def secret(self) -> str:
        """The key that is sent, which some agents insist on."""
        return self.key or KEYLESS


@dataclass(frozen=True, slots=True)
class Settings:
    """How one agent is started."""

    arguments: tuple[str, ...] = ()  # in front of the user's own
    variables: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # variables that would point the agent elsewhere
    files: dict[str, str] = field(default_factory=dict)  # path inside the target's folder -> text


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent that is known here."""

    name: str  # as `quire launch` takes it
    title: str
    program: str  # the command
    install: str  # the command that installs it
    lean: bool  # whether its instructions can be made shorter
    prompt: int  # tokens that it sends before the user's first word, at least; they differ by tokenizer and version
    configure: Callable[[Target], Settings]


def as_shell(agent: Agent, target: Target, arguments: tuple[str, ...] = ()) -> str:
    """The settings as lines for a shell, to copy: they do what `quire launch` would. A key is never shown."""
    shown = replace(target, key=target.key and KEY)
    settings = agent.configure(shown)
    lines = []
    if settings.files:
        lines.append(f"mkdir -p {_quoted(str(target.folder))}")
    for name, text in settings.files.items():
        lines += [f"cat > {_quoted(str(target.folder / name))} <<'END'", text.rstrip("\n"), "END"]
    if settings.removed:
        lines.append(f"unset {' '.join(settings.removed)}")
    lines += [f"export {name}={_quoted(value)}" for name, value in settings.variables.items()]
    command = [agent.program, *settings.arguments, *arguments]
    lines.append(" ".join(map(_quoted, command)))
    return "\n".join(lines)


def _quoted(word: str) -> str:
    """A word for a shell; `$QUIRE_API_KEY` in it stays a variable."""
    if KEY not in word:
        return shlex.quote(word)
    return '"' + "".join(f"\\{c}" if c in '"\\`' else c for c in word) + '"'
