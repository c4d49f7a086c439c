"""`quire doctor`: check this machine and this installation, and print a cure beside everything that is wrong.

A check is a function that returns findings; a finding passes, warns or fails. Nothing is changed (only a measurement
of thread counts is kept), and nothing is asked of the network unless `--network` says so. Exit code 1 when something fails.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from quire.cli.terminal import ui
from quire.cli.version import kernels
from quire.config import DEFAULT_MODEL, EngineConfig, Environment, ServerConfig, available_cores
from quire.machine import look_at_cores, look_at_memory
from quire.observe.errors import QuireError
from quire.weights.download.progress import mb
from quire.weights.store.store import Store

Status = Literal["pass", "warn", "fail"]
COLOURS: dict[Status, int] = {"pass": ui.GREEN, "warn": ui.YELLOW, "fail": ui.RED}
# The features that decide which kernels run, of the many that a CPU has.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "sve")  # fmt: skip
OLDEST_PYTHON = (3, 11)
LITTLE_MEMORY = 1 << 30
LITTLE_DISK = 2 << 30


class Finding(msgspec.Struct, frozen=True):
    """What one look found."""

    check: str
    status: Status
    detail: str
    cure: str = ""


def command(
    about: Annotated[
        str | None,
        typer.Argument(help="cache: ask a running server what makes it compute prompts again.", show_default=False),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every model whole and compare its digest.")] = False,
    network: Annotated[bool, typer.Option("--network", help="Try to reach the sources of models.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Also print which implementation runs each op.")] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure again how many threads are fastest, and remember it.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port that `quire serve` would use.")] = 8000,
    url: Annotated[
        str | None, typer.Option(help="With cache: the server's address. Default: the one that runs here.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With cache: which of the server's models.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With cache: the key to ask with. Better: QUIRE_API_KEY.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check this machine, and say how to cure what is wrong. `doctor cache` does so for a running server's prompts."""
    env = Environment.read()
    if about is not None:
        if about != "cache":
            raise typer.BadParameter(f"there is only cache, and not {about!r}", param_hint="doctor")
        from quire.cli.doctor_cache import report

        report(env, url, model, api_key, json)
        return
    if url or model or api_key:
        raise typer.BadParameter("--url, --model and --api-key are for `quire doctor cache`", param_hint="doctor")
    _machine(env, port, json, deep=deep, network=network, ops=ops, tune=tune)


def _machine(env: Environment, port: int, json: bool, *, deep: bool, network: bool, ops: bool, tune: bool) -> None:
    store = Store(env)
    speeds = thread_table(env, tune)
    found: list[Finding] = []
    checks: list[Callable[[], Iterator[Finding]]] = [
        python,
        native,
        lambda: cpu(env),
        gpu,
        memory,
        lambda: disk(env.home),
        lambda: models(store, deep),
        lambda: free_port(port),
    ]
    if network:
        checks.append(lambda: reach(store))
    for check in checks:
        for finding in check():
            found.append(finding)
            if not json:
                _print(finding)
    table = op_table(env) if ops else []
    if json:
        ui.emit({"findings": found, **({"ops": table} if ops else {}), **({"threads": speeds} if speeds else {})})
        speeds = []
    if speeds:
        typer.echo("")
        rows = [
            (r["threads"], r["pinned to"], r["decode GB/s"], r["prefill G multiply-adds/s"], r["note"]) for r in speeds
        ]
        ui.table(("THREADS", "PINNED TO", "DECODE GB/s", "PREFILL GMAC/s", ""), rows)
    if ops and not json:
        typer.echo("")
        ui.table(("OP", "BACKEND", "IMPLEMENTATION"), [(r["op"], r["backend"], r["implementation"]) for r in table])
    if any(f.status == "fail" for f in found):
        raise typer.Exit(1)


def _print(f: Finding) -> None:
    ui.echo(f"{ui.style(f.status, COLOURS[f.status], sys.stdout)}  {f.check}: {f.detail}")
    if f.cure:
        ui.echo(f"      cure: {f.cure}")


def python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info[:2] >= OLDEST_PYTHON:
        yield Finding("python", "pass", f"{version} at {sys.executable}")
    else:
        yield Finding("python", "fail", f"{version} is too old", "install Python 3.11 or newer")


def native() -> Iterator[Finding]:
    isa, why = kernels()
    if isa is None and why.startswith("QUIRE_ISA"):
        yield Finding("native kernels", "fail", why, "unset QUIRE_ISA, or set it to one of those")
    elif isa is None:
        cure = "`pip install .` (or `make`) in the checkout builds it; a C++ compiler is needed (apt install g++)"
        yield Finding("native kernels", "fail", f"the native extension cannot be loaded: {why}", cure)
    elif isa == "scalar":
        cure = "unset QUIRE_ISA if it is set; otherwise this CPU has no kernels here yet: expect slow answers"
        yield Finding("native kernels", "warn", "the portable scalar kernels are in use", cure)
    else:
        yield Finding("native kernels", "pass", isa)


def cpu(env: Environment) -> Iterator[Finding]:
    features = cpu_features()
    has = ", ".join(f for f in FEATURES if f in features) or "no vector extension that matters here is visible"
    yield Finding("cpu", "pass", f"{platform.machine()}: {has}")
    from quire.engine.construction.build import choose_threads

    cores = available_cores()
    try:
        threads, _, why = choose_threads(EngineConfig(path="", backend="native"), env)
    except QuireError as e:
        yield Finding("cores", "fail", e.message, e.cure)
        return
    if threads > cores:
        yield Finding("cores", "warn", why, f"QUIRE_THREADS={threads} is more than {cores} cores: decoding slows down")
    else:
        yield Finding("cores", "pass", why)


def gpu() -> Iterator[Finding]:
    """What `--device auto` means here. A GPU that is there and cannot be used is worth a word."""
    from quire.backends.detect import detect
    from quire.machine import gpu_devices

    found = detect()
    unused = found.backend != "cuda" and bool(gpu_devices())
    cure = "the reason names what is missing; --device cpu uses the CPU knowingly" if unused else ""
    yield Finding("gpu", "warn" if unused else "pass", f"--device auto is {found.backend}: {found.why}", cure)


def cpu_features(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the kernel says the CPU can do; empty where it does not say."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {"asimd", "asimddp"} if platform.system() == "Darwin" and platform.machine() == "arm64" else set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def memory() -> Iterator[Finding]:
    memory = look_at_memory()
    detail = f"{mb(memory.available)} available ({memory.bound})"
    if memory.available < LITTLE_MEMORY:
        yield Finding("memory", "warn", detail, "close something, or use a smaller model and --kv-memory")
    else:
        yield Finding("memory", "pass", detail)


def disk(home: Path) -> Iterator[Finding]:
    folder = home
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield Finding(
            "disk", "fail", f"the store at {home} cannot be written", "set QUIRE_HOME to a folder you can write to"
        )
    elif free < LITTLE_DISK:
        cure = "free some (`quire rm NAME`), or set QUIRE_HOME to a larger disk"
        yield Finding("disk", "warn", f"{mb(free)} free for the store at {home}", cure)
    else:
        yield Finding("disk", "pass", f"{mb(free)} free for the store at {home}")


def models(store: Store, deep: bool) -> Iterator[Finding]:
    problems = store.problems()
    for p in problems:
        yield Finding("store", "fail" if p.fatal else "warn", p.text, p.cure)
    listed = store.list()
    if deep:
        for m in listed:
            try:
                store.verify(m.name, ui.progress())
                yield Finding("store", "pass", f"{m.name}: its digest is right")
            except QuireError as e:
                yield Finding("store", "fail", e.message, e.cure)
    elif not problems:
        total = mb(sum(m.size for m in listed))
        detail = f"{len(listed)} model{'s' if len(listed) > 1 else ''}, {total}" if listed else "empty"
        cure = "" if listed else f"`quire pull {DEFAULT_MODEL}` fetches the default model"
        yield Finding("store", "pass", detail, cure)


def free_port(port: int) -> Iterator[Finding]:
    host = ServerConfig().host
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself would bind
        try:
            s.bind((host, port))
        except OSError as e:
            cure = "`quire ps` shows whether it is one of ours; `quire serve --port N` takes another"
            yield Finding("port", "warn", f"{host}:{port} cannot be used: {e.strerror}", cure)
            return
    yield Finding("port", "pass", f"{host}:{port} is free")


def reach(store: Store) -> Iterator[Finding]:
    """Each source of the default model is asked where its bytes are; the hub is asked for its front page."""
    from dataclasses import replace

    from quire.weights import sources
    from quire.weights.download.web import host_of
    from quire.weights.store.catalogue import look_up

    http = replace(store.http, attempts=1, timeout=10.0)
    found: list[str] = []
    failed: list[QuireError] = []
    for reference in look_up(DEFAULT_MODEL).references:
        try:
            where = sources.load(reference.scheme).locate(reference.target, store.env, http)
            found.append(host_of(where.url) if isinstance(where, sources.Remote) else "this machine")
        except QuireError as e:
            failed.append(e)
    for host in found:
        yield Finding("network", "pass", f"{DEFAULT_MODEL} can be had from {host}")
    for e in failed:  # one source is enough
        yield Finding("network", "warn" if found else "fail", e.message, e.cure)
    try:
        http.head(store.env.hf_endpoint)
        yield Finding("network", "pass", f"{host_of(store.env.hf_endpoint)} answers")
    except QuireError as e:
        yield Finding("network", "warn", e.message, e.cure or "hf: names will not work; the others do")


def thread_table(env: Environment, again: bool) -> list[dict[str, str]]:
    """What was measured of each thread count; empty where nothing was. `again` measures now."""
    from quire.backends.native import available
    from quire.backends.native.tune import decide

    try:
        made = decide(env.home, look_at_cores(), env.isa or available()[0], again=again)
    except QuireError:
        return []  # the kernels' own finding says why
    return [
        {
            "threads": str(s.candidate.threads),
            "pinned to": ",".join(map(str, s.candidate.cores)) or "none",
            "decode GB/s": f"{s.stream / 1e9:.1f}",
            "prefill G multiply-adds/s": f"{s.compute / 1e9:.0f}",
            "note": f"chosen, measured {made.measured}" if s.candidate == made.candidate else "",
        }
        for s in made.speeds
    ]


def op_table(env: Environment) -> list[dict[str, str]]:
    """op x backend -> what runs it, or why nothing does."""
    from quire.backends.choose import NAMES, open_backend
    from quire.backends.ops import TABLE

    rows: list[dict[str, str]] = []
    for name in NAMES:
        try:
            does = open_backend(name, isa=env.isa).implementations()
            why = "not implemented"
        except Exception as e:  # a backend that cannot start is an answer here, not a failure
            does, why = {}, f"unavailable: {e}"
        rows += [{"op": op.name, "backend": name, "implementation": does.get(op.name, why)} for op in TABLE]
    return sorted(rows, key=lambda r: [op.name for op in TABLE].index(r["op"]))
