"""An engine that writes, from a model and a backend that are open already: memory, program, scheduler, runner.

It embeds, too: its program keeps the rows behind the last norm, and a request may want a vector of them in place of tokens.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from quire.backends.ops import KV, Backend, Forward, Idles, Program, check_kv
from quire.backends.outputs import Hidden
from quire.cache.loading import Loader
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.cache.secret import Secret
from quire.config import PAGE_SIZE, EngineConfig, Environment
from quire.engine.constraints.enforce import ConstraintMasks
from quire.engine.construction.adapters import open_adapted
from quire.engine.construction.fingerprint import naming
from quire.engine.construction.memory import Budget, group_of
from quire.engine.construction.parts import Parts
from quire.engine.construction.sizes import Sizes, pool_of, resolve_sizes
from quire.engine.construction.tasks import declared
from quire.engine.engine import NO_ADAPTERS, Engine
from quire.engine.hooks import TextsBeside
from quire.engine.limits import Limit, StepTime, standard
from quire.engine.pacing import Pace
from quire.engine.pages import Pages
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence as Sequence_
from quire.engine.spans import SpanHooks
from quire.engine.types import EngineInfo
from quire.models import Grouped, SeveralAxes
from quire.models.embedding import Pooling, of_gguf
from quire.observe.costs import Costs
from quire.observe.errors import NotEnoughMemory, QuireError, Unsupported
from quire.runner.choose import open_runner
from quire.runner.pooler import Pooler
from quire.weights.gguf.file import GGUF

STEP_DRAFTS = 16, 256  # draft tokens in a step at most, of all sequences: on a CPU, where rows cost, and on a GPU
EXTRA_ROWS = 64  # logit rows beyond one per sequence, for prompt logprobs; each is as wide as the vocabulary


def build_writing(
    config: EngineConfig, env: Environment, parts: Parts, lap: Callable[[str], None]
) -> tuple[Engine, EngineInfo]:
    """The engine; decisions are the lines of this part alone."""
    model, backend = parts.model, parts.backend
    if isinstance(model, Grouped):
        model.kv_layout.split()  # a pool for each kind of layer
    _check(config, parts)
    drafts, step_drafts = _drafts(config)
    pooling, pooling_lines = _pooling(parts)
    pooler = None if pooling is None else Pooler(pooling)
    keep = [] if pooler is None else [pooler.keep]
    max_rows = config.max_seqs + EXTRA_ROWS + step_drafts
    adapted = open_adapted(config, model, parts.checkpoint)
    forward = model.forward if adapted is None else adapted.forward
    budget = parts.budget(
        config,
        env,
        forward,
        pool_of(config, model),
        max_tokens=config.max_batch_tokens,
        max_rows=max_rows,
        room=0 if adapted is None else adapted.room,
        keep=keep,
    )
    sizes = resolve_sizes(config, env, model, budget)
    kv = pool_of(config, model).sized(sizes.groups)
    lap("sizes")
    program = _program(config, parts, forward, kv, max_rows, budget, keep)
    lap("weights")
    depth = int(budget.own) if config.depth is None else config.depth
    masks = ConstraintMasks(model.config.vocab_size)
    secret = Secret(env.home)
    tree = _tree(kv)
    runner = open_runner(
        program,
        kv=kv,
        vocab_size=model.config.vocab_size,
        max_seqs=config.max_seqs,
        max_tokens=config.max_batch_tokens,
        max_context=sizes.context,
        max_rows=max_rows,
        overlap=depth > 0,
        speculate=config.speculate,
        drafts=drafts,
        pooler=pooler,
    )
    try:
        spans = SpanHooks(
            NO_ADAPTERS if adapted is None else adapted.hooks(program, runner, secret),
            width=model.config.width,
            axes=model.axes if isinstance(model, SeveralAxes) else 1,
        )
    except BaseException:
        runner.close()  # its thread would hold the model for good
        raise
    pace = Pace(Costs(), None if config.itl_slo is None else config.itl_slo / 1000)
    hooks = TextsBeside(
        spans,
        context=sizes.context,
        vocab_size=model.config.vocab_size,
        whole=pooling is not None and pooling.kind != "last",
    )
    lap("engine")
    lines = [
        *sizes.lines,
        *_kv_line(config, kv, backend),
        *([] if adapted is None else adapted.lines(hooks.listed())),
        f"a step: at most {config.max_batch_tokens} tokens of {config.max_seqs} sequences; "
        f"prefix cache {'on' if config.prefix_cache else 'off'}, depth {depth}",
        *_drafts_line(config, drafts, step_drafts),
        pace.line,
        *([f"first token: promised within {config.ttft_slo} ms (asked for)"] if config.ttft_slo else []),
        *pooling_lines,
    ]
    info = _info(config, parts, sizes, kv, pooling, lines)
    if adapted is not None:
        info = msgspec.structs.replace(info, adapters=hooks.listed(), max_adapters=config.max_loras)
    idle = program.idle if isinstance(program, Idles) else None
    loader = Loader(tree, runner, time.monotonic)
    scheduler = _scheduler(config, tree, sizes.context, max_rows, drafts, step_drafts, masks, pooler is not None, pace)
    pages = Pages(tree, naming(config, env.home, parts, program, len(kv.groups), secret), loader, scheduler.load_from)
    return Engine(scheduler, runner, depth, masks=masks, hooks=hooks, idle=idle, pages=pages), info


def _info(
    config: EngineConfig, parts: Parts, sizes: Sizes, kv: KV, pooling: Pooling | None, lines: list[str]
) -> EngineInfo:
    """The description of an engine without adapters."""
    model = parts.model.config
    return EngineInfo(
        model=parts.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        context=sizes.context,
        max_seqs=config.max_seqs,
        max_batch_tokens=config.max_batch_tokens,
        pages=sizes.pages,
        page_size=PAGE_SIZE,
        backend=parts.backend.describe(),
        weight_bytes=parts.weight_bytes,
        kv_bytes=kv.nbytes,
        dimensions=0 if pooling is None else model.width,
        cuts=None if pooling is None else pooling.cuts,
        prompts={} if pooling is None else pooling.prompts,
        decisions=lines,
    )


def _check(config: EngineConfig, parts: Parts) -> None:
    """Refuse what this model or backend cannot do, before any weight is read."""
    pool = pool_of(config, parts.model)
    check_kv(pool, parts.backend)
    if config.speculate != "none" and any(own.state for own in pool.groups):
        raise Unsupported(
            f"--speculate {config.speculate}: a {parts.model.config.architecture} has layers that carry a state, and what is "
            "folded into one cannot be taken back when a draft token is rejected",
            cure="leave --speculate out",
        )


def _pooling(parts: Parts) -> tuple[Pooling | None, list[str]]:
    """How rows become an embedding, and what is to be told of it; None where the checkpoint asks for what is not supported."""
    checkpoint = parts.checkpoint
    if isinstance(checkpoint, GGUF) and not declared(checkpoint):
        pooling = of_gguf("last")
    else:
        from quire.models.pooling import pooling_of

        try:
            pooling = pooling_of(checkpoint, encoder=False)
        except QuireError as error:  # no reason not to generate
            return None, [f"no embeddings: {error}"]
    return pooling, [f"embeddings: {line}" for line in pooling.lines]


def _program(
    config: EngineConfig,
    parts: Parts,
    forward: Forward,
    kv: KV,
    max_rows: int,
    budget: Budget,
    keep: Sequence[Hidden],
) -> Program:
    try:
        return parts.backend.compile(
            forward, kv=kv, max_tokens=config.max_batch_tokens, max_rows=max_rows, packed=parts.packed, keep=keep
        )
    except MemoryError:  # somebody else was faster, or there is a limit that nobody can see
        raise NotEnoughMemory(
            f"the system refused memory while the model was loaded, though it seemed to fit: {budget.line(kv.nbytes)}",
            cure="free some memory, or ask for less KV memory",
        ) from None


def _tree(kv: KV) -> PrefixTree:
    first, *more = [(group_of(k), Pool(k.pages)) for k in kv.groups]
    return PrefixTree(first[1], PAGE_SIZE, first[0], more)


def _scheduler(
    config: EngineConfig,
    tree: PrefixTree,
    context: int,
    max_rows: int,
    drafts: int,
    step_drafts: int,
    masks: ConstraintMasks,
    vectors: bool,
    pace: Pace,
) -> Scheduler:
    ahead = (step_drafts, config.max_batch_tokens) if drafts else None
    promised = [] if not config.ttft_slo else [_promise(config, tree, pace)]
    return Scheduler(
        tree,
        slots=config.max_seqs,
        budget=StepTime(config.max_batch_tokens, pace),
        context=context,
        draw=lambda: int.from_bytes(os.urandom(8), "little") >> 1,
        limits=(*standard(max_rows, PAGE_SIZE if config.prefix_cache else None, ahead), masks.limit, *promised),
        drafts=drafts,
        prefix_cache=config.prefix_cache,
        vectors=vectors,
    )


def _promise(config: EngineConfig, tree: PrefixTree, pace: Pace) -> Limit:
    """What refuses requests whose first token would come too late."""
    from quire.engine.first_token import FirstToken

    def cached(seq: Sequence_) -> int:
        if not config.prefix_cache:
            return 0
        lease = tree.match(seq.request.namespace, seq.tokens, seq.reusable)
        pages = lease.shared
        tree.release(lease)
        return pages * tree.page_size

    return FirstToken(config.ttft_slo / 1000, pace, config.max_seqs, config.max_batch_tokens, cached)


def _kv_line(config: EngineConfig, kv: KV, backend: Backend) -> list[str]:
    """A line for people about the KV type and what it costs, unless it is the plain one."""
    if config.kv_dtype == "auto":
        return []

    def each(dtype: str) -> int:
        return sum(dataclasses.replace(k, dtype=dtype).token_bytes for k in kv.groups)

    beside = ", ".join(f"{name}: {each(name)}" for name in backend.kv_dtypes if name != kv.dtype)
    return [f"KV cache: {kv.dtype}, {each(kv.dtype)} bytes per token ({beside})"]


def _drafts(config: EngineConfig) -> tuple[int, int]:
    """Draft tokens for a sequence in a step, and for all of them together."""
    if config.speculate == "none":
        return 0, 0
    most = min(STEP_DRAFTS[config.backend == "cuda"], config.max_seqs * config.draft_tokens)
    return config.draft_tokens, max(config.draft_tokens, most)


def _drafts_line(config: EngineConfig, drafts: int, step_drafts: int) -> list[str]:
    if not drafts:
        return []
    return [
        f"speculation: {config.speculate}, up to {drafts} tokens ahead of a sequence and {step_drafts} in a step; "
        "tokens stay the same, and so do their odds"
    ]
