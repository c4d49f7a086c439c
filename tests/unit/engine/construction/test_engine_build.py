"""Sizes: what is asked, what the model allows, what the memory holds. Honoured exactly, or refused with the numbers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.backends.native import available
from quire.backends.native.backend import NativeBackend
from quire.backends.ops import KV, Backend, Needs
from quire.config import EngineConfig, Environment, resolve_step
from quire.engine.construction.build import build_engine, choose_threads
from quire.engine.construction.memory import OVERHEAD, Budget, size
from quire.engine.construction.sizes import choose_kv, resolve_sizes
from quire.machine import Memory
from quire.models import Model
from quire.observe.errors import BadRequest, NotEnoughMemory
from tests.unit.models import tiny

ENV = Environment(home=Path("/nowhere"))
PAGE = 2 * 2 * 16 * 1 * 8 * 2  # bytes: layers, K and V, tokens, heads, width, float16


def model(context: int = 1000) -> Model:
    made = SimpleNamespace(
        config=SimpleNamespace(context=context), kv=lambda pages, size: KV(2, pages, size, kv_heads=1, head_dim=8)
    )
    return cast("Model", made)


def sizes(available: int = 1 << 30, env: Environment = ENV, needs: Needs = Needs(0, 0), **options: Any) -> Any:
    budget = Budget(Memory(available + OVERHEAD, "this test"), needs)
    options.setdefault("max_seqs", 64)
    return resolve_sizes(EngineConfig(path="", **options), env, model(), budget)


def test_unasked_it_is_the_models_context_four_times() -> None:
    got = sizes(max_seqs=8)
    assert (got.context, got.pages) == (1000, 8 * 32)
    assert "512 tokens of each of 8 sequences" in got.lines[0]
    got = sizes(max_seqs=7)
    assert (got.context, got.pages) == (1000, 4 * 63)
    assert "4 full contexts" in got.lines[0]
    assert "what the model was made for" in got.lines[1]
    assert sizes(max_seqs=64, context=160).pages == 64 * 10


def test_models_that_are_served_together_share_what_their_weights_leave() -> None:
    def pages(share: float, weights: int = 0) -> int:
        budget = Budget(Memory(400 * PAGE + weights + OVERHEAD, "this test"), Needs(weights, 0), share=share)
        return resolve_sizes(EngineConfig(path="", max_seqs=8), ENV, model(), budget).pages

    assert (pages(1.0), pages(0.5), pages(0.25)) == (200, 100, 50)  # of half of the room, as for one model
    assert pages(0.5, weights=1 << 20) == pages(0.5)  # its own weights are its own
    alone, shared = (Budget(Memory(OVERHEAD + 10 * PAGE, "this test"), Needs(0, 0), share=s) for s in (1.0, 0.5))
    alone.check(8 * PAGE, PAGE)
    with pytest.raises(NotEnoughMemory, match="1/2 of what its weights leave is for this model") as refused:
        shared.check(8 * PAGE, PAGE)
    assert "serve fewer models together" in refused.value.cure


def test_asked_is_honoured_exactly() -> None:
    got = sizes(context=100, kv_memory=10 * PAGE)
    assert (got.context, got.pages) == (100, 10)
    assert "asked for; the model was made for 1000" in got.lines[1]
    env = dataclasses.replace(ENV, kv_memory=f"{20 * PAGE}")
    assert sizes(env=env).pages == 20
    assert sizes(env=env, kv_memory=30 * PAGE).pages == 30


def test_little_memory_bounds_the_context_and_says_so() -> None:
    got = sizes(available=20 * PAGE)
    assert (got.context, got.pages) == (160, 10)
    assert "what the KV pool holds; the model: 1000" in got.lines[1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"context": 1001}, "1001 was asked for: the model was made for 1000"),
        ({"context": 1000, "kv_memory": 10 * PAGE}, "holds 160 tokens"),
        ({"kv_memory": PAGE - 1}, f"takes {PAGE}"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        sizes(**options)


def test_a_bad_environment_names_the_variable() -> None:
    with pytest.raises(BadRequest, match="QUIRE_KV_MEMORY"):
        sizes(env=dataclasses.replace(ENV, kv_memory="plenty"))


@pytest.mark.parametrize(
    ("name", "value"), [("threads", 0), ("context", 0), ("max_seqs", -1), ("max_batch_tokens", -1)]
)
def test_numbers_that_could_never_work(name: str, value: int) -> None:
    with pytest.raises(BadRequest, match=f"{name} is {value}"):
        build_engine(EngineConfig(path="none.gguf", **{name: value}), ENV)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "gpu", "got"),
    [((0, 0), False, (64, 512)), ((0, 0), True, (256, 8192)), ((5, 0), False, (5, 512)), ((700, 0), False, (700, 700)),
     ((0, 32), False, (32, 32)), ((0, 100), True, (100, 100)), ((16, 8), True, (16, 8))],
)  # fmt: skip
def test_the_size_of_a_step(asked: tuple[int, int], gpu: bool, got: tuple[int, int]) -> None:
    assert resolve_step(*asked, gpu) == got


def test_depth_is_bounded() -> None:
    with pytest.raises(BadRequest, match="depth is 9"):
        build_engine(EngineConfig(path="none.gguf", depth=9), ENV)


def test_a_step_must_hold_one_token_of_every_sequence():
    with pytest.raises(BadRequest, match="max_batch_tokens is 8 and max_seqs 16"):
        build_engine(EngineConfig(path="absent.gguf", max_seqs=16, max_batch_tokens=8), ENV)


def test_the_pool_takes_half_of_what_the_weights_leave() -> None:
    got = sizes(available=30 * PAGE, needs=Needs(8 * PAGE, 2 * PAGE))
    assert got.pages == 10 and "left beside the weights" in got.lines[0]
    assert "weights" in got.lines[2] and "this test" in got.lines[2] and "page cache" in got.lines[2]


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        sizes(available=3 << 30, needs=Needs(2 << 30, 512 << 20), kv_memory=1 << 30)
    text = str(caught.value)
    assert "needs 3.5 GiB: weights 2.0 GiB, KV pool 1.0 GiB" in text
    assert f"({(1 << 30) // PAGE * 16} tokens)" in text and "working memory 512 MiB" in text
    assert "3.0 GiB are available (this test)" in text
    assert f"at most 512 MiB of KV memory (--kv-memory), which holds {(512 << 20) // PAGE * 16} tokens" in text
    assert sizes(available=3 << 30, needs=Needs(2 << 30, 512 << 20), kv_memory=512 << 20).pages == (512 << 20) // PAGE


def test_a_model_that_does_not_fit_is_refused_whatever_the_pool() -> None:
    with pytest.raises(NotEnoughMemory, match=r"weights 4.2 GiB.* 3.0 GiB are available .*smaller quantization"):
        sizes(available=3 << 30, needs=Needs(int(4.2 * 2**30), 0))


@pytest.mark.parametrize(
    ("n", "text"), [(1, "1 MiB"), (5 << 20, "5 MiB"), (1 << 30, "1.0 GiB"), (3435 << 20, "3.4 GiB")]
)
def test_sizes_for_people(n: int, text: str) -> None:
    assert size(n) == text


def test_who_asks_for_threads_gets_them() -> None:
    assert choose_threads(EngineConfig(path="", threads=3), ENV)[:2] == (3, ())
    env = dataclasses.replace(ENV, threads=5)
    threads, _, line = choose_threads(EngineConfig(path=""), env)
    assert threads == 5 and "QUIRE_THREADS" in line
    assert choose_threads(EngineConfig(path="", threads=3), env)[0] == 3


def test_a_real_limit_is_a_clean_refusal(model_path: Path) -> None:
    """A process that may not have the memory says so and ends; it does not crash, and its code says so too."""
    code = """
import resource, sys
from quire.cli.app import app
import tokenizers, quire.llm.loading, quire.engine.construction.build, quire.backends.native.backend, quire.chat.completer
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.argv = ["quire", "run", sys.argv[1], "--threads", "1", "--max-tokens", "1", "hello"]
app()
"""
    done = subprocess.run([sys.executable, "-c", code, str(model_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, (done.returncode, done.stderr[-2000:])
    assert "the model needs" in done.stderr and "ulimit -v" in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "terminate called" not in done.stderr


WINDOW = 48
OWN = 3 * PAGE // 2  # bytes of a page in a pool of three layers


def windowed(context: int = 1000, whole: bool = True) -> Model:
    """Two layers that see everything and three that see 48 tokens, or these three alone."""
    forgets = KV(3, 1, 16, kv_heads=1, head_dim=8, window=WINDOW)
    kv = KV(2, 1, 16, kv_heads=1, head_dim=8, more=(forgets,)) if whole else forgets
    return cast("Model", SimpleNamespace(config=SimpleNamespace(context=context), kv=lambda pages, size: kv))


def shared_out(available: int = 1 << 30, own: bool = False, model: Model | None = None, **options: Any) -> Any:
    options = {"max_seqs": 8, "max_batch_tokens": 32, **options}
    budget = Budget(Memory(available + (0 if own else OVERHEAD), "this test"), None if own else Needs(0, 0), own)
    return resolve_sizes(EngineConfig(path="", **options), ENV, model or windowed(), budget)


def test_windows_get_what_every_sequence_needs_and_the_rest_goes_to_what_keeps_everything() -> None:
    each = -(-(WINDOW - 1 + 2 - 1) // 16) + 1
    got = shared_out()
    assert got.groups == (8 * 32, (8 * each + 2) * 5 // 4) and got.pages == 8 * 32 and got.context == 1000
    assert "3 layers that see 48 tokens" in got.lines[2] and f"{got.groups[1]} pages" in got.lines[2]
    assert shared_out(own=True).groups == (8 * 63, (8 * each + 4) * 5 // 4)  # a step more in flight
    assert shared_out(context=32, max_seqs=2).groups[1] == 2 * 2  # never more than whole contexts


def test_asked_memory_is_shared_out_and_never_exceeded() -> None:
    least = -(-(WINDOW - 1 + 32 - 1) // 16) + 1
    for asked in range(PAGE + least * OWN, 400 * PAGE, 7 * PAGE + 11):
        got = shared_out(kv_memory=asked)
        used = got.groups[0] * PAGE + got.groups[1] * OWN
        assert asked - PAGE - OWN < used <= asked or got.groups[1] == shared_out().groups[1]
        assert used <= asked and got.groups[1] >= least and got.groups[0] >= 1
        assert got.context == min(1000, got.groups[0] * 16)


def test_windows_that_do_not_fit_are_refused_with_the_numbers() -> None:
    least = -(-(WINDOW - 1 + 32 - 1) // 16) + 1
    with pytest.raises(
        BadRequest, match=f"one page of 16 tokens takes {PAGE}, and the windows of one sequence {least * OWN}"
    ):
        shared_out(kv_memory=PAGE + least * OWN - 1)
    with pytest.raises(NotEnoughMemory, match=r"0 tokens|16 tokens, 1 MiB of it for windows"):
        shared_out(available=PAGE + least * OWN - 1)
    assert shared_out(available=PAGE + least * OWN).groups == (1, least)
    with pytest.raises(BadRequest, match=r"a context of 1000 was asked for: the KV pool of 0 MiB holds \d+ tokens"):
        shared_out(kv_memory=30 * PAGE, context=1000)


def test_windows_alone_bound_no_context() -> None:
    got = shared_out(model=windowed(100000, whole=False), kv_memory=40 * OWN)
    assert got.context == 100000 and got.groups == (40,)


@pytest.mark.parametrize(
    ("asked", "best", "latent", "kept"),
    [
        ("auto", "int16", 0, "int16"),
        ("auto", "f16", 0, "auto"),  # the plain thing, whatever that is on a device
        ("f16", "int16", 0, "f16"),
        ("int8", "int16", 0, "int8"),
        ("auto", "int16", 8, "auto"),  # keys whose front is the value are f16
    ],
)
def test_k_and_v_are_kept_as_asked_or_as_is_best(asked: str, best: str, latent: int, kept: str) -> None:
    own = KV(1, 1, 16, kv_heads=1, head_dim=8, latent=latent)
    whole = cast("Model", SimpleNamespace(kv=lambda pages, size: KV(2, pages, size, 1, 8, more=(own,))))
    backend = cast("Backend", SimpleNamespace(kv_dtype=best))
    assert choose_kv(EngineConfig(path="", kv_dtype=asked), whole, backend).kv_dtype == kept


@pytest.mark.parametrize("best", ["f16", "int16"])
def test_what_is_best_is_used_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: str) -> None:
    monkeypatch.setattr("quire.backends.native.backend.TILES", available() if best == "int16" else ())
    path = str(tiny.write_gguf(tiny.build(), tmp_path / "m.gguf"))
    for asked in ("auto", "f16", "int16"):
        engine, info = build_engine(EngineConfig(path=path, backend="native", kv_dtype=asked, threads=1), ENV)
        engine.close()
        kept = best if asked == "auto" else asked
        assert any(line.startswith(f"KV cache: {kept}, ") for line in info.decisions) == (
            asked != "auto" or best != "f16"
        )


def test_matrix_tiles_decide_for_every_kernel_set() -> None:
    """So that sets of one machine agree."""
    best = "int16" if available()[0] == "amx" else "f16"
    assert {NativeBackend(isa=isa).kv_dtype for isa in available()} == {best}
