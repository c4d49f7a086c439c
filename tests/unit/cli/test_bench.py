"""`quire bench` without a model: the table, the record, what is refused, and what an interrupt leaves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from typer.testing import CliRunner

from quire.cli import app, bench, bench_report
from quire.cli.arguments import engine_options
from quire.cli.pull import supported
from quire.config import EngineConfig, Environment
from quire.engine.construction import build
from quire.engine.engine import Engine
from quire.engine.measure import summarize
from quire.engine.types import EngineInfo
from quire.runner.plan import Plan
from tests.unit.engine.fake_engine import CountingRunner, make
from tests.unit.engine.fake_engine import build as counting

PAGES = 512


class Lab:
    """Stands for build_engine: engines that count, and what they were asked for."""

    def __init__(self) -> None:
        self.configs: list[EngineConfig] = []
        self.runner = CountingRunner()
        self.interrupt_at = 0  # the step that Ctrl-C meets

    def build(self, config: EngineConfig, env: Environment) -> tuple[Engine, EngineInfo]:
        self.configs.append(config)
        _, info = counting(config, env)
        lab = self

        class Runner(CountingRunner):
            def forward(self, plan: Plan) -> Any:
                if lab.interrupt_at and plan.step + 1 == lab.interrupt_at:
                    raise KeyboardInterrupt
                return super().forward(plan)

        self.runner = Runner()
        engine = make(config, self.runner, pages=PAGES, context=info.context)
        # Below the ids that make the counting runner fail.
        facts: dict[str, Any] = {"vocab_size": 600}
        facts |= {"kv_bytes": PAGES << 20, "decisions": ["threads: as many as fingers"], "load_seconds": 0.25}
        return engine, msgspec.structs.replace(info, **facts)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab()
    monkeypatch.setattr(build, "build_engine", made.build)
    return made


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "counter.gguf"
    path.write_bytes(b"GGUF, or so it says")
    return str(path)


def quire(*args: str) -> Result:
    return CliRunner().invoke(app.app, ["bench", *args])


SMALL = ("--prompt-tokens", "20", "--output-tokens", "5")


# ---- the table


def test_the_latency_table(lab: Lab, model: str) -> None:
    done = quire("latency", model, *SMALL, "--rounds", "3", "--batch", "2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "counter.gguf, counter"
    assert lines[1] == "latency: prompt 20, output 5, depth 0, batch 2; 3 rounds after 1 of warmup, greedy"
    assert lines[3].split() == ["mean", "p50", "p90", "p99", "min", "max", "n"]
    rows = {line[:22].strip(): line[22:].split() for line in lines[4:8]}
    assert list(rows) == ["first token, ms", "per output token, ms", "prefill, tokens/s", "decode, tokens/s"]
    assert [r[-1] for r in rows.values()] == ["6", "24", "3", "3"]  # streams, gaps, rounds, rounds
    assert rows["prefill, tokens/s"][2:4] == ["-", "-"]
    assert lines[8].startswith("loaded in 0.25 s; peak memory ") and "KV pool 512" in lines[8]
    assert len({len(line) for line in lines[3:8]}) == 1 and "\x1b" not in done.output
    assert done.stderr == ""


def test_the_throughput_table(lab: Lab, model: str) -> None:
    done = quire("throughput", model, *SMALL, "--requests", "7", "--concurrency", "3")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[1] == "throughput: 7 requests, 3 at a time; prompt 20, output 5; greedy, 1 of warmup"
    assert [line[:22].strip() for line in lines[3:7]] == [
        "requests/s",
        "output tokens/s",
        "total tokens/s",
        "mean batch",
    ]
    # Three at a time, then three, then one: five steps each.
    assert lines[6].split()[2] == "2.33" and "15 steps, 0 preemptions" in lines[6]
    assert "7 in " in lines[3] and "35 tokens" in lines[4] and "with 140 of prompts, 0 of them cached" in lines[5]
    assert lines[9].startswith("first token, ms") and lines[9].endswith(" 7")
    assert lines[10].startswith("per output token, ms") and lines[10].endswith(" 28")
    assert lines[11].startswith("whole request, ms")


def test_verbose_says_what_was_decided_on_stderr(lab: Lab, model: str) -> None:
    done = quire("latency", model, *SMALL, "--rounds", "1", "-v")
    assert done.stderr == "threads: as many as fingers\n" and "fingers" not in done.stdout


def test_a_single_output_token_has_no_decode_row(lab: Lab, model: str) -> None:
    done = quire("latency", model, "--prompt-tokens", "20", "--output-tokens", "1", "--rounds", "2")
    assert done.exit_code == 0
    assert [line.split()[-2:] for line in done.stdout.splitlines() if line.startswith("decode")] == [["-", "0"]]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0.00"), (3.14159, "3.14"), (99.5, "99.50"), (123.45, "123.5"), (12345.6, "12346")]
)  # fmt: skip
def test_figures_have_the_digits_that_mean_something(value: float | None, text: str) -> None:
    assert bench_report.figure(value) == text


# ---- what is measured


def test_warmup_is_not_counted_and_no_round_is_dropped(lab: Lab, model: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    for warmup in ("0", "2"):
        quire("latency", model, *SMALL, "--rounds", "3", "--warmup", warmup, "--json", str(target))
        found = json.loads(target.read_text())["results"]
        assert found["first_token_seconds"]["n"] == found["prefill_tokens_per_second"]["n"] == 3
        assert sum(len(p.opened) for p in lab.runner.plans) == 3 + int(warmup)


def test_every_request_is_greedy_and_unlike_the_others(lab: Lab, model: str) -> None:
    quire("throughput", model, *SMALL, "--requests", "5")
    opened = [o for p in lab.runner.plans for o in p.opened]
    assert len(opened) == 6  # and the warm-up
    assert all(o.sampling.temperature == 0 and o.sampling.ignore_eos for o in opened)
    assert len({tuple(o.tokens) for o in opened}) == 6


def test_the_warmup_leaves_the_shared_prefix_cold(lab: Lab, model: str, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    quire("throughput", model, *SMALL, "--requests", "4", "--concurrency", "1", "--shared-prefix", "64",
          "--json", str(target))  # fmt: skip
    found = json.loads(target.read_text())["results"]
    assert found["cached_prompt_tokens"] == 3 * 64 and found["prompt_tokens"] == 4 * 84
    assert found["mean_batch"] == 1.0 and found["steps"] == 4 * 5


def test_the_same_seed_is_the_same_work(lab: Lab, model: str) -> None:
    def prompts(seed: str) -> list[list[int]]:
        quire(
            "throughput", model, "--prompt-tokens", "8:40", "--output-tokens", "1:4", "--requests", "6", "--seed", seed
        )
        return [o.tokens for p in lab.runner.plans for o in p.opened]

    assert prompts("1") == prompts("1") != prompts("2")


# ---- the engine's options


def test_engine_options_reach_the_engine(lab: Lab, model: str) -> None:
    done = quire("throughput", model, *SMALL, "--requests", "1", "--threads", "3", "--max-seqs", "5", "--kv-memory",
                 "3MiB", "--context", "700", "--max-batch-tokens", "77", "--no-prefix-cache", "--isa", "avx2")  # fmt: skip
    assert done.exit_code == 0, done.output
    expected = EngineConfig(path=model, name="counter.gguf", threads=3, max_seqs=5, kv_memory=3 << 20, context=700,
                            max_batch_tokens=77, prefix_cache=False, isa="avx2", task="generate")  # fmt: skip
    assert lab.configs == [expected]
    quire("latency", model, *SMALL, "--rounds", "1", "--batch", "3")
    assert lab.configs[-1] == EngineConfig(path=model, name="counter.gguf", max_seqs=3, task="generate")


def test_every_setting_is_an_option_or_left_out_on_purpose() -> None:
    fields = {f.name for f in dataclasses.fields(EngineConfig)}
    assert fields >= engine_options.HIDDEN
    group = app.load("bench")
    options = {p.name for p in group.commands["throughput"].params}
    assert fields - engine_options.HIDDEN <= options


def test_a_shape_is_no_file(lab: Lab) -> None:
    done = quire("latency", "shape:llama-8b", *SMALL, "--rounds", "1", "--load-format", "dummy", "--json", "-")
    assert done.exit_code == 0, done.output
    assert (lab.configs[0].path, lab.configs[0].name) == ("shape:llama-8b", "shape:llama-8b")
    assert json.loads(done.stdout)["model"]["file"] is None


def test_a_size_that_is_none_is_refused(lab: Lab, model: str) -> None:
    done = quire("latency", model, "--kv-memory", "lots")
    assert done.exit_code == 2 and "--kv-memory: 'lots' is not a size" in done.stderr


def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    lab: Lab, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def here(store: Any, name: str) -> Path:
        seen.append(store.accepts)
        return Path(model)

    monkeypatch.setattr(bench, "here", here)
    assert quire("latency", model, *SMALL, "--rounds", "1").exit_code == 0
    assert seen == [supported]


# ---- the record


def test_the_record_tells_what_is_needed_to_repeat_it(lab: Lab, model: str, tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    done = quire("latency", model, *SMALL, "--rounds", "2", "--seed", "9", "--json", str(target))
    assert done.exit_code == 0 and "first token" in done.stdout
    record = json.loads(target.read_text())
    assert record["benchmark"] == "latency" and record["record"] == 1 and record["complete"] is True
    assert record["settings"] == {
        "prompt_tokens": 20, "output_tokens": 5, "depth": 0, "batch": 1, "rounds": 2, "warmup": 1, "seed": 9,
    }  # fmt: skip
    assert record["machine"].keys() == {"cpu", "architecture", "system", "cores", "memory_bytes"}
    assert record["machine"]["memory_bytes"] > 1 << 28 and record["machine"]["cpu"]
    assert record["versions"].keys() == {"quire", "python"}
    assert record["model"]["file"] == model and record["model"]["bytes"] == 19
    assert record["engine"]["decisions"] and record["engine"]["load_seconds"] == 0.25
    assert record["peak_memory_bytes"] > 1 << 20
    summary = record["results"]["output_token_seconds"]
    assert summary.keys() == {"n", "mean", "sd", "min", "p50", "p90", "p99", "max"}
    assert summary["n"] == 8 and 0 < summary["min"] <= summary["p50"] <= summary["p99"] <= summary["max"]


def test_a_record_on_stdout_is_alone_there(lab: Lab, model: str) -> None:
    done = quire("throughput", model, *SMALL, "--requests", "2", "--json", "-")
    record = json.loads(done.stdout)
    assert record["benchmark"] == "throughput" and record["settings"]["requests"] == 2
    assert record["results"]["requests"] == 2 and record["results"]["output_tokens"] == 10
    seconds = record["results"]["seconds"]
    assert record["results"]["output_tokens_per_second"] == pytest.approx(10 / seconds)
    assert record["results"]["total_tokens_per_second"] == pytest.approx(50 / seconds)


@pytest.mark.parametrize("where", ["missing/out.json", "."])
def test_a_record_that_cannot_be_written_is_told_first(lab: Lab, model: str, tmp_path: Path, where: str) -> None:
    done = quire("latency", model, "--json", str(tmp_path / where))
    assert done.exit_code == 1 and "cannot be written" in done.stderr and lab.configs == []


# ---- what is refused


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["latency", "--prompt-tokens", "4000", "--output-tokens", "100"],
         "prompt tokens 4000 + output tokens 100 is 4100 tokens: the context is 4096"),
        (["latency", "--depth", "4090", "--prompt-tokens", "4", "--output-tokens", "4"],
         "depth 4090 + prompt tokens 4 + output tokens 4 is 4098"),
        (["throughput", "--shared-prefix", "4000", "--prompt-tokens", "1:90", "--output-tokens", "7"],
         "shared prefix 4000 + prompt tokens 90 + output tokens 7 is 4097"),
        (["latency", "--batch", "9", "--prompt-tokens", "1000", "--output-tokens", "8"],
         "9 streams of 1008 tokens need 567 pages of 16: the KV pool has 512: --kv-memory 567MiB"),
        (["latency", "--batch", "513", "--max-batch-tokens", "512"], "--batch is 513: a step computes at most 512 tokens: --max-batch-tokens 513"),
        (["latency", "--depth", "16", "--no-prefix-cache"], "--depth needs the prefix cache"),
        (["throughput", "--dataset", "none.jsonl", "--shared-prefix", "3"], "a dataset has its own"),
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused_with_the_numbers(lab: Lab, model: str, args: list[str], says: str) -> None:
    done = quire(args[0], model, *args[1:])
    assert done.exit_code == 1 and says in done.stderr and done.stdout == ""
    assert lab.runner.plans == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["latency", "--rounds", "0"], "--rounds"),
        (["latency", "--output-tokens", "0"], "--output-tokens"),
        (["throughput", "--prompt-tokens", "x"], "'x' is not a number or MIN:MAX"),
        (["throughput", "--prompt-tokens", "9:3"], "MIN not over MAX"),
        (["throughput", "--output-tokens", "0:3"], "at least 1"),
        (["throughput", "--requests", "0"], "--requests"),
        (["kernels"], "What is measured comes first"),
        (["./model.gguf", "--rounds", "2"], "latency or throughput, then the model (./model.gguf)"),
        (["latncy"], "Did you mean 'latency'?"),
    ],
)
def test_wrong_usage_is_exit_2(lab: Lab, args: list[str], says: str) -> None:
    done = quire(*args)
    assert done.exit_code == 2 and says in done.stderr and lab.configs == []


def test_a_model_that_is_not_there(lab: Lab) -> None:
    done = quire("latency", "nowhere/at-all.gguf")
    assert done.exit_code == 1 and done.stderr.startswith("error: ") and lab.configs == []


# ---- interrupts


def test_an_interrupt_tells_the_rounds_so_far(lab: Lab, model: str, tmp_path: Path) -> None:
    lab.interrupt_at = 5 * 3 + 2  # one of warm-up, two rounds, and a bit
    target = tmp_path / "cut.json"
    done = quire("latency", model, *SMALL, "--json", str(target))
    assert done.exit_code == 130
    assert "interrupted: this is what was measured until then" in done.stderr
    assert "2 of 5 rounds after 1 of warmup" in done.stdout
    record = json.loads(target.read_text())
    assert record["complete"] is False and record["results"]["first_token_seconds"]["n"] == 2


def test_an_interrupt_tells_the_requests_so_far(lab: Lab, model: str) -> None:
    lab.interrupt_at = 5 + 5 * 2 + 3  # a warm-up, two requests, and two tokens of the third
    done = quire("throughput", model, *SMALL, "--requests", "8", "--concurrency", "1")
    assert done.exit_code == 130
    assert "2 of 8 requests" in done.stdout and "12 tokens" in done.stdout
    assert next(line for line in done.stdout.splitlines() if line.startswith("mean batch")).split()[2] == "-"


@pytest.mark.parametrize("mode", ["latency", "throughput"])
def test_an_interrupt_before_anything_was_measured(lab: Lab, model: str, tmp_path: Path, mode: str) -> None:
    lab.interrupt_at = 2
    target = tmp_path / "none.json"
    done = quire(mode, model, *SMALL, "--json", str(target))
    assert done.exit_code == 130 and done.stdout == "" and "nothing measured yet" in done.stderr
    assert not target.exists()


# ---- datasets


def dataset(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_a_dataset_of_token_ids(lab: Lab, model: str, tmp_path: Path) -> None:
    path = dataset(tmp_path, '{"prompt": [1, 2, 3], "output_tokens": 4}', "", '{"prompt": [9, 8], "source": "x"}')
    done = quire("throughput", model, "--dataset", path, "--output-tokens", "6", "--json", "-")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["settings"]["dataset"] == "prompts.jsonl" and record["settings"]["requests"] == 2
    assert record["results"]["prompt_tokens"] == 5 and record["results"]["output_tokens"] == 10
    only = quire("throughput", model, "--dataset", path, "--requests", "1", "--json", "-")
    assert json.loads(only.stdout)["results"]["output_tokens"] == 4


@pytest.mark.parametrize(
    ("lines", "args", "says"),
    [
        (['{"prompt": [1]}'], ["--requests", "2"], "the dataset has 1 prompts"),
        (['{"prompt": [1]}', '{"text": "x"}'], [], "prompt 2 of"),
        (["nonsense"], [], "cannot be read"),
        (['{"prompt": [1000]}'], [], "has token 1000: the vocabulary has 600"),
        (['{"prompt": []}'], [], "has no tokens"),
        (['{"prompt": [1], "output_tokens": 0}'], [], "asks for 0 output tokens"),
        (['{"prompt": [1, 2], "output_tokens": 4095}'], [], "has 2 tokens and asks for 4095, which is 4097"),
        ([""], [], "has no prompts"),
    ],
)
def test_a_bad_dataset_is_refused_whole(
    lab: Lab, model: str, tmp_path: Path, lines: list[str], args: list[str], says: str
) -> None:
    done = quire("throughput", model, "--dataset", dataset(tmp_path, *lines), *args)
    assert done.exit_code == 1 and says in done.stderr and lab.runner.plans == []


def test_a_dataset_that_is_not_there(lab: Lab, model: str, tmp_path: Path) -> None:
    done = quire("throughput", model, "--dataset", str(tmp_path / "no.jsonl"))
    assert done.exit_code == 1 and "cannot be read: No such file" in done.stderr


# ---- pieces


def test_the_progress_line_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with bench.Line() as line:
        line.show("round 1")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with bench.Line() as line:
        line.show("round 1")
    assert capsys.readouterr().err == "\r\x1b[Kround 1\r\x1b[K"


def test_samples_line_up() -> None:
    lines = bench_report.samples(
        [("a", summarize([0.001, 0.002]), True), ("b", None, True), ("c", summarize([5]), False)]
    )
    assert len({len(line) for line in lines}) == 1 and lines[1].split()[1] == "1.50"


def test_the_cpu_has_a_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A Fine One\n")
    assert bench_report.cpu_name(info) == "A Fine One"
    assert bench_report.cpu_name(tmp_path / "none")
