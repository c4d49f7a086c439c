"""What the machine gives: cores, quotas and memory, over trees of files as systems show them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from quire.machine import Cores, available_cores, available_memory, cpu_model, look_at_cores, look_at_memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available: int, **more: int) -> dict[str, str]:
    lines = [f"{n}: {v // 1024} kB\n" for n, v in {"MemTotal": 1 << 40, "MemAvailable": available, **more}.items()]
    return {"proc/meminfo": "".join(lines)}


def cpus(root: Path, shape: list[tuple[str, int]], folder: str = "cpu_capacity") -> Path:
    """One entry a hardware thread: its siblings, and its capacity."""
    for n, (siblings, capacity) in enumerate(shape):
        write(root, {f"cpu{n}/topology/thread_siblings_list": siblings + "\n", f"cpu{n}/{folder}": f"{capacity}\n"})
    return root


def test_this_machine() -> None:
    cores = look_at_cores()
    assert cores.threads == available_cores() == len(os.sched_getaffinity(0))
    assert 1 <= cores.most <= cores.threads and set(cores.fast) <= set(cores.cores)
    assert 0 < available_memory() == pytest.approx(look_at_memory().available, rel=0.2)
    assert cpu_model()


def test_siblings_are_one_core(tmp_path: Path) -> None:
    root = cpus(tmp_path, [("0,2", 1024), ("1,3", 1024), ("0,2", 1024), ("1,3", 1024)])
    assert look_at_cores([0, 1, 2, 3], root, tmp_path) == Cores(((0, 2), (1, 3)), ((0, 2), (1, 3)))
    assert look_at_cores([0, 3], root, tmp_path).cores == ((0,), (3,))  # half of each: two whole cores


@pytest.mark.parametrize("folder", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_little_cores_are_told_from_big_ones(tmp_path: Path, folder: str) -> None:
    root = cpus(tmp_path, [("0", 1024), ("1", 980), ("2", 600), ("3", 600)], folder)
    assert look_at_cores([0, 1, 2, 3], root, tmp_path).fast == ((0,), (1,))


def test_no_topology_is_every_core_alike(tmp_path: Path) -> None:
    assert look_at_cores([0, 1], tmp_path, tmp_path) == Cores(((0,), (1,)), ((0,), (1,)))


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "plenty"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n"}, 1.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quotas(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert look_at_cores([0, 1], tmp_path, write(tmp_path, files)).quota == quota


@pytest.mark.parametrize(("quota", "most"), [(None, 4), (0.2, 1), (1.4, 1), (1.5, 2), (3.0, 3), (9.0, 4)])
def test_a_quota_bounds_the_threads(quota: float | None, most: int) -> None:
    assert Cores(((0, 1), (2, 3)), ((0, 1), (2, 3)), quota).most == most


def test_memory_of_the_machine(tmp_path: Path) -> None:
    root = write(tmp_path, meminfo(3 * GIB, CommitLimit=GIB, Committed_AS=GIB // 4))
    assert look_at_memory(root) == look_at_memory(root)
    assert (look_at_memory(root).available, look_at_memory(root).bound) == (3 * GIB, "this machine")
    write(root, {"proc/sys/vm/overcommit_memory": "2\n"})
    assert look_at_memory(root).available == GIB - GIB // 4


def test_a_container_bounds_the_memory_and_its_page_cache_is_not_spent(tmp_path: Path) -> None:
    root = write(tmp_path, meminfo(8 * GIB))
    group = {"sys/fs/cgroup/memory.max": f"{2 * GIB}\n", "sys/fs/cgroup/memory.current": f"{GIB}\n"}
    write(root, group)
    found = look_at_memory(root)
    assert (found.available, found.bound) == (GIB, "the container's limit")
    write(root, {"sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\n"})
    assert look_at_memory(root).available == GIB + GIB // 2
    write(root, {"sys/fs/cgroup/memory.high": f"{GIB}\n"})
    assert look_at_memory(root).available == GIB // 2
    write(root, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.high": "max\n"})
    assert look_at_memory(root).available == 8 * GIB


def test_every_level_of_groups_counts(tmp_path: Path) -> None:
    root = write(tmp_path, meminfo(8 * GIB) | {"proc/self/cgroup": "0::/a/b\n"})
    for folder, limit in (("", "max"), ("a/", str(GIB)), ("a/b/", str(2 * GIB))):
        write(root, {f"sys/fs/cgroup/{folder}memory.max": limit, f"sys/fs/cgroup/{folder}memory.current": "0"})
    assert look_at_memory(root).available == GIB


def test_version_1_groups(tmp_path: Path) -> None:
    root = write(tmp_path, meminfo(8 * GIB) | {"proc/self/cgroup": "4:memory:/x\n0::/\n"})
    at = "sys/fs/cgroup/memory/"
    write(root, {at + "memory.limit_in_bytes": f"{(1 << 63) - 4096}", at + "memory.usage_in_bytes": "5"})
    assert look_at_memory(root).available == 8 * GIB
    write(root, {at + "x/memory.limit_in_bytes": f"{GIB}", at + "x/memory.usage_in_bytes": f"{GIB // 2}"})
    write(root, {at + "x/memory.stat": f"total_inactive_file {GIB // 8}\ninactive_file 7\n"})
    assert look_at_memory(root).available == GIB // 2 + GIB // 8


@pytest.mark.parametrize(("which", "letter"), [(resource.RLIMIT_AS, "v"), (resource.RLIMIT_DATA, "d")])
def test_the_process_s_own_limits(which: int, letter: str) -> None:
    code = (
        "import resource; from quire.machine import look_at_memory\n"
        f"resource.setrlimit({which}, (1 << 30, 1 << 30)); m = look_at_memory(); print(m.available, m.bound)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, bound = done.stdout.split(None, 1)
    assert 0 < int(number) < GIB and bound.strip() == f"the process's limit, ulimit -{letter}"


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert look_at_memory(tmp_path).available > 0
