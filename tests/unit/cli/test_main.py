"""The command as a user meets it: help, exit codes, errors in one line, and nothing imported that is not needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import __version__
from quire.cli import app, main
from quire.cli.arguments import other_engines
from quire.observe.errors import NotFound

ROOT = Path(__file__).resolve().parents[3]
OWN = ("pull", "list", "show", "rm", "doctor", "version")


def quire(*args: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`quire` in a process of its own, with a private store."""
    env = (
        {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "HF_"))} | {"QUIRE_HOME": str(home)} | more
    )
    command = [sys.executable, "-m", "quire.cli.main", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_verb(tmp_path: Path, flag: str):
    done = quire(flag, home=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    for verb, line in app.VERBS.items():
        assert f"  {verb} " in done.stdout and line in done.stdout


def test_help_imports_no_verb_and_nothing_heavy():
    code = (
        "import sys\nfrom quire.cli import app\n"
        "try: app.app(['--help'])\nexcept SystemExit: pass\n"
        "heavy = ('numpy', 'rich', 'msgspec', 'fastapi', 'pydantic', 'tokenizers', 'urllib.request', 'ssl')\n"
        "print([m for m in sys.modules if m in heavy or m.startswith('quire.') and m not in "
        "('quire.cli', 'quire.cli.app', 'quire.cli.verbs', 'quire.config', 'quire.machine')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("verb", OWN)
def test_each_verb_has_help_that_agrees_with_the_table(verb: str):
    result = CliRunner().invoke(app.app, [verb, "-h"])
    assert result.exit_code == 0 and f"quire {verb}".split()[1] in result.output
    command = app.load(verb)
    assert command.name == verb and (command.help or "").strip()


def test_every_file_of_the_folder_is_a_verb_or_known():
    files = {p.stem for p in (ROOT / "quire" / "cli").glob("*.py")} - {"__init__", "main", "ui"}
    known = set(app.VERBS)
    verbs = {f for f in files if "def command(" in (ROOT / "quire" / "cli" / f"{f}.py").read_text()}
    assert verbs <= known, f"a verb without a row in VERBS: {verbs - known}"
    assert set(OWN) <= verbs


def test_no_arguments_is_help(tmp_path: Path):
    done = quire(home=tmp_path)
    assert "Usage: quire" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["lst"], "Did you mean 'list'?"),
        (["zzzz"], "There are run, serve"),
        (["pull"], "Missing argument"),
        (["list", "--nonsense"], "--nonsense"),
        (["doctor", "--port", "0"], "port"),
    ],
)
def test_wrong_usage_is_exit_2(tmp_path: Path, args: list[str], says: str):
    done = quire(*args, home=tmp_path)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run --temp 1 hi", "--temp: here it is --temperature."),
        ("serve -ngl 99", "--device cuda or --device cpu."),
        ("serve --max_model_len 4096", "here it is --context."),
        ("serve x --embeddings", "--task embed is for one that shall do nothing else."),
        ("serve x --pooling last", "how rows become an embedding is read from the model's files."),
        ("run -m model.gguf", "the model comes first, without a flag."),
        ("bench latency --input-len=4", "here it is --prompt-tokens."),
        ("show --debug x", "quire --debug VERB …."),
        ("serve -n 5", "No such option: -n"),  # it has no --max-tokens that could be meant
        ("run -x -p", "No such option: -x"),  # and not what is said of -p
        ("ls", "Did you mean 'list'?"),
    ],
)
def test_what_other_engines_call_it_is_pointed_out(words: str, says: str):
    result = CliRunner().invoke(app.app, words.split())
    assert result.exit_code == 2 and result.output.splitlines()[-1].endswith(says), result.output


def test_what_is_pointed_out_is_there():
    def options(command: object) -> set[str]:
        own = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        return own.union(*(options(c) for c in getattr(command, "commands", {}).values()))

    known = {verb: options(app.load(verb)) for verb in app.VERBS}
    everywhere = set[str]().union(*known.values())
    assert set(other_engines.OPTIONS) <= everywhere and set(other_engines.VERBS.values()) <= set(app.VERBS)
    for theirs in other_engines.OPTIONS.values():
        assert all(word.startswith("-") for word in theirs.split())
    assert not set(other_engines.VERBS) & set(app.VERBS)


def test_an_error_is_one_line_with_its_cure(tmp_path: Path):
    done = quire("show", "smollm2", home=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "error: smollm2:135m is not on this machine: `quire pull smollm2:135m` fetches it\n"


def test_debug_shows_where(tmp_path: Path):
    done = quire("--debug", "show", "smollm2", home=tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr and "NotFound" in done.stderr


def test_an_unforeseen_failure_is_said_without_a_traceback(monkeypatch: pytest.MonkeyPatch):
    def broken(verb: str) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(app, "load", broken)
    result = CliRunner().invoke(app.app, ["list"])
    assert result.exit_code == 1 and "internal error, ZeroDivisionError: oh" in result.output
    assert "Traceback" not in result.output


def test_control_characters_in_an_error_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch):
    def hostile(verb: str) -> None:
        raise NotFound("a\x1b[2Jb\nc")

    monkeypatch.setattr(app, "load", hostile)
    result = CliRunner().invoke(app.app, ["list"])
    assert "\x1b[2J" not in result.output and "a\\x1b[2Jb c" in result.output


def test_interrupt_is_130_and_quiet(tmp_path: Path):
    code = (
        "import signal, time\nfrom quire.cli import app\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs are born ignoring it
        "def load(verb):\n    print('up', flush=True); time.sleep(30)\n"
        "app.load = load\napp.app(['list'])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "up\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130 and err == ""


def test_a_reader_that_leaves_is_no_error(tmp_path: Path):
    script = f"exec 2>&1; QUIRE_HOME={tmp_path} {sys.executable} -m quire.cli.main list --known --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("0", "141")  # 0: it had written all before the reader left


def test_a_pipe_that_breaks_while_writing_is_141(tmp_path: Path):
    code = (
        "import sys\nfrom quire.cli import app\n"
        "def load(verb):\n    while True: sys.stdout.write('x' * 100_000)\n"
        "app.load = load\napp.app(['list'])"
    )
    script = f'{sys.executable} -c "$CODE" | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ | {"CODE": code}
    )
    assert done.stdout.strip() == "141" and done.stderr == ""


def test_version(tmp_path: Path):
    assert quire("--version", home=tmp_path).stdout == f"quire {__version__}\n"
    done = quire("version", home=tmp_path)
    assert done.returncode == 0 and __version__ in done.stdout and "kernels" in done.stdout


def test_ctrl_c_while_modules_are_imported_is_quiet_too(monkeypatch: pytest.MonkeyPatch):
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "do", interrupted)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 130
    # And there is little that comes before: what is imported there, nobody guards.
    code = "import sys, quire.cli.main\nprint([m for m in ('typing', 're', 'pathlib', 'quire.config') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
