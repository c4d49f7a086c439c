"""What the machine gives this process: cores, their shapes and their quota, and memory that can be had now.

Read from /proc, /sys and the process's own limits each time it is asked; where a system does not say, the answer is what
does no harm (no quota, no container, every core alike). It knows no model and decides nothing. A control group may be
of version 1 or 2, seen from inside a container or from outside: every level that is visible counts, and the tightest wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 62
CPUS = Path("/sys/devices/system/cpu")
FAST = (
    0.85  # of the largest capacity: cores of one kind differ by a few percent, big and little ones by a third and more
)


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores this process may use. A core is the tuple of its hardware threads."""

    cores: tuple[tuple[int, ...], ...]
    fast: tuple[tuple[int, ...], ...]  # those of the fastest kind; all of them on most machines
    quota: float | None = None  # cores' worth of time that the container may take

    @property
    def threads(self) -> int:
        """Hardware threads."""
        return sum(len(c) for c in self.cores)

    @property
    def most(self) -> int:
        """Threads that can all run at once: half a core of quota is worth one more."""
        return self.threads if self.quota is None else max(1, min(self.threads, int(self.quota + 0.5)))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can be had now, and what bounds them."""

    available: int
    bound: str


def available_cores() -> int:
    """Hardware threads this process may run on."""
    return len(_allowed())


def _allowed() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def look_at_cores(allowed: list[int] | None = None, cpus: Path = CPUS, root: Path = Path("/")) -> Cores:
    """The cores as they are now."""
    allowed = _allowed() if allowed is None else allowed
    groups: dict[tuple[int, ...], list[int]] = {}
    speed: dict[tuple[int, ...], int] = {}
    for cpu in allowed:
        folder = cpus / f"cpu{cpu}"
        siblings = _read(folder / "topology" / "thread_siblings_list")
        group = tuple(_list(siblings)) if siblings else (cpu,)
        groups.setdefault(group, []).append(cpu)
        speed[group] = _number(folder / "cpu_capacity") or _number(folder / "cpufreq" / "cpuinfo_max_freq") or 0
    top = max(speed.values(), default=0)
    cores = {g: tuple(c) for g, c in groups.items()}
    fast = tuple(c for g, c in cores.items() if speed[g] >= FAST * top)
    return Cores(tuple(cores.values()), fast, _quota(root))


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """A name that tells one kind of CPU from another."""
    wanted = ("model name", "CPU implementer", "CPU part", "CPU variant", "cpu family", "model", "stepping")
    found: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found.setdefault(name.strip(), value.strip())
    return " ".join(found[n] for n in wanted if n in found) or os.uname().machine


def available_memory() -> int:
    """Bytes of memory that can be had now without swapping, every limit on this process included."""
    return look_at_memory().available


def look_at_memory(root: Path = Path("/")) -> Memory:
    """The memory as it is now.

    Page cache counts as available, a model file's mapped pages among it: the system takes those back when it needs them.
    """
    found = [Memory(_machine_memory(root), "this machine")]
    found += [Memory(free, "the container's limit") for free in _container_memory(root)]
    found += _process_limits(root)
    return min(found, key=lambda m: m.available)


def _machine_memory(root: Path) -> int:
    """MemAvailable; with strict overcommit, no more than may still be promised."""
    info: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.split() and value.split()[0].isdigit():
            info[name] = int(value.split()[0]) * 1024
    if "MemAvailable" not in info:
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        except (ValueError, OSError):
            return 4 << 30
    if _read(root / "proc/sys/vm/overcommit_memory").strip() == "2" and "CommitLimit" in info:
        return min(info["MemAvailable"], max(0, info["CommitLimit"] - info.get("Committed_AS", 0)))
    return info["MemAvailable"]


def _container_memory(root: Path) -> Iterator[int]:
    """What each control group above this process leaves of its limit. Its page cache is not spent."""
    for group in _groups(root, "memory"):
        limits = [_number(group / n) for n in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        limit = min((x for x in limits if x is not None), default=NO_LIMIT)
        used = _number(group / "memory.current")
        used = _number(group / "memory.usage_in_bytes") if used is None else used
        if limit >= 1 << 60 or used is None:  # version 1 writes "none" as a huge number
            continue
        stat = dict(line.split(None, 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
        cached = 0
        for name in ("inactive_file", "active_file"):
            text = stat.get(f"total_{name}", stat.get(name, "0"))
            cached += int(text) if text.isdigit() else 0
        yield max(0, limit - used + min(cached, used))


def _process_limits(root: Path) -> Iterator[Memory]:
    """`ulimit -v` and `ulimit -d`, less what is mapped already."""
    try:
        import resource
    except ImportError:
        return
    sizes = _read(root / "proc/self/statm").split()
    if len(sizes) < 6:
        return
    page = os.sysconf("SC_PAGE_SIZE")
    for name, which, used in (("v", resource.RLIMIT_AS, sizes[0]), ("d", resource.RLIMIT_DATA, sizes[5])):
        limit = resource.getrlimit(which)[0]
        if limit != resource.RLIM_INFINITY:
            yield Memory(max(0, limit - int(used) * page), f"the process's limit, ulimit -{name}")


def _quota(root: Path) -> float | None:
    """The tightest CPU quota of any control group above this process, in cores."""
    found: list[float] = []
    for group in _groups(root, "cpu"):
        words = _read(group / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, as far as they can be seen here."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base = (
                mount
                if (mount / "cgroup.controllers").exists() or not (mount / controller).is_dir()
                else mount / "unified"
            )
        elif controller in controllers.split(","):
            base = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for n in range(len(parts), -1, -1):  # inside a container only some of these exist, often the last alone
            yield base.joinpath(*parts[:n])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max", "-1" and nothing at all: no limit


def _list(text: str) -> list[int]:
    """'0-2,5' as numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found += range(int(first), int(last or first) + 1)
    return found


def gpu_devices(root: Path = Path("/")) -> list[str]:
    """Device files of NVIDIA GPUs that this process can see; cheap, and no proof that one works.

    A driver without device files (a container that was not given them) is no GPU. WSL has one file for all.
    """
    dev = root / "dev"
    try:
        found = sorted(p.name for p in dev.iterdir() if p.name.startswith("nvidia") and p.name[6:].isdigit())
    except OSError:
        return []
    if not found and (dev / "dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        return ["dxg"]
    return found
