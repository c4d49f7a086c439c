"""A bounded, seeded run of the GGUF fuzzer. `python -m tests.fuzz.gguf` runs longer ones."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import gguf, kit

RUNS = 4_000


def test_mutated_files_open_whole_or_are_refused(tmp_path: Path) -> None:
    before = kit.peak()
    outcomes = gguf.fuzz(range(RUNS), seed=2026, folder=tmp_path)
    grown = kit.peak() - before
    assert outcomes["read"] + outcomes["refused"] == RUNS
    # A fuzzer whose mutants all die at the first byte, or all live, tests nothing.
    for sample in gguf.samples():
        for kind in ("flip", "splice", "extreme", "replace"):
            assert outcomes[f"{sample.name}/{kind} read"] > 0
            assert outcomes[f"{sample.name}/{kind} refused"] > 0
    assert grown < 128 << 20


def test_a_run_is_decided_by_its_seed_and_number() -> None:
    of = gguf.samples()
    assert gguf.mutant(kit.random_of(3, 17), of) == gguf.mutant(kit.random_of(3, 17), of)
    assert len({gguf.mutant(kit.random_of(3, n), of)[1] for n in range(200)}) > 190
