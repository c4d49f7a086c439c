"""An engine over a model with recurrent layers: the same bits alone and cold, in any batch and chunk, from a checkpoint of
another's state, after a preemption; and no more memory for states than was planned."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.backends.ops import KV, Backend, Needs, check_kv
from quire.config import PAGE_SIZE, EngineConfig, Environment
from quire.engine.construction import generating as build_writing
from quire.engine.construction.build import build_engine
from quire.engine.construction.memory import OVERHEAD, Budget
from quire.engine.construction.sizes import resolve_sizes
from quire.engine.types import Event, Receipt, Request
from quire.machine import Memory
from quire.models import Model
from quire.observe.errors import BadRequest, NotEnoughMemory, Unsupported
from quire.runner.params import SamplingParams

pytest.importorskip("torch", reason="needs the test extra: torch makes the model")
pytest.importorskip("transformers", reason="needs transformers, which makes the model")

from tests.unit.models import folders, mixtures

Heard = dict[str, list[tuple[int, Any]]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.save(mixtures.build("qwen3next"), tmp_path_factory.mktemp("states") / "m")


def requests() -> list[Request]:
    """Prompts with a beginning in common, the same one twice, another's prompt gone on from, and several answers to one."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 160) for _ in range(70)]
    prompts = [
        shared[: rng.choice([70, 50, 20])] + [rng.randrange(3, 160) for _ in range(rng.randint(1, 60))]
        for _ in range(5)
    ]
    prompts += [prompts[1], prompts[2] + prompts[0][-9:], prompts[3], prompts[3]]
    return [
        Request(
            id=str(i),
            tokens=prompt,
            sampling=SamplingParams(
                temperature=0.0 if i % 2 else 0.9,
                seed=i,
                max_tokens=rng.randint(5, 40),
                logprobs=2,
                prompt_logprobs=0 if i == 4 else None,
                ignore_eos=True,
            ),
            index=i % 2,
            follows="3" if i > 6 else None,
        )
        for i, prompt in enumerate(prompts)
    ]


class Served:
    """An engine that has answered all requests, some of them at a time."""

    def __init__(self, path: Path, backend: str, at_once: int = 3, repeat: int = 1, **options: Any):
        settings = {"max_seqs": 4, "max_batch_tokens": 48, "context": 256, "threads": 2, **options}
        config = EngineConfig(path=str(path), backend=backend, **settings)
        self.engine, self.info = build_engine(config, Environment(home=path.parent))
        self.tree = self.engine._scheduler.tree
        self.receipts: dict[str, Receipt] = {}
        self.heard: Heard = {}
        self.most = 0  # states held by sequences at one time
        for _ in range(repeat):
            self.heard = {}
            todo, live = requests(), 0
            while todo or live:
                while todo and live < at_once:
                    self.engine.add(todo.pop(0))
                    live += 1
                live -= self.step()
        self.stats = self.engine.stats()
        self.tree.check([])
        self.engine.close()

    def step(self) -> int:
        """Returns how many have ended."""
        ended = 0
        for event in self.engine.step():
            assert isinstance(event, Event) and event.error is None, event.error
            self.heard.setdefault(event.id, []).extend(zip(event.tokens, event.logprobs, strict=True))
            if event.receipt is not None:
                self.receipts[event.id] = event.receipt
                ended += 1
        self.most = max(self.most, self.tree.pools[1].size - self.tree.available(1))
        return ended


@pytest.fixture(scope="module")
def alone(path: Path) -> Heard:
    """Each request on its own, cold, its prompt in one piece."""
    pytest.importorskip("quire.backends.native._native", reason="needs the native backend: pip install -e .")
    return Served(path, "native", at_once=1, prefix_cache=False, max_batch_tokens=256).heard


STATE = (4 - 1) * 160 + 4 * 16 * 24  # numbers of a layer's state: rows for the convolution, and a matrix for each head
CARRY = 4  # layers
FULL_PAGE = 16 * 2 * 2 * 32 * 2  # bytes: tokens, K and V, heads, columns, halves


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repeat": 2},
        {"at_once": 1, "repeat": 2, "max_batch_tokens": 256},
        {"max_batch_tokens": 7, "threads": 1},
        {"depth": 1, "repeat": 2},
        {"kv_memory": 20 * FULL_PAGE + 2 * CARRY * STATE * 4, "context": None, "depth": 1},
    ],
    ids=str,
)
def test_the_same_bits_whatever_happens(path: Path, alone: Heard, options: dict[str, Any]) -> None:
    served = Served(path, "native", **options)
    assert served.heard == alone
    if "repeat" in options:  # the second time every prompt is found up to its last page
        for request in requests():
            if request.sampling.prompt_logprobs is None:
                assert served.receipts[request.id].cached_tokens == (len(request.tokens) - 1) // 16 * 16, request.id
    assert served.tree.hits > 0
    assert served.most <= served.tree.pools[1].size


@pytest.mark.parametrize("pages", [(12, 12), (12, 3), (40, 5)], ids=str)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_same_bits_after_a_preemption(
    path: Path, alone: Heard, pages: tuple[int, int], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools that do not hold what the sequences grow to."""
    monkeypatch.setattr(
        build_writing, "resolve_sizes", lambda *args: replace(resolve_sizes(*args), groups=pages, context=192)
    )
    served = Served(path, "native", at_once=4, depth=depth)
    assert served.heard == alone
    assert served.stats.preemptions > 0 or pages[1] < 6
    assert any(receipt.preemptions for receipt in served.receipts.values()) or pages[1] < 6


def test_the_reference_says_the_same_tokens(path: Path, alone: Heard) -> None:
    served = Served(path, "reference", repeat=1)
    assert {k: [t for t, _ in v] for k, v in served.heard.items()} == {k: [t for t, _ in v] for k, v in alone.items()}
    assert served.tree.hits > 0


def test_keys_and_values_may_be_rounded_further(path: Path) -> None:
    """States are not."""
    cold = Served(path, "native", at_once=1, prefix_cache=False, kv_dtype="int8")
    assert Served(path, "native", repeat=2, kv_dtype="int8").heard == cold.heard
    plain = Served(path, "native", kv_dtype="f16")
    assert cold.info.kv_bytes - plain.info.kv_bytes == plain.tree.pool.size * (16 * 2 * 2 * (32 + 4) - FULL_PAGE)


def test_every_kernel_set_gives_the_same_bits(path: Path, alone: Heard) -> None:
    from quire.backends.native import available

    for isa in available():
        assert Served(path, "native", isa=isa, max_batch_tokens=33).heard == alone, isa


def test_states_are_told_and_bounded(path: Path) -> None:
    served = Served(path, "native", kv_dtype="f16")
    line = next(line for line in served.info.decisions if line.startswith("state pool"))
    assert "4 layers that carry a state: 16 states" in line and "two for each of 4 sequences" in line
    assert "state: 4 of 5 layers carry one instead of keys and values" in served.info.decisions
    assert served.tree.pools[1].size == 16
    kv = served.tree.pool.size * FULL_PAGE + 16 * CARRY * STATE * 4
    assert served.info.kv_bytes == kv


def test_drafts_are_refused_over_states(path: Path) -> None:
    config = EngineConfig(path=str(path), backend="native", speculate="ngram")
    with pytest.raises(Unsupported, match="cannot be taken back") as caught:
        build_engine(config, Environment(home=path.parent))
    assert "leave --speculate out" in str(caught.value.cure)
    from quire.engine.scheduler import Scheduler

    served = Served(path, "native", at_once=1)
    with pytest.raises(ValueError, match="cannot take back a draft token"):
        Scheduler(served.tree, slots=1, budget=4, context=64, draw=lambda: 0, drafts=2)


def test_texts_are_not_embedded(path: Path) -> None:
    with pytest.raises(Unsupported, match="carry a state"):
        build_engine(EngineConfig(path=str(path), backend="native", task="embed"), Environment(home=path.parent))


OWN = 3 * 1000 * 4  # bytes of a state


def sized(available: int = 1 << 30, **options: Any) -> Any:
    """Two layers that attend and three that carry a state of 1000 numbers."""
    carry = KV(3, 1, PAGE_SIZE, 0, 0, state=1000)
    kv = KV(2, 1, PAGE_SIZE, kv_heads=1, head_dim=8, more=(carry,))
    model = cast("Model", SimpleNamespace(config=SimpleNamespace(context=1000), kv=lambda pages, size: kv))
    budget = Budget(Memory(available + OVERHEAD, "this test"), Needs(0, 0))
    config = EngineConfig(path="", **{"max_seqs": 8, "max_batch_tokens": 32, **options})
    return resolve_sizes(config, Environment(home=Path()), model, budget)


def test_states_are_planned_for() -> None:
    page = 2 * 16 * 2 * 8 * 2
    assert sized().groups == (8 * 32, 32) and sized().context == 1000
    for asked in range(page + 2 * OWN, 100 * OWN, 5000):
        got = sized(kv_memory=asked)
        assert got.groups[0] * page + got.groups[1] * OWN <= asked and got.groups[0] >= 1 and 2 <= got.groups[1] <= 32
    assert sized(available=page + 2 * OWN).groups == (1, 2)
    with pytest.raises(BadRequest, match=f"takes {page}, and the states of one sequence {2 * OWN}"):
        sized(kv_memory=page + 2 * OWN - 1)
    with pytest.raises(NotEnoughMemory, match="for windows or states"):
        sized(available=page + 2 * OWN - 1)


def test_a_backend_without_states_says_so_by_name() -> None:
    lacking = cast("Backend", SimpleNamespace(name="plain", kv_states=False, kv_dtypes=("f16",)))
    carry = KV(1, 1, PAGE_SIZE, 0, 0, state=8)
    with pytest.raises(Unsupported, match="the plain backend keeps no states") as caught:
        check_kv(KV(1, 1, PAGE_SIZE, 1, 8, more=(carry,)), lacking)
    assert "--backend native" in str(caught.value.cure)
    with pytest.raises(ValueError, match="first group"):
        check_kv(carry, cast("Backend", SimpleNamespace(name="x", kv_states=True, kv_dtypes=())))
