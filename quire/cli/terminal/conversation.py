"""The conversation of `quire run` on a terminal: lines in, answers out, commands that begin with a slash.

Ctrl-C stops an answer, never the program; what was said so far stays part of the conversation. A conversation that no
longer fits the context is refused with a hint, never cut. Earlier turns come from the prefix tree, so a long conversation
costs what its last turn costs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.cli.terminal.answer import decisions, numbers, report, say, show
from quire.config import VERSION, Environment
from quire.observe.errors import BadRequest, QuireError
from quire.runner.params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM, Completion

HISTORY_LINES = 1000
SETTABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
)

HELP = '''/help                this
/reset               forget the conversation
/system [TEXT]       show or set the system prompt; "/system none" takes it away
/set [NAME VALUE]    show or change how tokens are chosen; VALUE "none" lifts a limit
/save FILE           write the conversation to a .json or .md file that does not exist yet
/stats               numbers of the last answer and of the engine
/bye                 leave (so do Ctrl-D, and Ctrl-C twice)
"""                  begins and ends a text of several lines (/multi begins one too)
Ctrl-C               stops the answer'''


class Conversation:
    """One conversation."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, raw: bool, stats: bool):
        self.llm = llm
        self.params = params
        self.system = system
        self.raw = raw
        self.stats = stats
        self.turns: list[dict[str, str]] = []
        self.last: Completion | None = None
        self._commands: dict[str, Callable[[str], bool | None]] = {
            "help": self._help,
            "?": self._help,
            "reset": self._reset,
            "system": self._system,
            "set": self._set,
            "save": self._save,
            "stats": self._stats,
            "multi": self._multi,
            "bye": lambda _: False,
            "exit": lambda _: False,
            "quit": lambda _: False,
        }

    def loop(self) -> None:
        """Take turns until the user leaves."""
        history = _history()
        say(f"{self.llm.info.model} · quire {VERSION} · /help tells what there is")
        interrupted = False
        try:
            while True:
                try:
                    text = _lines(">>> ")
                except EOFError:
                    print()
                    return
                except KeyboardInterrupt:
                    print()
                    if interrupted:
                        return
                    interrupted = True
                    say("(Ctrl-C again, or /bye, to leave)")
                    continue
                interrupted = False
                if not self.line(text):
                    return
        finally:
            history()

    def line(self, text: str) -> bool:
        """One thing the user said. False: they want to leave. Errors are told, and nothing is lost."""
        try:
            if text.startswith("/"):
                name, _, rest = text[1:].partition(" ")
                act = self._commands.get(name.strip().lower())
                if act is None:
                    raise BadRequest(f"there is no command /{name}", cure="/help tells what there is")
                return act(rest.strip()) is not False
            if text.strip():
                self.say(text)
        except QuireError as e:
            say(f"error: {e.message}{f': {e.cure}' if e.cure else ''}")
        except OSError as e:
            say(f"error: {e.filename or 'it'} cannot be written: {e.strerror or e}")
        return True

    def say(self, text: str) -> None:
        """Ask, and show the answer."""
        if self.raw:
            stream = self.llm.stream(text, self.params)
        else:
            self.turns.append({"role": "user", "content": text})
            stream = self.llm.stream_chat(self.messages, self.params, reasoning=True)
        stopped = False
        try:
            with stream:
                show(stream)
        except KeyboardInterrupt:
            stopped = True
        except QuireError as e:
            if not self.raw:
                self.turns.pop()
            if e.code == "context_length_exceeded":
                raise BadRequest(
                    e.message, cure="/reset starts afresh, /save keeps what was said", code=e.code
                ) from None
            raise
        output = stream.output
        if output is None or not output.outputs[0].tokens:
            if not self.raw:
                self.turns.pop()  # stopped before anything was said
            say("[stopped]" if stopped else "[the model said nothing]")
            return
        self.last = output.outputs[0]
        if not self.raw:
            self.turns.append({"role": "assistant", "content": self.last.text})
        if stopped:
            say("[stopped]")
        else:
            report(output, self.llm.info, self.params, self.stats, lift="/set max_tokens none")

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as the template takes it."""
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return first + self.turns

    # Commands. False leaves.

    def _help(self, _: str) -> None:
        print(HELP)
        print("now:", ", ".join(f"{name} {getattr(self.params, name)}" for name in SETTABLE[:3] + SETTABLE[-2:]))

    def _reset(self, _: str) -> None:
        self.turns.clear()
        say("the conversation is forgotten" + ("; the system prompt stays" if self.system is not None else ""))

    def _system(self, text: str) -> None:
        if not text:
            say(self.system if self.system is not None else "there is no system prompt")
        elif self.raw:
            raise BadRequest("a system prompt needs the chat template, which --raw leaves out")
        else:
            self.system = None if text == "none" else text

    def _set(self, text: str) -> None:
        if not text:
            for name in SETTABLE:
                print(f"{name} {getattr(self.params, name)}")
            return
        name, _, value = text.partition(" ")
        if name not in SETTABLE:
            raise BadRequest(f"{name} cannot be set", cure=f"these can: {', '.join(SETTABLE)}")
        if not value.strip():
            raise BadRequest(f"/set {name} takes a value as well", cure=f"it is {getattr(self.params, name)} now")
        kind = next(f.type for f in msgspec.structs.fields(SamplingParams) if f.name == name)
        try:
            value = msgspec.convert(None if value.strip() == "none" else value.strip(), kind, strict=False)
        except msgspec.ValidationError as e:
            raise BadRequest(f"{name} cannot be {value.strip()!r}: {e}") from None
        self.params = msgspec.structs.replace(self.params, **{name: value}).validate()

    def _save(self, name: str) -> None:
        if not name:
            raise BadRequest("/save takes the name of a file", cure="one that ends in .json or .md")
        path = Path(name).expanduser()
        if path.suffix == ".json":
            whole = {"model": self.llm.info.model, "params": self.params, "messages": self.messages}
            data = msgspec.json.format(msgspec.json.encode(whole), indent=2)
        elif path.suffix == ".md":
            parts = [f"**{m['role']}**\n\n{m['content']}\n" for m in self.messages]
            data = "\n".join([f"# Conversation with {self.llm.info.model}\n", *parts]).encode()
        else:
            raise BadRequest(f"{path} ends in neither .json nor .md: the ending says which to write")
        try:
            with open(path, "xb") as f:
                f.write(data)
        except FileExistsError:
            raise BadRequest(f"{path} exists already", cure="nothing was written; choose another name") from None
        say(f"{len(self.turns)} messages written to {path}")

    def _stats(self, _: str) -> None:
        if self.last is None:
            say("nothing was answered yet")
            decisions(self.llm.info)
            return
        for line in numbers(self.last):
            say(line)
        s = self.llm.stats()
        say(
            f"engine: {s.steps} steps, {s.computed_prompt_tokens} of {s.prompt_tokens} prompt tokens computed, "
            f"{s.output_tokens} tokens answered, {s.pages_total} pages"
        )

    def _multi(self, _: str) -> None:
        try:
            text = _until_quotes("")
        except (KeyboardInterrupt, EOFError):
            print()
            say("[nothing was said]")
            return
        if text.strip():
            self.say(text)


def _lines(prompt: str) -> str:
    """What the user says: a line, or everything between triple quotes."""
    line = input(prompt)
    if line.lstrip().startswith('"""'):
        return _until_quotes(line.lstrip()[3:])
    return line


def _until_quotes(text: str) -> str:
    while '"""' not in text:
        text += ("\n" if text else "") + input("... ")
    return text.partition('"""')[0].strip("\n")


def _history() -> Callable[[], None]:
    """Line editing and remembered lines. Returns what writes them back."""
    try:
        import readline
    except ImportError:
        return lambda: None
    path = Environment.read().home / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)

    def save() -> None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # what one asks is nobody else's business
            readline.write_history_file(path)

    return save
