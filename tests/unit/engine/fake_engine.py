"""An engine whose device is a counter: the real loop, the real scheduler, and a runner that adds one to the last token.

`build` has build_engine's signature, so that the clients' tests run it in a real child process. What it should do badly
is said in the configuration's path, as words: "slow=0.01" sleeps that long in each step, "burn=2" works that long in each
step with prompt tokens, and the others are below. Its hooks take anything for an adapter, and words of its path likewise.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.config import EngineConfig, Environment, resolve_step
from quire.engine.engine import Engine
from quire.engine.hooks import NoAdapters
from quire.engine.scheduler import Scheduler
from quire.engine.types import AdapterInfo, EngineInfo
from quire.observe.errors import BadModelFile, NotFound
from quire.runner.plan import Plan, Result, Row

VOCAB = 1000
POISON = 666  # a prompt with this token makes its step raise
DEADLY = 667  # a prompt with this token ends the process
STUCK = 668  # a prompt with this token never comes out of its step


@dataclass
class Ticket:
    rows: list[Row]
    slow: float = 0.0
    error: Exception | None = None

    def result(self) -> Result:
        if self.slow:
            time.sleep(self.slow)
        if self.error is not None:
            raise self.error
        return Result(rows=self.rows)


@dataclass
class CountingRunner:
    """Token after t is t + 1. Remembers the last token of each slot, as a device does."""

    slow: float = 0.0
    burn: float = 0.0  # seconds of work in a step with prompt tokens
    last: dict[int, int] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    fail_at: str = "forward"  # or "result": where poison acts

    def forward(self, plan: Plan) -> Any:
        self.plans.append(plan)
        for work in plan.work:
            if work.tokens and DEADLY in work.tokens:
                os._exit(9)
            if work.tokens and STUCK in work.tokens:
                threading.Event().wait()
            if work.tokens and self.burn:
                end = time.process_time() + self.burn
                while time.process_time() < end:
                    pass
            if work.tokens and POISON in work.tokens and self.fail_at == "forward":
                raise FloatingPointError("poison")
        return plan

    def close(self) -> None:
        pass

    def sample(self, pending: Plan) -> Ticket:
        rows, error = [], None
        for work in pending.work:
            if work.tokens is not None:
                self.last[work.slot] = work.tokens[-1]
                if POISON in work.tokens:
                    error = FloatingPointError("poison")
            if work.sample:
                self.last[work.slot] = token = (self.last[work.slot] + 1) % VOCAB
                rows.append(Row(accepted=work.n, tokens=[token]))
            else:
                rows.append(Row(accepted=work.n))
        return Ticket(rows, self.slow, error)


class OpenHooks(NoAdapters):
    """Adapters that are nothing but names. A load waits for the file `release`, and dies where the file `mark` is."""

    def __init__(self, loras: tuple[tuple[str, str], ...]):
        self.loaded: dict[str, AdapterInfo] = {}
        for name, path in loras:
            self.load(name, path)

    def listed(self) -> list[AdapterInfo]:
        return list(self.loaded.values())

    def load(self, name: str, path: str) -> AdapterInfo:
        words = dict(w.partition("=")[::2] for w in os.path.basename(path).split(","))
        if release := words.get("release", "").replace("|", "/"):
            open(f"{release}.reached", "w").close()
            while not os.path.exists(release):
                time.sleep(0.005)
        if "bad" in words:
            raise BadModelFile("no adapter")
        mark = words.get("mark", "").replace("|", "/")
        if mark and os.path.exists(mark):
            os.remove(mark)
            os._exit(9)
        made = AdapterInfo(name=name, path=os.path.abspath(path), rank=1, modules=1, nbytes=1, digest=path)
        self.loaded[name] = made
        return made

    def unload(self, name: str) -> None:
        if self.loaded.pop(name, None) is None:
            raise NotFound(f"there is no adapter {name!r}")


def make(config: EngineConfig, runner: Any, *, pages: int = 512, context: int = 4096) -> Engine:
    seqs, tokens = resolve_step(config.max_seqs, config.max_batch_tokens, False)
    scheduler = Scheduler(
        PrefixTree(Pool(pages), 16),
        slots=seqs,
        budget=tokens,
        context=context,
        draw=lambda: 7,
    )
    return Engine(scheduler, runner, config.depth, hooks=OpenHooks(config.loras))


def build(config: EngineConfig, env: Environment, progress: Any = None) -> tuple[Engine, EngineInfo]:
    words = dict(w.partition("=")[::2] for w in os.path.basename(config.path).split(","))
    if "bad-model" in words:
        raise BadModelFile("tensor 'x' at byte 12 is broken", cure="fetch it again")
    if "bug" in words:
        raise ZeroDivisionError("a bug")
    if "die-loading" in words:
        os._exit(7)
    if "loads" in words:
        time.sleep(float(words["loads"]))
    if "once" in words:  # loads the first time only
        mark = words["once"].replace("|", "/")
        if os.path.exists(mark):
            raise BadModelFile("the file has gone bad since")
        open(mark, "w").close()
    for i in range(5):
        if progress is not None:
            progress(i + 1, 5)
    seqs, tokens = resolve_step(config.max_seqs, config.max_batch_tokens, False)
    info = EngineInfo(
        model=config.name,
        architecture="counter",
        vocab_size=VOCAB,
        context=4096,
        max_seqs=seqs,
        max_batch_tokens=tokens,
        pages=512,
        page_size=16,
        backend="counter",
        weight_bytes=0,
        kv_bytes=0,
    )
    engine = make(config, CountingRunner(float(words.get("slow", 0)), float(words.get("burn", 0))))
    return engine, msgspec.structs.replace(info, adapters=engine.hooks.listed())
