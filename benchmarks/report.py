"""`python -m benchmarks.report`: every bar by machine in docs/performance-cpu.md, and all figures in benchmarks/notes/cpu-results.md.

    python -m benchmarks.report [--results FOLDER] [--print]

Each figure comes from the latest record that has it (of one commit's, the one with the most rounds); above the tables stand
the machine, the versions and the commits they came from. Only what lies between the two markers in a page is replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.figures import OURS, Figure, spread
from benchmarks.record import RESULTS, ROOT, named, newest
from benchmarks.sections import NAMES
from benchmarks.table import judged, reached, share

BARS, TABLES = ROOT / "docs" / "performance-cpu.md", ROOT / "benchmarks" / "notes" / "cpu-results.md"
BEGIN, END = "<!-- results: begin (python -m benchmarks.report) -->", "<!-- results: end -->"
TITLES = {
    "decode": "One stream, decoding",
    "prefill": "One prompt",
    "ceiling": "Prefill of 512 tokens against the int8 ceiling",
    "streams": "Streams decoding together",
    "served": "Over HTTP: 32 requests, a shared prefix of 512 tokens, 128 out",
    "start": "Process start to the first token",
    "load": "Process start to the first token of a 1.1 GB model",
    "memory": "Resident memory",
    "context": "Cost of a token against context",
    "threads": "A second thread",
    "neighbour": "Beside a busy process",
    "onnx": "Beside onnxruntime-genai int4",
}


def table(figures: list[Figure], machine: str) -> list[str]:
    """One section's figures as a Markdown table. Columns that nothing fills are left out."""
    rows = [row(f, machine) for f in figures]
    names = ["file", "", "unit", OURS, "peer", "ratio", "target", "verdict", "floor", "n"]
    used = [i for i, name in enumerate(names) if name in ("file", "") or any(r[i] for r in rows)]
    lines = ["| " + " | ".join(names[i] for i in used) + " |", "|" + "---|" * len(used)]
    return lines + ["| " + " | ".join(r[i] for i in used) + " |" for r in rows]


def row(f: Figure, machine: str) -> list[str]:
    theirs, ratio = [], []
    for side in f.peers():
        setting, values = f.best(side)
        theirs.append(spread(values) + (f" `{setting}`" if setting else ""))
        ratio.append(spread(f.ratios(side), "x"))
    verdict = judged(f, machine)
    floor = f"{f.floor:.3g}, {share(f):.0%}" if f.floor is not None and f.ours else ""
    said = [verdict.target, verdict.word] if verdict else ["", ""]
    return [
        f"{f.shape} {f.format}", f.what, f.unit, spread(f.ours) if f.ours else "",
        ", ".join(theirs), ", ".join(ratio), *said, floor, str(f.rounds),
    ]  # fmt: skip


def peaks_table(head: dict[str, Any]) -> list[str]:
    """The machine's peaks, as measured in that record."""
    peaks = head.get("peaks")
    if not peaks:
        return []
    threads = [t for t in ("1", str(peaks["threads"])) if any(t in v for v in peaks["int8"].values())]
    threads = sorted(set(threads), key=int)
    lines = ["| at best | " + " | ".join(f"{t} thread{'s' if t != '1' else ''}" for t in threads) + " |"]
    lines.append("|" + "---|" * (1 + len(threads)))
    for kind, unit in (("int8", "GOP/s"), ("fp32", "GFLOP/s"), ("read", "GB/s")):
        for name, rates in peaks[kind].items():
            label = f"reading {name} MiB again and again" if kind == "read" else f"{kind} {name}"
            lines.append(f"| {label}, {unit} | " + " | ".join(f"{rates[t]:.1f}" for t in threads) + " |")
    return lines


def name_of(machine: dict[str, Any]) -> str:
    """What tells one machine's tables from another's."""
    kernels = f", {machine['kernels']} kernels" if "kernels" in machine else ""
    return f"{named(machine['cpu'])}, {machine['cores']} cores{kernels}"


def by_machine(paths: list[Path]) -> dict[str, list[Path]]:
    """Each machine's records, the machine with the newest one first."""
    machines: dict[str, list[Path]] = {}
    for path in sorted(paths, reverse=True):
        about = json.loads(path.read_text())["machine"]
        machines.setdefault(name_of(about), []).append(path)
    return {name: sorted(own) for name, own in machines.items()}


def bars(paths: list[Path]) -> str:
    """Every bar and what each machine reached: the table of the front page."""
    machines = by_machine(paths)
    columns = {name: of_bars(own) for name, own in machines.items()}
    rows = sorted({row for cells in columns.values() for row in cells}, key=order)
    if not rows:
        return "No record has been written yet."
    lines = ["| | bar | " + " | ".join(machines) + " |", "|" + "---|" * (2 + len(machines))]
    for section, shape, name, what in rows:
        bar = targets.find(section, what, shape, name)
        assert bar is not None
        cells = [columns[m].get((section, shape, name, what), ("", ""))[0] for m in machines]
        lines.append(f"| {section}, {shape} {name}, {what} | {targets.told(bar)} | " + " | ".join(cells) + " |")
    counts = []
    for cells in columns.values():
        short = sum(word == "short" for _, word in cells.values())
        counts.append(f"{len(cells) - short} of {len(cells)}")
    return "\n".join([*lines, "| met | | " + " | ".join(counts) + " |"])


def order(row: tuple[str, str, str, str]) -> tuple[Any, ...]:
    """As a run goes, and what is told by a number by that number."""
    section, *others = row
    return NAMES.index(section), *(re.sub(r"\d+", lambda number: number[0].zfill(6), part) for part in others)


def of_bars(paths: list[Path]) -> dict[tuple[str, str, str, str], tuple[str, str]]:
    """Of each bar that was measured on a machine, what was reached, as told, and the verdict's word."""
    found = {}
    for key, (figure, head) in newest(paths).items():
        if got := reached(figure):
            target, value = got
            word = targets.judge(target, value, figure.shape, head["machine"]["architecture"]).word
            text = f"{value:.2f}" + ("x" if target.of == "ratio" else "")
            found[key] = ({"short": f"**{text}**", "ok on x86": f"{text} (x86)"}.get(word, text), word)
    return found


def render(paths: list[Path]) -> str:
    """Each machine's tables, the machine with the newest record first."""
    machines = by_machine(paths)
    parts = [of_machine(own) for own in machines.values()]
    if len(parts) < 2:
        return parts[0] if parts else "No record has been written yet."
    return "\n\n".join(
        f"### {name}\n\n" + text.replace("\n### ", "\n#### ") for name, text in zip(machines, parts, strict=True)
    )


def of_machine(paths: list[Path]) -> str:
    """The tables of one machine's records."""
    found = newest(paths)
    if not found:
        return "Its records hold no figures."
    heads = {head["machine"]["date"]: head for _, head in found.values()}
    last = heads[max(heads)]
    machine = last["machine"]
    out = [
        f"{named(machine['cpu'])}, {machine['architecture']}, {machine['cores']} cores; {last['settings']['threads']} threads; "
        f"llama.cpp: {last.get('llama.cpp') or 'absent'}; commits {', '.join(sorted({h['machine']['commit'] for h in heads.values()}))}; "
        f"{min(heads)[:10]} to {max(heads)[:10]}.",
        "",
    ]
    measured = [h for h in heads.values() if h.get("peaks")]
    if measured:
        out += [*peaks_table(max(measured, key=lambda h: h["machine"]["date"])), ""]
    for section in NAMES:
        figures = [f for (name, *_), (f, _) in found.items() if name == section and f.ours]
        if figures:
            out += [f"### {TITLES[section]}", "", *table(figures, machine["architecture"]), ""]
    judgements = [v for f, _ in found.values() if (v := judged(f, machine["architecture"]))]
    short = sum(v.word == "short" for v in judgements)
    few = sum(f.rounds < 5 for f, _ in found.values())
    out.append(
        f"{len(judgements) - short} of {len(judgements)} targets met; {few} of {len(found)} figures have fewer than five rounds."
    )
    return "\n".join(out)


def replace(page: str, text: str) -> str:
    """The page with `text` between its markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--print", action="store_true", help="to the terminal, and leave the pages alone")
    args = parser.parse_args()
    paths = sorted(args.results.glob("cpu-*.json"))
    for page, text in ((BARS, bars(paths)), (TABLES, render(paths))):
        if args.print:
            print(text)
        else:
            page.write_text(replace(page.read_text(), text))
            print(f"wrote {page}", file=sys.stderr)


if __name__ == "__main__":
    main()
