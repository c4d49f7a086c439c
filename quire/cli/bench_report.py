"""The output of `quire bench`: a short table for people, and a JSON record for programs.

Times are seconds in the record and milliseconds in the table. Nothing here measures.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.config import VERSION, available_cores
from quire.engine.measure import Round, Run, Summary, summarize
from quire.engine.types import EngineInfo
from quire.observe.errors import BadRequest

RECORD = 1  # the record's version: another number when a field changes its meaning
NAME_WIDTH, WIDTH = 22, 9
COLUMNS = ("mean", "p50", "p90", "p99", "min", "max", "n")


def latency(rounds: list[Round]) -> dict[str, Any]:
    """The figures of some rounds; a round counts once in a rate, a token or a stream once in a time."""
    return {
        "first_token_seconds": summarize(s for r in rounds for s in r.first),
        "output_token_seconds": summarize(g for r in rounds for g in r.gaps),
        "prefill_tokens_per_second": summarize(r.prefill for r in rounds),
        "decode_tokens_per_second": summarize(r.decode for r in rounds if r.decode is not None),
        "cached_prompt_tokens_per_round": rounds[0].cached if rounds else 0,
    }


def throughput(run: Run) -> dict[str, Any]:
    """The figures of a run, which may have been cut short: then rates are of what came until then."""
    seconds = run.ended - run.began
    done, output = run.done, run.output_tokens
    prompt = sum(t.prompt for t in run.traces.values() if t.times)  # computed, or it would have no token
    steps = run.after.steps - run.before.steps
    rows = sum(t.receipt.steps for t in done if t.receipt)

    def rate(count: int) -> float | None:
        return count / seconds if seconds > 0 else None

    return {
        "seconds": seconds,
        "requests": len(done),
        "prompt_tokens": prompt,
        "cached_prompt_tokens": run.after.prefix_hits - run.before.prefix_hits,
        "output_tokens": output,
        "requests_per_second": rate(len(done)),
        "output_tokens_per_second": rate(output),
        "total_tokens_per_second": rate(prompt + output),
        "preemptions": run.after.preemptions - run.before.preemptions,
        "steps": steps,
        # A request counts in every step that computed something of it; known once all have told theirs.
        "mean_batch": rows / steps if run.complete and steps else None,
        "first_token_seconds": summarize(t.times[0] - t.sent for t in run.traces.values() if t.times),
        "output_token_seconds": summarize(g for t in run.traces.values() for g in t.gaps),
        "request_seconds": summarize(t.times[-1] - t.sent for t in done),
    }


def record(kind: str, settings: dict[str, Any], info: EngineInfo, model: dict[str, Any], **body: Any) -> dict[str, Any]:
    """Everything that somebody needs to judge the figures, or to measure them again."""
    return {
        "record": RECORD,
        "benchmark": kind,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"quire": VERSION, "python": platform.python_version()},
        "model": model,
        "engine": {
            "backend": info.backend,
            "context": info.context,
            "max_seqs": info.max_seqs,
            "max_batch_tokens": info.max_batch_tokens,
            "kv_bytes": info.kv_bytes,
            "weight_bytes": info.weight_bytes,
            "load_seconds": info.load_seconds,
            "decisions": info.decisions,
        },
        "settings": settings,
        **body,
        "peak_memory_bytes": peak_memory(),
    }


def machine() -> dict[str, Any]:
    """The machine that was measured on, without its name."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as the kernel tells it; for an ARM one a part number."""
    try:
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_memory() -> int:
    """Bytes that this process had resident at most, the mapped pages of the model file included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# ---- the table


def figure(value: float | None) -> str:
    """Three or four digits that mean something."""
    if value is None:
        return "-"
    return f"{value:.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def samples(rows: Iterable[tuple[str, Summary | None, bool]]) -> list[str]:
    """A header, and a row for each (name, sample, whether it is a time). Rates have no high percentiles to worry about."""
    lines = [" " * NAME_WIDTH + "".join(c.rjust(WIDTH) for c in COLUMNS)]
    for name, s, is_time in rows:
        if s is None:
            cells = ["-"] * (len(COLUMNS) - 1) + ["0"]
        elif is_time:
            cells = [figure(x * 1000) for x in (s.mean, s.p50, s.p90, s.p99, s.min, s.max)] + [str(s.n)]
        else:
            cells = [figure(s.mean), figure(s.p50), "-", "-", figure(s.min), figure(s.max), str(s.n)]
        lines.append(name.ljust(NAME_WIDTH) + "".join(c.rjust(WIDTH) for c in cells))
    return lines


def latency_table(figures: dict[str, Any]) -> list[str]:
    return samples(
        [
            ("first token, ms", figures["first_token_seconds"], True),
            ("per output token, ms", figures["output_token_seconds"], True),
            ("prefill, tokens/s", figures["prefill_tokens_per_second"], False),
            ("decode, tokens/s", figures["decode_tokens_per_second"], False),
        ]
    )


def throughput_table(figures: dict[str, Any]) -> list[str]:
    def one(name: str, value: float | None, more: str = "") -> str:
        return (name.ljust(NAME_WIDTH) + figure(value).rjust(WIDTH) + more).rstrip()

    f = figures
    return [
        one("requests/s", f["requests_per_second"], f"   {f['requests']} in {f['seconds']:.2f} s"),
        one("output tokens/s", f["output_tokens_per_second"], f"   {f['output_tokens']} tokens"),
        one(
            "total tokens/s",
            f["total_tokens_per_second"],
            f"   with {f['prompt_tokens']} of prompts, {f['cached_prompt_tokens']} of them cached",
        ),
        one(
            "mean batch", f["mean_batch"], f"   sequences in a step; {f['steps']} steps, {f['preemptions']} preemptions"
        ),
        "",
        *samples(
            [
                ("first token, ms", f["first_token_seconds"], True),
                ("per output token, ms", f["output_token_seconds"], True),
                ("whole request, ms", f["request_seconds"], True),
            ]
        ),
    ]


def footer(info: EngineInfo) -> str:
    mib = 1 << 20
    return (
        f"loaded in {info.load_seconds:.2f} s; peak memory {peak_memory() / mib:.0f} MiB "
        f"(weights {info.weight_bytes / mib:.0f}, KV pool {info.kv_bytes / mib:.0f})"
    )


# ---- the file


def check_target(target: str) -> None:
    """Refuse a place that cannot be written before anything is measured."""
    if target == "-":
        return
    path = Path(target)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise BadRequest(
            f"the record cannot be written to {target}", cure="name a file in a folder that is there", param="json"
        )


def write(target: str, body: dict[str, Any]) -> None:
    """The record as JSON, to a file or (`-`) to stdout."""
    import msgspec

    if target == "-":
        from quire.cli.terminal import ui

        ui.emit(body)
    else:
        Path(target).write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
