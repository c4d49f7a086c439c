"""`quire run` without a model: where prompts come from, what goes where, and the commands of a conversation."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from quire.cli import run
from quire.cli.app import app
from quire.cli.terminal import conversation
from quire.engine.types import EngineInfo, Receipt, Stats
from quire.llm import Completion, Output
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams

INFO = EngineInfo(
    model="parrot",
    architecture="parrot",
    vocab_size=100,
    context=64,
    max_seqs=1,
    max_batch_tokens=8,
    pages=4,
    page_size=16,
    backend="none",
    weight_bytes=0,
    kv_bytes=0,
    decisions=["context: 64 tokens (asked for)"],
)


class Stream:
    """Yields pieces, then perhaps an interrupt or an error."""

    def __init__(self, pieces: list[str], end: BaseException | None, finish: str | None, prompt: int = 10):
        receipt = Receipt(
            prompt_tokens=prompt,
            cached_tokens=4,
            output_tokens=len(pieces),
            prefill_seconds=0.5,
            decode_seconds=2.0,
            queue_seconds=0.25,
            seed=3,
        )
        self.output: Output | None = None
        self._pieces, self._end = pieces, end
        self._final = Completion(finish_reason=finish, receipt=receipt)
        self._prompt = [1] * prompt
        self.closed = False

    def __iter__(self) -> Iterator[str]:
        self.output = Output(None, self._prompt, [self._final])
        for piece in self._pieces:
            self._final.text += piece
            self._final.tokens.append(1)
            yield piece
        if self._end is not None:
            raise self._end

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


class Parrot:
    """An LLM that remembers what it was asked and says what it is told to."""

    def __init__(self, *pieces: str):
        self.pieces = list(pieces) or ["Hello", " you"]
        self.end: BaseException | None = None
        self.finish: str | None = "stop"
        self.constraints: list[Any] = []
        self.asked: list[Any] = []
        self.params: list[SamplingParams] = []
        self.closed = False
        self.info = INFO
        self.chats = True

    def stream_chat(
        self, messages: Any, params: SamplingParams, constraint: Any = None, reasoning: bool = False
    ) -> Stream:
        assert reasoning  # a person may see it
        self.constraints.append(constraint)
        self.asked.append([dict(m) for m in messages])
        self.params.append(params)
        return Stream(list(self.pieces), self.end, self.finish)

    def stream(self, prompt: str, params: SamplingParams, constraint: Any = None) -> Stream:
        self.constraints.append(constraint)
        self.asked.append(prompt)
        self.params.append(params)
        return Stream(list(self.pieces), self.end, self.finish)

    def stats(self) -> Stats:
        return Stats(steps=5, prompt_tokens=20, computed_prompt_tokens=8, output_tokens=2, pages_total=4)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Parrot:
    made = Parrot()
    monkeypatch.setattr(run, "load", lambda model, **options: made)
    return made


def invoke(*args: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, ["run", *args], input=stdin)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# One answer.


def test_one_prompt_one_answer(parrot: Parrot) -> None:
    done = invoke("m", "why", "not?")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Hello you\n", "")
    assert parrot.asked == [[user("why not?")]]
    assert parrot.closed
    (params,) = parrot.params
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.2, 0.9, 0, 1024)


def test_options_reach_the_parameters(parrot: Parrot) -> None:
    args = [
        "--temperature",
        "0",
        "--top-p",
        "0.5",
        "--top-k",
        "7",
        "--seed",
        "-1",
        "--max-tokens",
        "0",
        "--system",
        "Short.",
    ]
    assert invoke("m", "hi", *args).exit_code == 0
    (p,) = parrot.params
    assert (p.temperature, p.top_p, p.top_k, p.seed, p.max_tokens) == (0, 0.5, 7, None, None)
    assert parrot.asked == [[{"role": "system", "content": "Short."}, user("hi")]]


def test_standard_input_is_the_prompt_or_a_document_after_it(parrot: Parrot) -> None:
    assert invoke("m", stdin="from a pipe\n").stdout == "Hello you\n"
    assert invoke("m", "-", stdin="from a pipe\n").stdout == "Hello you\n"
    assert parrot.asked == [[user("from a pipe")]] * 2
    empty = invoke("m", stdin="  \n")
    assert (empty.exit_code, empty.stdout) == (1, "")
    assert "no prompt" in empty.stderr
    bad = invoke("m", stdin=b"ab\xff")
    assert bad.exit_code == 1
    assert "byte 2 is not UTF-8" in bad.stderr


@pytest.mark.parametrize("kind", ["pipe", "file", "null"])
def test_a_document_beside_a_prompt(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, b"the document\n")
    os.close(write)
    (tmp_path / "doc").write_text("the document\n")
    name: str | int = {"pipe": read, "file": str(tmp_path / "doc"), "null": os.devnull}[kind]
    if kind != "pipe":
        os.close(read)
    with open(name) as source:
        monkeypatch.setattr(sys, "stdin", source)
        assert run.ask(["sum", "up:"]) == ("sum up:" if kind == "null" else "sum up:\n\nthe document")


def test_a_pipe_that_nobody_closes_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(run, "PATIENCE", 0.05)
    closer = threading.Timer(0.3, os.close, [write])
    closer.start()
    with open(read) as source:
        monkeypatch.setattr(sys, "stdin", source)
        assert run.ask(["hi"]) == "hi"
    assert "waiting for standard input" in capsys.readouterr().err
    closer.join()


def test_raw_leaves_the_template_out(parrot: Parrot) -> None:
    assert invoke("m", "Once upon", "--raw").exit_code == 0
    assert parrot.asked == ["Once upon"]
    refused = invoke("m", "Once upon", "--raw", "--system", "x")
    assert refused.exit_code == 1
    assert "--raw" in refused.stderr


def test_a_model_without_a_template_continues_the_text_and_says_so(parrot: Parrot) -> None:
    parrot.chats = False
    told = invoke("m", "Once upon")
    assert told.exit_code == 0 and "no chat template" in told.stderr
    assert parrot.asked == ["Once upon"]
    refused = invoke("m", "Once upon", "--system", "x")
    assert refused.exit_code == 1 and "--system" in refused.stderr


def test_stats_and_cuts_go_to_stderr(parrot: Parrot) -> None:
    parrot.finish = "length"
    done = invoke("m", "hi", "--stats", "--max-tokens", "2")
    assert done.stdout == "Hello you\n"
    *lines, start = done.stderr.splitlines()
    if sys.platform == "linux":
        assert 0 < int(start.removeprefix("process start to first text: ").removesuffix(" ms")) < 86_400_000
    else:
        lines.append(start)
    assert lines == [
        "context: 64 tokens (asked for)",
        "[the answer was cut at 2 tokens; --max-tokens 0 lets it go on to the end of the context]",
        "prompt: 10 tokens, 4 of them cached; answer: 2 tokens; ended by length; seed 3",
        "first token: 750 ms (queue 250, prefill 500)",
        "prefill: 12.0 tokens/s",
        "decode: 0.5 tokens/s",
    ]
    parrot.pieces = ["x"] * 54
    assert "the context of 64 tokens is full" in invoke("m", "hi").stderr


def test_errors_are_one_line_and_close_the_model(parrot: Parrot) -> None:
    parrot.end = BadRequest("too long", cure="be brief")
    done = invoke("m", "hi")
    assert (done.exit_code, done.stdout) == (1, "Hello you\n")
    assert done.stderr == "error: too long: be brief\n"
    assert parrot.closed
    assert invoke("m", "hi", "--temperature", "-1").stderr.startswith("error: temperature is -1")
    assert invoke("m", "  ").exit_code == 1


def test_a_model_that_embeds_is_refused_with_the_verb_that_takes_it(parrot: Parrot) -> None:
    parrot.info, parrot.chats = structs.replace(INFO, task="embed"), False
    done = invoke("m", "hi")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == 'error: parrot does not write: it is made to embed texts: quire embed parrot "…"\n'
    assert parrot.closed and not parrot.asked


def test_what_is_no_text_is_named(parrot: Parrot) -> None:
    for args in (["caf\udce9"], ["hi", "--system", "caf\udce9"]):
        done = invoke("m", *args)
        assert done.exit_code == 1 and "is not UTF-8 at character 3" in done.stderr
    assert "--max-tokens is -1: it must be at least 1, or 0" in invoke("m", "hi", "--max-tokens", "-1").stderr
    assert not parrot.asked


def test_ctrl_c_ends_the_line_and_says_so_with_its_exit_code(parrot: Parrot) -> None:
    parrot.end = KeyboardInterrupt()
    done = invoke("m", "hi")
    assert (done.exit_code, done.stdout) == (130, "Hello you\n")
    assert parrot.closed


def test_a_prompt_in_the_models_place_is_explained() -> None:
    done = invoke("What is the capital of France?")
    assert done.exit_code == 1
    assert "the model comes first" in done.stderr


def test_an_answer_that_ends_its_own_line_gets_no_second_end(parrot: Parrot) -> None:
    parrot.pieces = ["a\n", "b\n"]
    assert invoke("m", "hi").stdout == "a\nb\n"
    parrot.pieces = []
    assert invoke("m", "hi").stdout == ""


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_model_cannot_steer_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Screen()
    monkeypatch.setattr(sys, "stdout", out)
    run.show(["a\x1b[2Jb\tc\nd\x07é✓"])
    assert out.getvalue() == "a\ufffd[2Jb\tc\nd\ufffdé✓\n"


def test_spinner_moves_on_a_terminal_only_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = Screen()
    monkeypatch.setattr(sys, "stderr", err)
    with run.Spinner("loading"):
        end = time.monotonic() + 20
        while "⠋ loading" not in err.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert "⠋ loading" in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with run.Spinner("loading"):
        pass
    assert plain.getvalue() == ""


# A conversation.


@pytest.fixture
def chat() -> conversation.Conversation:
    return conversation.Conversation(Parrot(), SamplingParams(max_tokens=9), system=None, raw=False, stats=False)


def lines(monkeypatch: pytest.MonkeyPatch, *said: str | type[BaseException]) -> None:
    left = list(said)

    def fake(prompt: str = "") -> str:
        item = left.pop(0) if left else EOFError
        if isinstance(item, str):
            return item
        raise item

    monkeypatch.setattr("builtins.input", fake)
    monkeypatch.setattr(conversation, "_history", lambda: lambda: None)


def test_turns_add_up(chat: conversation.Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.line("hi")
    assert chat.line("   ")
    assert chat.line("and?")
    assert chat.llm.asked == [
        [user("hi")],
        [user("hi"), {"role": "assistant", "content": "Hello you"}, user("and?")],
    ]
    chat.line("/system Be kind.")
    chat.line("/reset")
    chat.line("again")
    assert chat.llm.asked[-1] == [{"role": "system", "content": "Be kind."}, user("again")]
    chat.line("/system none")
    assert chat.messages[0]["role"] == "user"
    assert capsys.readouterr().out == "Hello you\n" * 3


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    chat: conversation.Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.llm.end = KeyboardInterrupt()
    assert chat.line("hi")
    assert chat.turns == [user("hi"), {"role": "assistant", "content": "Hello you"}]
    out, err = capsys.readouterr()
    assert (out, err) == ("Hello you\n", "[stopped]\n")
    chat.llm.pieces = []
    assert chat.line("more")
    assert len(chat.turns) == 2  # stopped before the first token: as if it had not been asked


def test_a_conversation_that_no_longer_fits_is_refused_not_cut(
    chat: conversation.Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.line("hi")
    chat.llm.pieces = []
    chat.llm.end = BadRequest("the prompt has 99 tokens", code="context_length_exceeded")
    assert chat.line("more")
    assert len(chat.turns) == 2
    assert "/reset starts afresh" in capsys.readouterr().err


def test_set(chat: conversation.Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("/set temperature 0.5", "/set top_k 3", "/set seed 11", "/set max_tokens none"):
        assert chat.line(text)
    p = chat.params
    assert (p.temperature, p.top_k, p.seed, p.max_tokens) == (0.5, 3, 11, None)
    capsys.readouterr()
    for text in ("/set temperature hot", "/set temperature -1", "/set nothing 1", "/set temperature", "/set top_k 1.5"):
        assert chat.line(text)
        assert capsys.readouterr().err.startswith("error: "), text
    assert chat.params == p
    chat.line("/set")
    assert "temperature 0.5\n" in capsys.readouterr().out


def test_a_cut_answer_says_what_lifts_the_bound(
    chat: conversation.Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.llm.finish = "length"
    chat.line("/set max_tokens 7")
    chat.line("hi")
    assert "cut at 7 tokens; /set max_tokens none lets it go on" in capsys.readouterr().err


def test_save(chat: conversation.Conversation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat.line("/system Be kind.")
    chat.line("hi")
    chat.line(f"/save {tmp_path}/a b.json")
    saved = json.loads((tmp_path / "a b.json").read_text())
    assert saved["model"] == "parrot"
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["params"]["max_tokens"] == 9
    chat.line(f"/save {tmp_path}/a.md")
    assert "**assistant**\n\nHello you\n" in (tmp_path / "a.md").read_text()
    before = (tmp_path / "a.md").read_text()
    for bad, text in (("a.md", "exists already"), ("a.txt", "neither .json nor .md"), ("no/where.md", "No such file")):
        capsys.readouterr()
        assert chat.line(f"/save {tmp_path}/{bad}")
        assert text in capsys.readouterr().err
    assert (tmp_path / "a.md").read_text() == before
    chat.line("/save")
    assert "takes the name" in capsys.readouterr().err


def test_other_commands(chat: conversation.Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    chat.line("/help")
    out = capsys.readouterr().out
    for name in ("/reset", "/system", "/set", "/save", "/stats", "/multi", "/bye", "temperature 1.0"):
        assert name in out
    chat.line("/stats")
    assert "nothing was answered yet" in capsys.readouterr().err
    chat.line("hi")
    chat.line("/stats")
    err = capsys.readouterr().err
    assert "decode: 0.5 tokens/s" in err
    assert "8 of 20 prompt tokens computed" in err
    assert chat.line("/nonsense")
    assert "there is no command /nonsense" in capsys.readouterr().err
    assert not chat.line("/bye")


def test_the_loop(
    chat: conversation.Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, "hi", '"""one', "two", 'three"""', "/multi", "four", 'five"""', "/bye", "never")
    chat.loop()
    assert [asked[-1]["content"] for asked in chat.llm.asked] == ["hi", "one\ntwo\nthree", "four\nfive"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, EOFError])
def test_lines_that_are_given_up_are_not_sent(
    chat: conversation.Conversation,
    end: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines(monkeypatch, "/multi", "one", end, "hi", "/bye")
    chat.loop()
    assert [asked[-1]["content"] for asked in chat.llm.asked] == ["hi"]
    assert "[nothing was said]" in capsys.readouterr().err


def test_ctrl_c_twice_leaves_and_once_does_not(
    chat: conversation.Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "never")
    chat.loop()
    assert len(chat.llm.asked) == 1
    assert capsys.readouterr().err.count("Ctrl-C again") == 2
    lines(monkeypatch, EOFError, "never")
    chat.loop()
    assert len(chat.llm.asked) == 1


def test_raw_conversation_continues_each_line_alone(parrot: Parrot) -> None:
    t = conversation.Conversation(parrot, SamplingParams(), system=None, raw=True, stats=False)
    t.line("Once")
    t.line("Twice")
    assert parrot.asked == ["Once", "Twice"]
    assert t.turns == []


def test_history_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("readline", reason="needs readline")
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    conversation._history()()
    assert stat.S_IMODE((tmp_path / "home" / "history").stat().st_mode) == 0o600
