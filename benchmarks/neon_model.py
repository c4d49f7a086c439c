"""What a model of a Neoverse-N1 says about the NEON kernels, for those who do not have one.

Each case of native/tests/loops.cpp runs under qemu, one instruction at a time; the instructions that the kernel executed
(unpacking, scales, tails and all) go to llvm-mca, which schedules them on the pipes of an N1. That leaves out caches, memory,
missed branches and forwarding from stores; the decoder's four instructions a cycle are added here as a bound. So a figure is a
bound and no measurement: it is for comparing two versions of a kernel, and for finding what holds one up.

Needs aarch64-linux-gnu-g++, qemu-aarch64, and llvm-mca of LLVM 17 or later (before that an N1 was taken for a Cortex-A57).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parent.parent / "native"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-march=armv8.2-a+dotprod",
)  # as in CMakeLists.txt
SOURCES = ("tests/loops.cpp", "src/isa_neondot.cpp", "src/pack.cpp", "src/memory.cpp", "src/thread_pool.cpp")
KERNELS = "isa_neondot.o"
MACS = 32  # int8 multiply-adds a cycle: two SDOT of 16, or 160 GOP/s at 2.5 GHz with two operations each
FMAS = 8  # float32: two FMLA of 4
DECODED = 4  # instructions a cycle


@dataclass(slots=True)
class Modelled:
    """One call of a kernel."""

    name: str
    instructions: int
    cycles: int
    busiest: str
    macs: float
    bytes: float
    fmas: float

    def row(self) -> str:
        share = self.macs / MACS / self.cycles if self.macs else self.fmas / FMAS / self.cycles
        unit = "sdot" if self.macs else "fmla"
        rate = f"{share:5.1%} {unit}" if share else ""
        return (
            f"{self.name:12} {self.instructions:8} {self.cycles:8} {self.instructions / self.cycles:5.2f}"
            f" {2 * self.macs / self.cycles:7.1f} {rate:>11} {self.bytes / self.cycles:7.2f}  {self.busiest}"
        )


def tool(*names: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    raise SystemExit(f"this needs {names[0]}, which is not on the PATH")


def scheduler(named: str | None) -> str:
    """An llvm-mca that knows the N1."""
    path = named or tool(*(f"llvm-mca-{v}" for v in range(25, 16, -1)), "llvm-mca")
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)", told)
    if not version or int(version[1]) < 17:
        raise SystemExit(
            f"{path} is older than LLVM 17 and takes a Neoverse-N1 for a Cortex-A57; name another one with --mca"
        )
    return path


def build(folder: Path) -> tuple[Path, list[tuple[int, int]]]:
    """The program, and where the kernels lie in it."""
    compiler = tool("aarch64-linux-gnu-g++")
    objects = [folder / (Path(s).stem + ".o") for s in SOURCES]

    def translate(source: str, to: Path) -> None:
        subprocess.run([compiler, *FLAGS, "-c", str(NATIVE / source), "-o", str(to)], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(translate, SOURCES, objects))
    program, table = folder / "loops", folder / "map"
    subprocess.run(
        [compiler, "-static", "-no-pie", *map(str, objects), f"-Wl,-Map={table}", "-o", str(program)], check=True
    )
    found = re.findall(rf"\.text\S*\s+(0x[0-9a-f]+)\s+(0x[0-9a-f]+) \S*{KERNELS}", table.read_text())
    return program, [(int(at, 16), int(size, 16)) for at, size in found if int(size, 16)]


def disassemble(program: Path) -> dict[int, str]:
    text = subprocess.run(
        [tool("aarch64-linux-gnu-objdump"), "-d", "--no-show-raw-insn", str(program)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    code = {}
    for line in text.splitlines():
        if match := re.match(r"\s+([0-9a-f]+):\s+(.*)", line):
            # A target is an address and a name: where it leads is nothing to the scheduler, as long as it is near.
            body = re.sub(r"\s*//.*", "", match[2])
            body = re.sub(r"\b[0-9a-f]+ <.*>", "#0", body)
            # llvm-mca waits 100 cycles at a call. Whatever was called is in the list itself, so a call is a jump.
            code[int(match[1], 16)] = re.sub(r"^(bl\s.*|ret.*)", "b\t#0", body)
    return code


def executed(
    program: Path, places: Sequence[tuple[int, int]], name: str, folder: Path
) -> tuple[Iterator[int], list[float]]:
    log = folder / (name.replace(" ", "_") + ".log")
    where = ",".join(f"{at:#x}+{size:#x}" for at, size in places)
    command = [
        tool("qemu-aarch64"),
        "-cpu",
        "max",
        "-singlestep",
        "-d",
        "exec,nochain",
        "-dfilter",
        where,
        "-D",
        str(log),
    ]
    told = subprocess.run([*command, str(program), name], capture_output=True, text=True, check=True).stdout
    addresses = (int(m[1], 16) for m in re.finditer(r"\[[0-9a-f]+/([0-9a-f]+)/", log.read_text()))
    return addresses, [float(x) for x in told.split()]


def schedule(mca: str, name: str, code: Sequence[str], work: Sequence[float]) -> Modelled:
    command = [
        mca,
        "-mtriple=aarch64",
        "-mcpu=neoverse-n1",
        "-iterations=1",
        "-instruction-info=0",
        "-resource-pressure=1",
    ]
    text = subprocess.run(command, input="\n".join(code), capture_output=True, text=True, check=True).stdout
    total = re.search(r"Total Cycles:\s+(\d+)", text)
    pipes = re.findall(r"^\[([\d.]+)\]\s+- N1Unit(\S+)", text, re.M)
    pressure = re.search(r"Resource pressure per iteration:\n.*\n(.*)\n", text)
    if not total or not pressure:
        raise SystemExit(f"llvm-mca says nothing about {name}")
    busy = [(0.0 if p == "-" else float(p), unit) for p, (_, unit) in zip(pressure[1].split(), pipes, strict=True)]
    cycles = max(int(total[1]), len(code) // DECODED)
    most, unit = max(busy)
    macs, moved, fmas = work
    return Modelled(name, len(code), cycles, f"{unit} {most / cycles:.0%}", macs, moved, fmas)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.neon_model", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("cases", nargs="*", help="words that a case's name begins with (default: all)")
    parser.add_argument("--mca", help="the llvm-mca to use")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the program and the executed instructions")
    chosen = parser.parse_args(arguments)
    mca = scheduler(chosen.mca)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        program, places = build(folder)
        listing = disassemble(program)
        names = subprocess.run(
            [tool("qemu-aarch64"), "-cpu", "max", str(program)], capture_output=True, text=True, check=True
        )
        print("modelled with llvm-mca for neoverse-n1, not measured")
        print(
            f"{'case':12} {'instr.':>8} {'cycles':>8} {'IPC':>5} {'op/cyc':>7} {'of peak':>11} {'byte/cyc':>8}  busiest pipe"
        )
        for name in names.stdout.splitlines():
            if chosen.cases and not any(name.startswith(c) for c in chosen.cases):
                continue
            addresses, work = executed(program, places, name, folder)
            code = [listing[a] for a in addresses]
            if chosen.keep:
                (folder / (name.replace(" ", "_") + ".s")).write_text("\n".join(code))
            print(schedule(mca, name, code, work).row(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
