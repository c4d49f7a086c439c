"""Our own figures, from the default model: every kind of test runs, and one that would lie is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ours
from benchmarks.ours import Bench
from benchmarks.world import text_of


@pytest.fixture(scope="module")
def bench(model_path: Path) -> Bench:
    return Bench(str(model_path), 1, context=256, max_seqs=4)


def test_every_kind_of_test_in_a_fresh_process(model_path: Path) -> None:
    tests = [ours.prefill(32), ours.decode(16, 4), ours.streams(2, 8, 4), ours.sweep([0, 16, 32], 3)]
    found = ours.measure(model_path, 1, tests, max_seqs=2)
    assert [list(f) for f in found] == [["tokens/s"], ["tokens/s"], ["tokens/s"], ["0", "16", "32"]]
    assert all(v > 0 for f in found for v in f.values())


def test_a_failure_in_the_process_is_told(model_path: Path) -> None:
    with pytest.raises(RuntimeError, match="there is no test 'nonsense'"):
        ours.measure(model_path, 1, [{"kind": "nonsense", "tokens": 1}])


def test_tokens_are_counted_after_the_last_stream_has_begun(bench: Bench) -> None:
    prompts = [bench.prompt(8) for _ in range(3)]
    _, seconds, late = bench.run(prompts, 5)
    assert late == 3 * 4
    assert seconds > 0
    # 600 tokens do not fit one step: the third stream begins a step later, when the others have two tokens each.
    _, _, late = bench.run([bench.prompt(200) for _ in range(3)], 5)
    assert late == 3 * 5 - (2 + 2 + 1)


def test_prompts_share_no_beginning(bench: Bench) -> None:
    assert len({bench.prompt(4)[0] for _ in range(50)}) == 50


def test_a_prompt_from_the_prefix_cache_is_refused(bench: Bench) -> None:
    prompt = bench.prompt(64)
    bench.run([prompt], 2)
    with pytest.raises(RuntimeError, match="prefix cache"):
        bench.run([prompt], 2)
    bench.run([prompt], 2, cached=True)


@pytest.mark.parametrize(
    ("test", "context"),
    [
        (ours.prefill(512), 514),
        (ours.decode(2048, 64), 2114),
        (ours.streams(8, 16, 64), 82),
        (ours.sweep([0, 99], 9), 110),
    ],
)
def test_the_context_that_a_test_needs(test: dict[str, object], context: int) -> None:
    assert ours.longest(test) == context


def test_text_of_so_many_tokens(model_path: Path) -> None:
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.weights.gguf.file import GGUF

    with GGUF.open(model_path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    assert len(tokenizer.encode(text_of(model_path, 512), add_special=False, parse_special=False)) == 512
