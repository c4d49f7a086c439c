"""The page's tables and the plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import plot, report
from benchmarks.figures import OURS, Figure
from benchmarks.record import machine
from benchmarks.report import BEGIN, END

HEAD = {
    "machine": {"cpu": "A CPU", "architecture": "aarch64", "cores": 2, "commit": "abc", "date": "2030-01-01T00:00:00"},
    "settings": {"threads": 2},
    "llama.cpp": "version: 9",
    "peaks": {
        "threads": 2,
        "int8": {"sdot": {"1": 160.0, "2": 319.0}},
        "fp32": {"neon": {"1": 40.0, "2": 80.0}},
        "read": {"64": {"1": 19.8, "2": 38.4}},
    },
}


def write(folder: Path) -> list[Path]:
    values = {OURS: {"": [170.0, 180.0, 190.0]}, "llama.cpp": {"-fa off": [100.0] * 3, "-fa on": [50.0] * 3}}
    figures = [
        Figure("decode", "depth 0", "smollm2-135m", "q4_1", floor=385.0, values=values),
        Figure("decode", "depth 0", "smollm2-135m", "q4_0", values=values),
        Figure("start", "to the first token", "smollm2-135m", "q4_1", "s", more=False, values={OURS: {"": [0.5]}}),
    ]
    path = folder / "cpu-1.json"
    path.write_text(json.dumps({**HEAD, "figures": [f.to_json() for f in figures]}))
    return [path]


def test_the_tables_have_figures_verdicts_and_where_they_came_from(tmp_path: Path) -> None:
    text = report.render(write(tmp_path))
    assert "A CPU" in text
    assert "version: 9" in text
    assert "commits abc" in text
    row = next(line for line in text.splitlines() if "q4_1 | depth 0" in line)
    assert row == (
        "| smollm2-135m q4_1 | depth 0 | tokens/s | 180.0 (170.0 to 190.0) | 100.0 (100.0 to 100.0) `-fa off` | "
        "1.80x (1.70 to 1.90) | at least 1.70x | ok | 385, 47% | 3 |"
    )
    assert "| int8 sdot, GOP/s | 160.0 | 319.0 |" in text
    assert "2 of 2 targets met; 3 of 3 figures have fewer than five rounds." in text
    start = text[text.index("### Process start") :].splitlines()[2]
    assert start == "| file |  | unit | quire | n |"  # no peer: no columns for one


def test_machines_of_one_name_are_told_apart_by_cores_and_kernels(tmp_path: Path) -> None:
    paths = write(tmp_path)
    for i, changes in enumerate(({"cores": 16}, {"kernels": "avx2"})):
        other = json.loads(paths[0].read_text())
        other["machine"] |= changes
        paths.append(tmp_path / f"cpu-{2 + i}.json")
        paths[-1].write_text(json.dumps(other))
    text = report.render(paths)
    headings = [line for line in text.splitlines() if line.startswith("### ")]
    assert headings == ["### A CPU, 2 cores, avx2 kernels", "### A CPU, 16 cores", "### A CPU, 2 cores"]
    assert text.count("q4_1 | depth 0") == 3


def test_a_record_says_which_kernels_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_ISA", raising=False)
    assert "kernels" not in machine()
    monkeypatch.setenv("QUIRE_ISA", "avx2")
    assert machine()["kernels"] == "avx2"


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = report.replace(page, "new")
    assert new == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert report.replace(new, "new") == new
    with pytest.raises(ValueError, match="results"):
        report.replace("a page without markers", "new")


@pytest.mark.parametrize("page", [report.BARS, report.TABLES], ids=lambda page: page.name)
def test_a_page_has_the_markers(page: Path) -> None:
    text = page.read_text()
    assert text.count(BEGIN) == text.count(END) == 1


def test_every_bar_stands_with_what_each_machine_reached(tmp_path: Path) -> None:
    paths = write(tmp_path)
    slow = json.loads(paths[0].read_text())
    slow["machine"] |= {"cores": 16}
    slow["figures"] = [f for f in slow["figures"] if f["format"] == "q4_1" and f["section"] == "decode"]
    slow["figures"][0]["values"][OURS] = {"": [150.0] * 3}
    paths.append(tmp_path / "cpu-2.json")
    paths[-1].write_text(json.dumps(slow))
    assert report.bars(paths).splitlines() == [
        "| | bar | A CPU, 16 cores | A CPU, 2 cores |",
        "|---|---|---|---|",
        "| decode, smollm2-135m q4_0, depth 0 | at least 1.15x |  | 1.80x |",
        "| decode, smollm2-135m q4_1, depth 0 | at least 1.70x | **1.50x** | 1.80x |",
        "| met | | 0 of 1 | 2 of 2 |",
    ]


def test_a_bar_that_x86_does_not_have_is_told_from_one_that_is_met(tmp_path: Path) -> None:
    values = {OURS: {"": [110.0]}, "llama.cpp": {"-fa on": [100.0]}}
    figures = [Figure("decode", "depth 0", "llama-1b", "q4_0", values=values).to_json()]
    head = {**HEAD, "machine": {**HEAD["machine"], "architecture": "x86_64"}}
    (tmp_path / "cpu-1.json").write_text(json.dumps({**head, "figures": figures}))
    table = report.bars([tmp_path / "cpu-1.json"])
    assert "| at least 1.15x | 1.10x (x86) |" in table
    assert table.endswith("1 of 1 |")


def test_bars_stand_in_the_order_of_a_run_and_of_numbers() -> None:
    rows = [("start", "s", "q4_1", "x"), ("decode", "s", "q4_1", "depth 2048"), ("decode", "s", "q4_1", "depth 512")]
    assert sorted(rows, key=report.order) == [rows[2], rows[1], rows[0]]


def test_without_records_the_page_says_so() -> None:
    assert report.bars([]) == "No record has been written yet."


def test_a_plot_is_well_formed_and_every_point_is_inside() -> None:
    series = {"quire": [(0.0, 5.0), (8128.0, 21.0)], "a < b & c": [(0.0, 6.0), (8128.0, 99.0)]}
    root = ET.fromstring(plot.lines("title <1>", "x", "ms", series))
    space = {"s": "http://www.w3.org/2000/svg"}
    circles = root.findall("s:circle", space)
    assert len(circles) == 4
    for c in circles:
        assert plot.LEFT <= float(c.get("cx", "")) <= plot.WIDTH - plot.RIGHT
        assert plot.TOP <= float(c.get("cy", "")) <= plot.HEIGHT - plot.BOTTOM
    heights = [float(c.get("cy", "")) for c in circles]
    assert heights[0] > heights[1] > heights[3]  # dearer is higher up
    assert "a < b & c" in [t.text for t in root.findall("s:text", space)]


@pytest.mark.parametrize(("largest", "step"), [(100, 20), (8128, 2000), (0.9, 0.2), (49, 10), (0, 1)])
def test_ticks_are_round(largest: float, step: float) -> None:
    assert plot.step(largest) == pytest.approx(step)
