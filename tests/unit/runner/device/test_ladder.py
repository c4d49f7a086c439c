"""The ladder pads a step to a size without touching anybody's page, and gives its body the same numbers however they travel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from quire.runner.device.ladder import CHANGES, Field, Inputs, Ladder, Room, at_least, pad, up_to  # noqa: E402
from quire.runner.device.state import DeviceState  # noqa: E402

CPU = torch.device("cpu")
SLOTS, PAGES, PAGE, WIDTH = 5, (7, 9), 4, 6  # of two groups; a table row has six pages


def ints(*x: int) -> np.ndarray:
    return np.array(x, np.int32)


class Made:
    """A ladder of two sizes, with one input of its own, whose body notes what it is given."""

    def __init__(self) -> None:
        self.state = DeviceState(SLOTS, WIDTH, PAGES, PAGE, CPU)
        self.seen: list[tuple[str, Any, Any, Any]] = []
        program: Any = SimpleNamespace(device=CPU)
        rooms = {"small": Room(2, 2, 2 * CHANGES, 2), "large": Room(4, 4, 4 * CHANGES, 4)}
        self.ladder = Ladder(
            program, self.state, rooms, self.body, vocab=3, extra=lambda kind: [Field(3, -9, (5,))], warm_up=["small"]
        )

    def body(self, kind: str, inputs: Any, tables: Any, host: Any) -> None:
        self.seen.append(
            (kind, [x.tolist() for x in inputs], [(t.pages.tolist(), t.write.tolist()) for t in tables], host)
        )


def given(where: np.ndarray, *pages: np.ndarray) -> Inputs[Any]:
    return Inputs(ints(11), ints(3), ints(1), where, [ints(21), ints(22)], list(pages), [ints(8, 9)])


def test_sizes() -> None:
    assert up_to((1, 2, 4, 8), 6) == [1, 2, 4, 6] and up_to((1, 2, 4), 4) == [1, 2, 4] and up_to((4,), 1) == [1]
    assert [at_least(n, [1, 2, 6]) for n in (1, 2, 3, 6)] == [1, 2, 6, 6]
    assert pad(ints(1), 3, 7).tolist() == [1, 7, 7] and pad(ints(1, 2), 2, 7).tolist() == [1, 2]


def test_padding_writes_the_spare_page_and_reads_the_spare_slot() -> None:
    made = Made()
    sent = made.ladder.run("small", given(ints(WIDTH + 2), ints(4), ints(5)), [np.array([0.5]), ints(1, 2, 3)])
    kind, inputs, tables, host = made.seen[0]
    spare = SLOTS * WIDTH  # the first entry of the spare slot's table
    assert kind == "small" and inputs == [
        [11, 0], [3, 0], [1, SLOTS], [WIDTH + 2, *[spare] * 3],
        [21, PAGES[0] * PAGE], [4, *[PAGES[0]] * 3], [22, PAGES[1] * PAGE], [5, *[PAGES[1]] * 3], [8, 9, -9],
    ]  # fmt: skip
    assert [own.tolist() for own in host] == inputs
    row = [0, 0, 4, 0, 0, 0], [0, 0, 5, 0, 0, 0]
    assert tables == [([row[g], [PAGES[g]] * WIDTH], inputs[4 + 2 * g]) for g in range(2)]
    assert sent[0].tolist() == [0.5] and sent[1].tolist() == [1, 2, 3]


@pytest.mark.parametrize("changed", [3, 2 * CHANGES, 2 * CHANGES + 1])
@pytest.mark.parametrize("extra", [3, 1000])
def test_what_does_not_fit_goes_ahead_or_behind(changed: int, extra: int) -> None:
    """More page changes than a captured step holds are made before it; numbers for sampling that do not fit have a copy of their own."""
    made = Made()
    where = ints(*range(WIDTH, WIDTH + changed))
    more = [np.arange(extra, dtype=np.int32)]
    sent = made.ladder.run("small", given(where, ints(*range(changed)), ints(*range(2, 2 + changed))), more)
    _, inputs, tables, _ = made.seen[0]
    assert tables[0][0][0][:changed] == list(range(changed)) and tables[1][0][0][:changed] == list(
        range(2, 2 + changed)
    )
    ahead = changed > 2 * CHANGES
    assert (inputs[3][0] == SLOTS * WIDTH) is ahead and len(inputs[3]) == 2 * CHANGES
    assert sent[0].tolist() == more[0].tolist()
    assert made.ladder._spill.buffer.numel() >= (1000 if extra == 1000 else 0)


def test_warming_up_is_a_step_of_padding() -> None:
    made = Made()
    made.state.tables[0][:SLOTS] = 3
    made.state.last[:] = 1 << 30
    made.ladder.warm_up()
    assert made.state.last[SLOTS] == 0, "a step that only compiled has sampled what is no token"
    ((kind, inputs, tables, host),) = made.seen
    assert kind == "small" and host is None, "kernels are chosen as for a graph, which has no host's numbers"
    assert inputs[2] == [SLOTS] * 2 and inputs[-1] == [5, -9, -9]
    assert tables[0] == ([[PAGES[0]] * WIDTH] * 2, [PAGES[0] * PAGE] * 2) and (made.state.tables[0][:SLOTS] == 3).all()


def test_a_graph_is_replayed_in_place_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured from the largest on, so that the others live in its memory; and then no Python runs in a step."""
    made = Made()
    calls: list[str] = []

    class Graph:
        def __init__(self, kind: str):
            self.kind = kind

        def replay(self) -> None:
            calls.append(self.kind)

    def graph_of(body: Any, *rest: Any) -> Graph:
        body()
        return Graph(made.seen[-1][0])

    monkeypatch.setattr("quire.runner.device.ladder._graph_of", graph_of)
    for name in ("graph_pool_handle", "Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    made.ladder.capture()
    assert [kind for kind, *_ in made.seen] == ["large", "small"] == list(made.ladder.graphs)
    made.ladder.run("small", given(ints(), ints(), ints()), [])
    assert calls == ["small"] and len(made.seen) == 2
