"""Which tests a change brings along."""

from __future__ import annotations

import pytest

from tests.areas import AREAS, ROOT, paths, touched


def test_areas_are_of_what_is_there():
    for area in AREAS:
        for name in (*area.tests, *area.code):
            assert (ROOT / name).exists(), name


def test_a_change_of_a_dialect_brings_its_tests_and_no_others():
    (ollama,) = [area for area in AREAS if "tests/unit/server/ollama" in area.tests]
    assert [area for area in AREAS if touched(area, ["quire/server/ollama/created.py"])] == [ollama]
    assert touched(ollama, ["docs/cli.md", "tests/e2e/test_ollama.py"])
    assert touched(ollama, ["quire/server/shared/turns.py"])  # of several dialects
    assert not any(touched(area, ["README.md", "quire/engine/scheduler.py"]) for area in AREAS)


def test_every_test_is_in_the_core_or_in_an_area():
    everything, core = paths([]), paths(AREAS)
    assert set(core) < set(everything)
    of_areas = [name for name in everything if name not in core]
    for name in of_areas:
        assert any(name == test or name.startswith(f"{test}/") for area in AREAS for test in area.tests)


@pytest.mark.parametrize("folder", ["tests/null", "tests/unit/cache"])
def test_the_core_is_never_left_out(folder: str):
    assert paths(AREAS, folder) == paths([], folder) != []


@pytest.mark.parametrize("folder", ["engine", "runner", "backends", "models", "server", "cli"])
def test_every_room_has_tests_in_the_core(folder: str):
    assert paths(AREAS, f"tests/unit/{folder}")


@pytest.mark.parametrize(
    "name",
    [
        "unit/backends/test_conformance", "unit/models/test_llama", "unit/engine/test_scheduler",
        "e2e/test_structured", "e2e/test_determinism", "e2e/test_server_faults",
    ],
)  # fmt: skip
def test_these_are_in_the_core(name: str):
    assert any(path.startswith(f"tests/{name}") for path in paths(AREAS))
