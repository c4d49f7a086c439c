"""A random two-layer Llama-shaped model on the reference backend, made row-exact, and naive generation with it.

numpy's matrix product may round a row differently in a taller matrix. `RowExact` computes each row on its own, so that
tests can ask for equal bits however the tokens were cut into steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.backends.reference.backend import ReferenceBackend, ReferenceOps, ReferenceProgram
from quire.layouts import Dense, Floats, Layout, Rope
from quire.models.kv_layout import KVLayout
from quire.runner.params import SamplingParams
from quire.runner.plan import Open, Work
from quire.runner.runner import Runner
from tests.unit.runner import naive_sampling

V, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 89, 16, 4, 2, 4, 2
PAGE = 4
CONTEXT = 64


class RowExact(ReferenceOps):
    def linear(self, x: Floats, weight: Layout, bias: Dense | None = None) -> Floats:
        w = self._backend.dense(weight)
        return np.array([(w * row).sum(axis=1) for row in x], np.float32).reshape(len(x), w.shape[0])

    def attention(
        self, q, k, v, batch: Batch, *, layer: int, heads: int, scale: float, window: int | None = None, group: int = 0
    ) -> Floats:
        table, caches = batch.table(group), (self._keys[group], self._values[group])
        for cache, x in zip(caches, (k, v), strict=True):
            cache.write(layer, table.write, x)
        out = np.empty_like(q)
        for b in range(batch.sequences):
            for t in range(batch.q_start[b], batch.q_start[b + 1]):
                low = 0 if window is None else max(0, batch.pos[t] + 1 - window)
                where = np.arange(low, batch.pos[t] + 1)
                assert batch.pos[t] < batch.kv_len[b]
                pages = table.pages[b, where // PAGE]
                assert pages.min() >= 0
                past = [cache.read(layer, pages * PAGE + where % PAGE).astype(np.float64) for cache in caches]
                past_k, past_v = (np.repeat(a, heads // KV_HEADS, 1) for a in past)
                score = (past_k * q[t].reshape(heads, HEAD_DIM)).sum(axis=-1) * scale  # [S, H]
                weight = np.exp(score - score.max(axis=0))
                weight /= weight.sum(axis=0)
                out[t] = (weight[..., None] * past_v).sum(axis=0).ravel()
        return out


class TinyLlama:
    def __init__(
        self,
        seed: int = 0,
        windows: tuple[int | None, ...] = (None,) * LAYERS,
        *,
        head_dim: int = HEAD_DIM,
        vocab: int = V,
    ):
        """`head_dim`: another one for backends that have no heads as small as RowExact's."""
        self.head_dim = head_dim
        self.kv_layout = KVLayout(windows, CONTEXT)
        self.kv_layout.split()
        rng = np.random.default_rng(seed)

        def weight(*shape: int) -> Dense:
            return Dense((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32), "f32")

        self.table, self.head = weight(vocab, WIDTH), weight(vocab, WIDTH)
        self.head.data[:] *= 8
        self.table.data[:] *= 4
        self.norm = Dense(np.ones(WIDTH, np.float32), "f32")
        kv = KV_HEADS * head_dim
        shapes = (
            (HEADS * head_dim, WIDTH),
            (kv, WIDTH),
            (kv, WIDTH),
            (WIDTH, HEADS * head_dim),
            (32, WIDTH),
            (32, WIDTH),
        )
        self.layers = [[weight(*shape) for shape in (*shapes, (WIDTH, 32))] for _ in range(LAYERS)]
        self.rope = Rope(0.1 ** np.arange(head_dim // 2, dtype=np.float32), head_dim, pairs=True)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = ops.embed(batch.ids, self.table)
        for i, (wq, wk, wv, wo, gate, up, down) in enumerate(self.layers):
            ops.mark(x, i)
            h = ops.rms_norm(x, self.norm, 1e-5)
            q = ops.rope(ops.linear(h, wq), batch.pos, self.rope, HEADS)
            k = ops.rope(ops.linear(h, wk), batch.pos, self.rope, KV_HEADS)
            (group, layer), window = self.kv_layout[i], self.kv_layout.windows[i]
            own = {"layer": layer, "group": group, "window": window}
            a = ops.attention(q, k, ops.linear(h, wv), batch, heads=HEADS, scale=self.head_dim**-0.5, **own)
            x = ops.add(x, ops.linear(a, wo))
            h = ops.rms_norm(x, self.norm, 1e-5)
            x = ops.add(x, ops.linear(ops.swiglu(ops.linear(h, gate), ops.linear(h, up)), down))
        ops.mark(x, LAYERS)
        return self.logits(ops, batch, ops.rms_norm(ops.take(x, batch.logit_rows), self.norm, 1e-5))

    def logits(self, ops: Ops, batch: Batch, x: Tensor) -> Tensor:
        return ops.linear(x, self.head)


MODEL = TinyLlama()


def kv(pages: int | tuple[int, ...], model: TinyLlama = MODEL) -> KV:
    made = model.kv_layout.kv(1, PAGE, KV_HEADS, HEAD_DIM)
    return made.sized(pages if isinstance(pages, tuple) else (pages,) * len(made.groups))


def program(pages: int | tuple[int, ...], model: TinyLlama = MODEL) -> ReferenceProgram:
    ops = RowExact(ReferenceBackend(), kv(pages, model))
    for cache in (*ops._keys, *ops._values):
        cache._data[:] = np.nan  # whatever was never written must never be read
    return ReferenceProgram(model.forward, ops)


def make_runner(
    *,
    pages: int | tuple[int, ...] = 64,
    overlap: bool = False,
    run=None,
    max_rows: int = 40,
    max_seqs: int = 8,
    model: TinyLlama = MODEL,
    proposer=None,
) -> Runner:
    return Runner(
        run or program(pages, model),
        kv=kv(pages, model),
        vocab_size=V,
        max_seqs=max_seqs,
        max_tokens=64,
        max_context=CONTEXT,
        max_rows=max_rows,
        overlap=overlap,
        proposer=proposer,
    )


def all_logits(tokens: list[int], model: TinyLlama = MODEL) -> Floats:
    """Every row, in one batch of one sequence with pages in order: [len(tokens), V]. The model has one group."""
    n = len(tokens)
    pages = -(-n // PAGE)
    count = np.arange(n, dtype=np.int32)
    batch = Batch(
        ids=np.array(tokens, np.int32),
        pos=count,
        q_start=np.array([0, n], np.int32),
        kv_len=np.array([n], np.int32),
        pages=np.arange(pages, dtype=np.int32)[None],
        write=count,
        logit_rows=count,
    )
    return program(pages, model).run(batch)


def generate(
    prompt: list[int],
    params: SamplingParams,
    seed: int,
    n: int,
    stop_ids: list[int] | None = None,
    model: TinyLlama = MODEL,
) -> list[int]:
    """n tokens by recomputing everything for each and sampling naively."""
    output: list[int] = []
    for _ in range(n):
        row = all_logits(prompt + output, model)[-1]
        output.append(naive_sampling.sample(row, params, seed, prompt=prompt, output=output, stop_ids=stop_ids or []))
    return output


def opening(
    slot: int, tokens: list[int], params: SamplingParams, *, prompt_len: int | None = None, seed: int = 7
) -> Open:
    prompt_len = len(tokens) if prompt_len is None else prompt_len
    return Open(slot=slot, sampling=params, seed=seed, tokens=list(tokens), prompt_len=prompt_len, stop_ids=[2, 3])


def known(slot: int, tokens: list[int], start: int, **more) -> Work:
    """Tokens that the host knows."""
    return Work(key=slot, epoch=0, slot=slot, n=len(tokens), start=start, tokens=list(tokens), **more)


def decode(slot: int, **more) -> Work:
    """The token that the device sampled last."""
    return Work(key=slot, epoch=0, slot=slot, n=1, start=-1, tokens=None, sample=True, **more)
