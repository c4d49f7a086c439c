"""What the machine could do at best: its measured peaks, and what a token of a model costs in bytes and operations.

Decoding reads every weight once and every cached key and value once; its floor is those bytes at the rate at which the
threads read a buffer of that size over and over. Prefill multiplies every weight with every token; its ceiling is the
rate of the int8 dot-product instruction run from registers. `peaks` is native/tests/peaks.cpp, built on first use.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

BUILD = ROOT / "build" / "peaks"
# The dot-product instruction, best first; what stands in for it on x86 CPUs that have none is named after their vectors. "amx" is told apart.
DOT = ("avx512vnni", "avxvnni", "avx512bw", "avx2", "sdot")
# What a kernel set leaves alone of a CPU that has it. Sets that are not named here use everything, or (scalar) nothing that has a peak.
BEYOND = {
    "avx512": ("amx",),
    "avxvnni": ("amx", "avx512vnni", "avx512bw"),
    "avx512bw": ("amx", "avx512vnni", "avxvnni"),
    "avx2": ("amx", "avx512vnni", "avx512bw", "avxvnni"),
}


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates in 1e9 per second, for one thread and for `threads`."""

    threads: int
    int8: dict[str, dict[str, float]]
    fp32: dict[str, dict[str, float]]
    read: dict[str, dict[str, float]]  # by MiB of the buffer

    def dot(self, threads: int) -> tuple[str, float] | None:
        """The best int8 dot-product instruction of this CPU, and operations per second."""
        return next(((name, self.int8[name][str(threads)] * 1e9) for name in DOT if name in self.int8), None)

    def within(self, kernels: str | None) -> Peaks:
        """Without the int8 rates of instructions that this kernel set does not use; None: the best set, which uses all."""
        beyond = BEYOND.get(kernels or "", ())
        return replace(self, int8={name: rates for name, rates in self.int8.items() if name not in beyond})

    def or_better(self, other: Peaks) -> Peaks:
        """These int8 rates, or the other's where it did better: a busy moment must not make a ceiling low."""
        int8 = {
            name: {t: max(rate, other.int8.get(name, {}).get(t, 0.0)) for t, rate in rates.items()}
            for name, rates in self.int8.items()
        }
        return replace(self, int8=int8)

    def amx(self, threads: int) -> float | None:
        return self.int8["amx"][str(threads)] * 1e9 if "amx" in self.int8 else None

    def bandwidth(self, nbytes: float, threads: int) -> float:
        """Bytes per second read from a buffer of this size, between the two measured sizes around it."""
        known = sorted((int(mib), rates[str(threads)] * 1e9) for mib, rates in self.read.items())
        mib = min(max(nbytes / 2**20, known[0][0]), known[-1][0])
        for (small, slow), (large, fast) in itertools.pairwise(known):
            if mib <= large:
                return slow + (fast - slow) * math.log(mib / small) / math.log(large / small)
        return known[-1][1]


def build() -> Path | str:
    """The program, or why there is none."""
    if shutil.which("cmake") is None:
        return "cmake is not on the PATH: peaks and floors were not measured"
    options = ["-DQUIRE_SELFTEST=ON", "-DQUIRE_MODULE=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        ["cmake", "-S", str(ROOT / "native"), "-B", str(BUILD), *options],
        ["cmake", "--build", str(BUILD), "--target", "peaks"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"the program that measures peaks could not be built: {(done.stderr or done.stdout)[-500:]}"
    return BUILD / "peaks"


def measure(threads: int, *, int8_alone: bool = False) -> Peaks | str:
    """The peaks of this machine now, as far as the kernel set asked for can use them, or why there are none."""
    from quire.config import Environment

    program = build()
    if isinstance(program, str):
        return program
    if not int8_alone:
        print("measuring what the machine can do at best (20 s) ...", file=sys.stderr, flush=True)
    part = ["int8"] if int8_alone else []
    done = subprocess.run([str(program), str(threads), *part], capture_output=True, text=True)
    if done.returncode:
        return f"the program that measures peaks failed: {done.stderr[-500:]}"
    return parse(json.loads(done.stdout)).within(Environment.read().isa)


def parse(body: dict[str, Any]) -> Peaks:
    return Peaks(body["threads"], body["int8"], body["fp32"], body["read"])


@dataclass(frozen=True, slots=True)
class Cost:
    """What one token of a model costs."""

    weight_bytes: int  # read for each decoded token
    kv_bytes: int  # read for each decoded token and each token of context
    operations: int  # of the matrices of all layers, for one prompt token
    output_operations: int  # of the output matrix, once for a prompt

    def decode_floor(self, peaks: Peaks, threads: int, depth: float) -> float:
        """Tokens per second if reading were all there is."""
        nbytes = self.weight_bytes + depth * self.kv_bytes
        return peaks.bandwidth(nbytes, threads) / nbytes

    def prefill_floor(self, rate: float, tokens: int) -> float:
        """Tokens per second if the matrices' dot products were all there is."""
        return tokens * rate / (tokens * self.operations + self.output_operations)


def cost(path: Path) -> Cost:
    """From the file's own header."""
    from quire.models import load
    from quire.weights.gguf.file import GGUF

    with GGUF.open(path) as gguf:
        page = load(gguf).kv(1, 16)
        untied = "output.weight" in gguf.tensors
        matrices = {n: t for n, t in gguf.tensors.items() if len(t.shape) == 2 and n != "token_embd.weight"}
        output = gguf.tensors["output.weight" if untied else "token_embd.weight"]
        read = sum(t.nbytes for n, t in gguf.tensors.items() if not (untied and n == "token_embd.weight"))
        layers = sum(t.elements for n, t in matrices.items() if n != "output.weight")
    return Cost(read, page.page_bytes // 16, 2 * layers, 2 * output.elements)
