"""The whole server without a model: HTTP, dialects, chat, the engine's loop and its masks, over logits that are noise.

What comes back was never meant by anybody, so whatever satisfies its constraint does so because it was held to it. The
template has reasoning and tool calls, whose marks are control tokens, and the noise likes to write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from quire.backends.ops import KV
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.chat.completer import Completer
from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.config import EngineConfig
from quire.engine.constraints.enforce import ConstraintMasks
from quire.engine.engine import Engine
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.types import EngineInfo
from quire.runner.runner import Runner
from tests.unit.chat.tools.test_reading import HERMES
from tests.unit.chat.toys import byte_level
from tests.unit.server.fakes import MODEL

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PAGE, PAGES, SLOTS, BUDGET, CONTEXT = 16, 400, 8, 256, 1024


def _tokenizer() -> Tokenizer:
    metadata = byte_level()
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    more = {"tokenizer.ggml.tokens": [*tokens, *MARKS], "tokenizer.ggml.token_type": [*types, 3, 3, 3, 3]}
    return Tokenizer.from_gguf({**metadata, **more})


TOKENIZER = _tokenizer()
V = TOKENIZER.vocab_size
BIAS = np.zeros(V, np.float32)
for _text, _more in ((b'"', 5), (b"}", 5), (b"]", 5), (b":", 3), (b",", 1), (b"0", 4), (b"1", 4), (b"<", 3)):
    BIAS[next(i for i in range(V) if TOKENIZER.token_bytes(i) == _text)] = _more
for _mark, _more in (("<think>", 12), ("</think>", 6), ("<tool_call>", 4), ("</tool_call>", 6)):
    BIAS[TOKENIZER.token_id(_mark)] = _more
BIAS[list(TOKENIZER.eos_ids)] = 5


class Noise:
    """A program that computes nothing: a row depends on its token and place alone."""

    def run(self, batch: Any) -> np.ndarray:
        made = [
            np.random.default_rng([int(batch.ids[r]), int(batch.pos[r])]).normal(0.0, 2.0, V) for r in batch.logit_rows
        ]
        return np.array(made, np.float32) + BIAS


def build(config: EngineConfig, env: Any, progress: Any = None) -> tuple[Engine, EngineInfo]:
    """As `build_engine`."""
    masks = ConstraintMasks(V)
    limits = (*standard(SLOTS + 8, PAGE), masks.limit)
    tree = PrefixTree(Pool(PAGES), PAGE)
    scheduler = Scheduler(tree, slots=SLOTS, budget=BUDGET, context=CONTEXT, draw=lambda: 7, limits=limits)
    runner = Runner(
        Noise(),
        kv=KV(1, PAGES, PAGE, 1, 2),
        vocab_size=V,
        max_seqs=SLOTS,
        max_tokens=BUDGET,
        max_context=CONTEXT,
        max_rows=SLOTS + 8,
        overlap=False,
    )
    info = EngineInfo(
        model=MODEL,
        architecture="noise",
        vocab_size=V,
        context=CONTEXT,
        max_seqs=SLOTS,
        max_batch_tokens=BUDGET,
        pages=PAGES,
        page_size=PAGE,
        backend="noise",
        weight_bytes=1,
        kv_bytes=1,
    )
    return Engine(scheduler, runner, 0, masks=masks), info


@contextmanager
def noisy() -> Iterator[Completer]:
    """A completer over such an engine."""
    client = InProcessClient(EngineConfig(path="noise"), build=build)
    info = client.wait()
    try:
        yield Completer(client, TOKENIZER, ChatTemplate(HERMES, "", ""), info)
    finally:
        thread = client.stop()
        if thread is not None:
            thread.join(10)
