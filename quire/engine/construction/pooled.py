"""An engine that embeds or scores, from a model and a backend that are open already: program, sizes, scheduler, runner.

`task_of` (tasks.py) says whether a model is for that. An encoder's step holds its longest text, and its memory is what lies
between its layers; a decoder also gets pages for one text of full length, which are scratch: nothing is kept from one text to
the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.backends.ops import KV, Estimator, Program
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.config import PAGE_SIZE, EngineConfig, Environment
from quire.engine.construction.memory import Budget
from quire.engine.construction.parts import Parts
from quire.engine.construction.sizes import pool_of, resolve_sizes
from quire.engine.engine import Engine
from quire.engine.limits import WholePrompts, standard
from quire.engine.policy import FirstCome
from quire.engine.pooled import Texts
from quire.engine.scheduler import Scheduler
from quire.engine.types import EngineInfo
from quire.machine import look_at_memory
from quire.models import Encoder, Model
from quire.models.embedding import Pooling
from quire.models.pooling import ScoreHead, pooling_of
from quire.observe.errors import BadRequest, NotEnoughMemory, Unsupported
from quire.runner.pooled import PooledRunner
from quire.runner.pooler import Pooler

if TYPE_CHECKING:
    from quire.models.reranker import YesNoScore


def build_pooled(
    config: EngineConfig, env: Environment, parts: Parts, task: str, lap: Callable[[str], None]
) -> tuple[Engine, EngineInfo]:
    """The engine; decisions are the lines of this part alone."""
    model = parts.model
    encoder = model if isinstance(model, Encoder) else None
    kv = model.kv(1, PAGE_SIZE)
    _check(config, model, kv, task)
    head, pooling, pair = _ending(parts, encoder, task)
    context, context_line = _context(config, model, pooling)
    budget = max(config.max_batch_tokens, context) if encoder else config.max_batch_tokens
    rows = budget if pooling.kind == "mean" else min(config.max_seqs, budget)
    if encoder is None:
        kv, held, more = _scratch(config, env, parts, budget, rows)
        more = more if held <= context else [context_line, *more[:1], *more[2:]]  # the second is of a longer one
        context = min(held, context)
    else:
        more = [context_line, *_room(parts, encoder, kv, budget, rows)]
    lap("sizes")
    program = _program(parts, encoder, kv, budget, rows)
    lap("weights")
    # An encoder keeps no KV. Its texts are counted all the same: a page that is as long as any of them.
    pages = kv if encoder is None else dataclasses.replace(kv, pages=config.max_seqs, page_size=context)
    scheduler = Scheduler(
        PrefixTree(Pool(pages.pages), pages.page_size),
        slots=config.max_seqs,
        budget=budget,
        context=context,
        draw=lambda: 0,  # nothing is drawn
        limits=(*standard(), *([] if encoder is None else [WholePrompts(budget, context)])),
        prefix_cache=False,
        vectors=True,
        policy=None if encoder is None else FirstCome(),
    )
    runner = PooledRunner(
        program,
        kv=pages,
        vocab_size=model.config.vocab_size,
        max_seqs=config.max_seqs,
        max_tokens=budget,
        max_context=context,
        pooler=Pooler(pooling, head),
        encoder=encoder,
    )
    step = f"a step: at most {budget} tokens of {config.max_seqs} texts; no prefix cache: every text is computed whole"
    info = EngineInfo(
        model=parts.name,
        architecture=model.config.architecture,
        vocab_size=model.config.vocab_size,
        context=context,
        max_seqs=config.max_seqs,
        max_batch_tokens=budget,
        pages=0 if encoder else kv.pages,
        page_size=PAGE_SIZE,
        backend=parts.backend.describe(),
        weight_bytes=parts.weight_bytes,
        kv_bytes=0 if encoder else kv.nbytes,
        decisions=[*pooling.lines, *more, step],
        task=task,
        dimensions=0 if head else model.config.width,
        cuts=pooling.cuts,
        prompts=pooling.prompts,
        separators=encoder.separators if encoder else 1,
        pair=pair,
    )
    hooks = Texts(context=context, vocab_size=model.config.vocab_size)
    return Engine(scheduler, runner, 0, hooks=hooks), info


def _check(config: EngineConfig, model: Model, kv: KV, task: str) -> None:
    """Refuse what has no meaning for a model that embeds or scores, before any weight is read."""
    if config.loras or config.runtime_lora:
        raise Unsupported(f"adapters are for models that generate: this one is loaded to {task}")
    if config.speculate != "none":
        raise BadRequest(f"--speculate is for models that write: this one is for {task}", param="speculate")
    if any(own.state for own in kv.groups):
        raise Unsupported(
            f"a {model.config.architecture} has layers that carry a state, which is not kept when texts are embedded",
            cure="leave --task out: loaded to generate, it embeds, too",
        )


def _ending(
    parts: Parts, encoder: Encoder | None, task: str
) -> tuple[ScoreHead | YesNoScore | None, Pooling, tuple[str, ...]]:
    """What becomes of a text's rows, an embedding or the score that a head makes of one; and of a decoder that scores, what
    stands around a pair."""
    if encoder is None and task == "score":
        from quire.models.reranker import PROMPT, yes_no_score_of

        score = yes_no_score_of(parts.checkpoint, parts.model)
        return score, Pooling("last", False, lines=(score.line,)), PROMPT
    head = None if encoder is None else encoder.head
    if head is None:
        return None, pooling_of(parts.checkpoint, encoder is not None), ()
    how = "through a sigmoid" if head.sigmoid else "as it is"
    return head, Pooling("cls", False, lines=(f"score: of the first token, {how}",)), ()


def _program(parts: Parts, encoder: Encoder | None, kv: KV, budget: int, rows: int) -> Program:
    inputs = {} if encoder is None else encoder.inputs
    try:
        return parts.backend.compile(
            parts.model.hidden, kv=kv, max_tokens=budget, max_rows=rows, inputs=inputs, packed=parts.packed
        )
    except MemoryError:
        raise NotEnoughMemory(
            "the system refused memory while the model was loaded",
            cure="free some memory, or ask for a shorter context",
        ) from None


def _room(parts: Parts, encoder: Encoder, kv: KV, budget: int, rows: int) -> list[str]:
    """Refuse an encoder that does not fit, where its backend can say so beforehand. Gives the line about its memory."""
    if not isinstance(parts.backend, Estimator):
        return []
    needs = parts.backend.estimate(parts.model.hidden, kv=kv, max_tokens=budget, max_rows=rows, inputs=encoder.inputs)
    memory = Budget(look_at_memory(), needs)
    memory.check(kv.nbytes, kv.page_bytes)
    return [memory.line(kv.nbytes)]


def _context(config: EngineConfig, model: Model, pooling: Pooling) -> tuple[int, str]:
    """The longest text, and why."""
    most = model.config.context
    if config.context is not None:
        if config.context > most:
            raise BadRequest(
                f"a context of {config.context} was asked for: the model was made for {most}",
                param="context",
                cure=f"ask for at most {most}",
            )
        return config.context, f"context: {config.context} tokens (asked for; the model was made for {most})"
    if pooling.context is not None and pooling.context < most:
        why = f"sentence_bert_config.json; the model has positions for {most}"
        return pooling.context, f"context: {pooling.context} tokens ({why})"
    return most, f"context: {most} tokens (what the model was made for)"


def _scratch(config: EngineConfig, env: Environment, parts: Parts, budget: int, rows: int) -> tuple[KV, int, list[str]]:
    """Pages for the texts of a step: of one text of full length, or of as many tokens as there is memory for. And how long
    a text they hold, and the lines that say why."""
    model, page = parts.model, pool_of(config, parts.model)
    asked = dataclasses.replace(config, max_seqs=1)
    memory = parts.budget(asked, env, model.hidden, page, max_tokens=budget, max_rows=rows)
    sizes = resolve_sizes(asked, env, model, memory)
    return dataclasses.replace(page, pages=sizes.pages), sizes.context, sizes.lines
