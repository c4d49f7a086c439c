"""The engine on a GPU: graphs against eager steps, depth against depth, random traffic against lone runs, transformers.

Needs an NVIDIA GPU; skipped elsewhere. Models are small, with random weights, in float32 (with float16 keys and values)
where tokens are compared, so that rounding decides nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from quire.backends.cases import ragged  # noqa: E402
from quire.backends.choose import open_backend  # noqa: E402
from quire.backends.torch.backend import largest  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.models.shapes import load_shape  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from tests.gpu import kit  # noqa: E402


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.write_shape(tmp_path_factory.mktemp("shape"))


def engine(shape: str, **options: Any) -> Any:
    return kit.build(shape, load_format="dummy", **({"max_seqs": 16} | options))


def serve(made: Any, requests: list[Request], aborts: dict[str, int] | None = None) -> dict[str, list[int]]:
    """Tokens of every request; `aborts` lets a request go after so many tokens."""
    return kit.serve(made[0], requests, lambda event: event.tokens, together=3, aborts=aborts)


def traffic(rng: random.Random, n: int, greedy: bool = False) -> Iterator[Request]:
    bases = [[rng.randrange(1000) for _ in range(rng.randint(10, 120))] for _ in range(6)]
    for i in range(n):
        kind: dict[str, Any] = {"temperature": 0.0}
        if not greedy and rng.random() < 0.6:
            kind = {
                "temperature": rng.choice([0.5, 1.0]),
                "top_k": rng.choice([0, 20]),
                "top_p": rng.choice([1.0, 0.9]),
                "min_p": rng.choice([0.0, 0.02]),
                "repetition_penalty": rng.choice([1.0, 1.2]),
                "frequency_penalty": rng.choice([0.0, 0.4]),
                "seed": rng.randrange(2**60),
            }
        tokens = rng.choice(bases) + [rng.randrange(1000) for _ in range(rng.randint(0, 40))]
        sampling = SamplingParams(max_tokens=rng.randint(1, 40), logprobs=rng.choice([None, 2]), **kind)
        yield Request(id=f"{i}", tokens=tokens, sampling=sampling)


def differing(have: dict[str, list[int]], want: dict[str, list[int]]) -> list[str]:
    assert have.keys() == want.keys()
    return [name for name in want if have[name] != want[name]]


def test_graphs_and_depth_change_nothing(shape: str):
    """The same traffic: replayed graphs, eager launches, plain torch kernels; depth 0, 1 and 2."""
    requests = list(traffic(random.Random(1), 60))
    made = engine(shape, depth=0)
    runner = made[0]._runner
    assert runner._decode is not None and len(runner._decode.ladder.graphs) >= 5
    want = serve(made, requests)
    for depth in (1, 2):
        assert differing(serve(engine(shape, depth=depth), requests), want) == []
    eager = engine(shape, depth=1)
    eager[0]._runner._decode = None
    assert len(differing(serve(eager, requests), want)) <= 1  # other launch shapes round differently: a tie may flip
    plain = engine(shape, depth=1, backend="torch")
    assert len(differing(serve(plain, requests), want)) <= 2


def test_soak(shape: str):
    """Random requests with shared prefixes, aborts and preemptions, against each request alone in an engine of its own."""
    rng = random.Random(2)
    requests = list(traffic(rng, 2000))
    aborts = {r.id: rng.randint(1, 20) for r in requests if rng.random() < 0.1}
    made = engine(shape, kv_memory=2 << 20)  # so little that sequences are preempted
    have = serve(made, requests, aborts)
    stats = made[0].stats()
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.running == 0
    alone = engine(shape, max_seqs=1, prefix_cache=False, depth=0)
    wrong = 0
    for request in requests:
        want = serve(alone, [request])[request.id]
        got = have[request.id]
        wrong += got != want[: len(got)] if request.id in aborts else got != want
    assert wrong <= 10, f"{wrong} of {len(requests)} differ"  # other launch shapes round differently: a tie may flip


def test_a_shared_prefix_that_is_read_once(shape: str, monkeypatch: pytest.MonkeyPatch):
    """Rows over three common beginnings, every decode step told of them: the tokens of each request alone."""
    monkeypatch.setattr("quire.runner.device.runner.WORTH", 1)
    rng = random.Random(4)
    bases = [[rng.randrange(1000) for _ in range(n)] for n in (400, 320, 160)]
    requests = [
        Request(
            id=str(i),
            tokens=rng.choice(bases) + [rng.randrange(1000) for _ in range(rng.randint(1, 40))],
            sampling=SamplingParams(temperature=0.0, max_tokens=rng.randint(10, 40)),
        )
        for i in range(60)
    ]
    made = engine(shape)
    told: list[int] = []
    run = made[0]._runner._decode.run

    def watched(*arrays: Any, sharing: Any, **more: Any) -> Any:
        told.append(0 if sharing is None else sum(sharing.counts))
        return run(*arrays, sharing=sharing, **more)

    made[0]._runner._decode.run = watched
    have = serve(made, requests)
    assert sum(n > 4 for n in told) > 20
    alone = engine(shape, max_seqs=1, prefix_cache=False, depth=0)
    want = {r.id: serve(alone, [r])[r.id] for r in requests}
    assert len(differing(have, want)) <= 1


def test_nothing_is_compiled_once_the_engine_is_up(shape: str):
    """Random traffic meets only kernels that were compiled, or read from the cache, before the first request."""
    from triton import knobs

    made = engine(shape, dtype="bfloat16", max_seqs=160, max_batch_tokens=1024, kv_memory=256 << 20)
    names: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: names.append(about["repr"])
    try:
        serve(made, list(traffic(random.Random(5), 200, greedy=True)))
        rng = random.Random(6)
        long = [[rng.randrange(1000) for _ in range(n)] for n in (500, 300, 65, 64, 17, 16, 5, 4, 1)]
        serve(made, [Request(id=str(i), tokens=t, sampling=SamplingParams(max_tokens=3)) for i, t in enumerate(long)])
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert names == []


def test_out_of_memory_fails_a_step_and_nothing_else(shape: str):
    made = engine(shape)
    want = serve(made, list(traffic(random.Random(3), 4)))
    running = made[0]
    launch = running._runner._program.launch

    def greedy_for_memory(batch: Any) -> Any:
        running._runner._program.launch = launch
        torch.empty(1 << 50, device="cuda")

    running._runner._program.launch = greedy_for_memory
    running._runner._prefill = None  # a captured step allocates nothing
    running.add(Request(id="big", tokens=[1] * 20, sampling=SamplingParams(max_tokens=4)))
    events = [event for _ in range(4) for event in running.step()]
    assert any(e.error and "out of memory" in e.error for e in events)
    assert serve(made, list(traffic(random.Random(3), 4))) == want


def test_prompts_through_their_own_kernel_see_what_the_plain_one_sees(shape: str, monkeypatch: pytest.MonkeyPatch):
    """A long prompt alone, beside decode rows, beside a short one, and with a past that other steps left."""
    from quire.backends.cuda.kernels import attention, prompt
    from tests.unit.backends.cuda.paged import error

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is Hopper's")
    calls: list[int] = []
    attend = prompt.attend_prompts
    monkeypatch.setattr(prompt, "attend_prompts", lambda *args, **named: (calls.append(1), attend(*args, **named))[1])
    monkeypatch.setattr(attention, "_SHORT", 0)  # small heads go there with long prompts alone
    model: Any = load_shape(shape)[0]
    backend: Any = open_backend("cuda", device="cuda", dtype="bfloat16", random=True)
    program = backend.compile(model.forward, kv=model.kv(64, 16), max_tokens=1024, max_rows=64)
    pages = list(range(64))
    rng = np.random.default_rng(1)
    mixes = {
        "alone": [(0, 300, pages[:48])],
        "past": [(300, 400, pages[:48])],
        "beside": [(40, 1, pages[48:52]), (0, 700, pages[:48]), (3, 1, pages[52:53])],
        "chunk": [(0, 700, pages[:48]), (0, 20, pages[48:52])],
    }
    for rows in mixes.values():
        batch = ragged(rows, rng.integers(0, 1000, sum(n for _, n, _ in rows)))
        batch.logit_rows = batch.q_start[1:] - 1
        told = {}
        for own in (True, False):
            monkeypatch.setattr(attention, "specialize", own)
            calls.clear()
            told[own] = torch.tensor(program.run(batch)), bool(calls)
        assert told[True][1] and not told[False][1]
        assert error(told[True][0], told[False][0]) < 2e-2


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-3), ("bfloat16", 3e-2), ("float16", 5e-3)])
def test_logits_equal_transformers(shape: str, dtype: str, bound: float):
    """The same random weights in transformers, on the same GPU, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = load_shape(shape)[0]
    backend: Any = open_backend("cuda", device="cuda", dtype=dtype, random=True)
    program = backend.compile(model.forward, kv=model.kv(64, 16), max_tokens=256, max_rows=256)
    oracle = LlamaForCausalLM(LlamaConfig(**{**kit.SHAPE, "tie_word_embeddings": False})).cuda().eval()
    copy_weights(model, backend.weights, oracle)
    tokens = np.random.default_rng(0).integers(0, 1000, 200)
    with torch.no_grad():
        want = oracle(torch.tensor(tokens[None]).cuda()).logits[0].cpu().numpy()
    whole = largest(200, 200, 16)
    whole.ids[:], whole.logit_rows[:] = tokens, np.arange(200)
    got = program.run(whole)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


@pytest.mark.parametrize("skinny", [0, 16])
def test_decoding_equals_transformers(shape: str, skinny: int, monkeypatch: pytest.MonkeyPatch):
    """One row, and five rows, token by token: with cuBLAS and with the skinny products."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quire.backends.cases import ragged
    from quire.backends.cuda.ops import CudaKernels

    monkeypatch.setattr(CudaKernels, "skinny_rows", skinny)
    model: Any = load_shape(shape)[0]
    backend: Any = open_backend("cuda", device="cuda", dtype="bfloat16", random=True)
    program = backend.compile(model.forward, kv=model.kv(64, 16), max_tokens=256, max_rows=256)
    oracle = LlamaForCausalLM(LlamaConfig(**{**kit.SHAPE, "tie_word_embeddings": False})).cuda().eval()
    copy_weights(model, backend.weights, oracle)
    tokens = np.random.default_rng(1).integers(0, 1000, (5, 24))
    with torch.no_grad():
        want = oracle(torch.tensor(tokens).cuda()).logits.cpu().numpy()
    for rows in (1, 5):
        for at in range(24):
            batch = ragged(
                [(at, 1, [10 * rows + 2 * b, 10 * rows + 2 * b + 1]) for b in range(rows)], tokens[:rows, at]
            )
            got = program.run(batch)
            error = np.linalg.norm(got - want[:rows, at]) / np.linalg.norm(want[:rows, at])
            assert error < 3e-2, f"{rows} rows, position {at}: {error:g}"


def copy_weights(model: Any, held: Any, oracle: Any) -> None:
    """A shape of transformers has its rows where transformers has them."""
    inner = oracle.model
    with torch.no_grad():
        inner.embed_tokens.weight.copy_(held[model.embedding])
        inner.norm.weight.copy_(held[model.norm])
        oracle.lm_head.weight.copy_(held[model.head])
        for w, layer in zip(model.layers, inner.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            for name in ("q", "k", "v", "o"):
                getattr(attention, f"{name}_proj").weight.copy_(held[getattr(w.attn, name)])
            for name, source in (("gate_proj", w.mlp.gate), ("up_proj", w.mlp.up), ("down_proj", w.mlp.down)):
                getattr(mlp, name).weight.copy_(held[source])
            layer.input_layernorm.weight.copy_(held[w.attn_norm])
            layer.post_attention_layernorm.weight.copy_(held[w.ffn_norm])
