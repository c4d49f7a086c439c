"""The native pool and its memory as Python sees them: pinned, oversubscribed, refused; and estimates that are exact."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from quire.backends.native.backend import SCRATCH, NativeBackend
from quire.backends.ops import Estimator
from quire.layouts import Rope
from tests.unit.backends.native_kit import TinyModel, ragged

IDS = [int(x) for x in np.random.default_rng(0).integers(0, TinyModel().vocabulary, 45)]
BATCH = ragged([(IDS, 0, (9, 2, 30, 4))])


def compiled(model: TinyModel, **options):
    return NativeBackend(**options).compile(model.forward, kv=model.kv, max_tokens=96, max_rows=96)


@pytest.mark.parametrize("threads", [2, 5, 16])
@pytest.mark.parametrize("cores", [(), tuple(sorted(os.sched_getaffinity(0))), (4095,)])
def test_neither_pinning_nor_too_many_threads_show(threads: int, cores: tuple[int, ...]) -> None:
    model = TinyModel()
    want = compiled(model).run(BATCH).copy()
    program = compiled(model, threads=threads, cores=cores)
    for _ in range(20):
        np.testing.assert_array_equal(program.run(BATCH), want)


def test_programs_of_several_threads_take_turns_on_one_pool() -> None:
    model = TinyModel()
    want = compiled(model).run(BATCH).copy()
    backend = NativeBackend(threads=2)
    programs = [backend.compile(model.forward, kv=model.kv, max_tokens=96, max_rows=96) for _ in range(3)]
    wrong: list[int] = []

    def work(n: int) -> None:
        if not all(np.array_equal(programs[n].run(BATCH), want) for _ in range(30)):
            wrong.append(n)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert not wrong and not any(w.is_alive() for w in workers)


@pytest.mark.parametrize("sanitizer", ["", "thread"])
def test_every_item_runs_once_and_after_the_step_before(sanitizer: str, tmp_path: Path) -> None:
    """native/tests/pool.cpp, compiled here: it needs nothing but the pool."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or pytest.skip("needs a C++ compiler")
    native, program = Path(__file__).parents[3] / "native", tmp_path / "pool"
    sources = [str(native / "tests/pool.cpp"), str(native / "src/thread_pool.cpp")]
    command = [compiler, "-std=c++17", "-O1", "-g", "-DQUIRE_POOL_TEST", *sources]
    if sanitizer:
        (tmp_path / "empty.cpp").write_text("int main() {}")
        flag = f"-fsanitize={sanitizer}"
        empty = [compiler, flag, str(tmp_path / "empty.cpp"), "-o", str(program)]
        if (
            subprocess.run(empty, capture_output=True).returncode
            or subprocess.run([program], capture_output=True).returncode
        ):
            pytest.skip(f"needs a compiler whose {flag} works here")
        command.append(flag)
    built = subprocess.run([*command, "-pthread", "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, "40"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "all well" in done.stdout, done.stderr


def test_an_idle_pool_costs_nothing() -> None:
    import time

    program = compiled(TinyModel(), threads=4)
    program.run(BATCH)
    time.sleep(0.05)  # they have given up spinning
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # threads that spin use all of it, each


def test_threads_that_the_system_does_not_give_are_an_error() -> None:
    code = """
import resource
from quire.backends.native.backend import NativeBackend
from quire.observe.errors import NotEnoughMemory
NativeBackend(threads=2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    NativeBackend(threads=500)
except NotEnoughMemory as e:
    print(e)
NativeBackend(threads=2)  # those that were started are gone
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "of 500 threads could be started" in done.stdout


@pytest.mark.parametrize(
    "names", [("F32",), ("F16", "BF16"), ("Q4_1", "Q8_0", "Q6_K", "Q4_K"), ("Q2_K", "Q3_K", "Q5_K")]
)
def test_an_estimate_is_what_is_then_taken(names: tuple[str, ...]) -> None:
    model, backend = TinyModel(names), NativeBackend(threads=2)
    assert isinstance(backend, Estimator)
    needs = backend.estimate(model.forward, kv=model.kv, max_tokens=96, max_rows=96)
    assert backend.packed_bytes == 0
    program = backend.compile(model.forward, kv=model.kv, max_tokens=96, max_rows=96)
    vectors = sum(v.nbytes for _, v in backend._vectors.values())
    assert needs.weights == backend.packed_bytes + vectors
    arena, peaks = (int(program.describe().split(f"{name} ")[1].split()[0]) for name in ("arena", "peaks"))
    assert peaks
    ropes = {id(x): x for x in vars(model).values() if isinstance(x, Rope)}
    assert needs.working == arena + peaks + sum(4 * 96 * r.dim for r in ropes.values()) + 2 * SCRATCH
    np.testing.assert_array_equal(program.run(BATCH), compiled(model).run(BATCH))  # the draft was good for both
    # A second program of the same weights takes none.
    assert backend.estimate(model.forward, kv=model.kv, max_tokens=7, max_rows=7).weights == 0


def test_an_estimate_does_not_serve_another_program() -> None:
    model, backend = TinyModel(), NativeBackend()
    small = backend.estimate(model.forward, kv=model.kv, max_tokens=8, max_rows=8)
    large = backend.estimate(model.forward, kv=model.kv, max_tokens=96, max_rows=96)
    assert small.working < large.working
    program = backend.compile(model.forward, kv=model.kv, max_tokens=96, max_rows=96)
    np.testing.assert_array_equal(program.run(BATCH), compiled(model).run(BATCH))
