"""The ragged batch: every array against a plain loop over the works."""

import random

import numpy as np
import pytest

from quire.runner.batch_builder import BatchBuilder
from quire.runner.params import SamplingParams
from quire.runner.slots import Slots
from tests.unit.runner.tiny_llama import decode, known, opening

PAGE, VOCAB, SEQS, TOKENS, CONTEXT, ROWS = 4, 1000, 12, 96, 60, 50


def _state(rng: random.Random, decoding: float = 0.4):
    """Slots with sequences of random length, that share of them decoding, and the work for each."""
    slots = Slots(SEQS, CONTEXT // PAGE, pages=200, vocab_size=VOCAB)
    pages = list(range(200))
    rng.shuffle(pages)
    work, expected = [], []
    for slot in rng.sample(range(SEQS), rng.randint(1, 8 if decoding == 0.4 else 11)):
        length = rng.randint(0, 40)
        slots.open(opening(slot, [1] * (length + 12), SamplingParams()))
        n = rng.choice([1, 1, 5, 11]) if decoding else 1
        own = [pages.pop() for _ in range(-(-(length + n) // PAGE) + rng.randint(0, 2))][: CONTEXT // PAGE]
        if rng.random() < decoding:
            token = rng.randrange(VOCAB)
            slots.last[slot], slots.length[slot] = token, length
            tokens, w = [token], decode(slot, pages=own)
        else:
            tokens = [rng.randrange(VOCAB) for _ in range(n)]
            sample = rng.random() < 0.5 or not decoding
            logits = rng.randint(0, len(tokens) - sample)
            w = known(slot, tokens, length, sample=sample, prompt_logits=min(logits, 5), pages=own)
        slots.place(w)
        work.append(w)
        expected.append((length, tokens, own))
    return slots, work, expected


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("decoding", [0.4, 1.0, 0.0])  # 0: single rows, told by the host
def test_arrays(seed: int, decoding: float):
    slots, work, expected = _state(random.Random(seed), decoding)
    builder = BatchBuilder(
        page_size=PAGE, vocab_size=VOCAB, max_seqs=SEQS, max_tokens=TOKENS, max_context=CONTEXT, max_rows=ROWS
    )
    for _ in range(2):  # buffers are reused
        batch = builder.build(work, slots)
        ids, pos, write, q_start, kv_len, sampled, prompt = [], [], [], [0], [], [], []
        for w, (start, tokens, own) in zip(work, expected, strict=True):
            prompt += [len(ids) + i for i in range(w.prompt_logits)]
            for i, token in enumerate(tokens):
                ids.append(token)
                pos.append(start + i)
                write.append(own[(start + i) // PAGE] * PAGE + (start + i) % PAGE)
            q_start.append(len(ids))
            kv_len.append(start + len(tokens))
            if w.sample:
                sampled.append(len(ids) - 1)
        assert batch.ids.tolist() == ids
        assert batch.pos.tolist() == pos
        assert batch.write.tolist() == write
        assert batch.q_start.tolist() == q_start
        assert batch.kv_len.tolist() == kv_len
        assert batch.logit_rows.tolist() == sampled + prompt
        width = -(-max(kv_len) // PAGE)
        assert batch.pages.shape == (len(work), width)
        for row, (_, _, own) in zip(batch.pages.tolist(), expected, strict=True):
            assert row == (own + [-1] * width)[:width]
        for name in ("ids", "pos", "write", "q_start", "kv_len", "logit_rows", "pages"):
            array = getattr(batch, name)
            assert array.dtype == np.int32 and array.flags.c_contiguous


def test_a_gap_in_the_cache_is_refused():
    slots = Slots(2, 8, pages=50, vocab_size=VOCAB)
    slots.open(opening(0, [1] * 20, SamplingParams()))
    builder = BatchBuilder(page_size=PAGE, vocab_size=VOCAB, max_seqs=2, max_tokens=32, max_context=32, max_rows=8)
    work = known(0, [1, 2], 4, pages=[0, 1, 2])
    slots.place(work)
    builder.build([work], slots)  # the first work may start after a cached prefix
    slots.length[0] = 6
    for start in (0, 5, 6):  # going back is allowed, a hole is not
        builder.build([known(0, [1], start)], slots)
    with pytest.raises(ValueError, match="position 7 follows 6"):
        builder.build([known(0, [1], 7)], slots)


def test_closing_forgets_everything():
    slots = Slots(2, 8, pages=50, vocab_size=VOCAB)
    slots.open(opening(1, [1, 2, 3, 4], SamplingParams(), prompt_len=2))
    assert slots.position[1] == 2
    slots.place(known(1, [1], 0, pages=[4, 5, 6]))
    slots.place(known(1, [1], 0, page_from=1, pages=[9]))
    assert slots.table[1].tolist() == [4, 9, 6] + [-1] * 5 and slots.covered[1] == 3
    slots.last[1], slots.length[1] = 5, 4
    slots.close(1)
    assert slots.failure(1) == "slot 1 is not open"
    slots.close(1)
    slots.open(opening(1, [1], SamplingParams()))
    assert (slots.last[1], slots.length[1], slots.position[1], slots.covered[1]) == (-1, 0, 0, 0)
    assert (slots.table == -1).all()
    slots.fail([1], "broken")
    assert slots.failure(1) == "broken"
    slots.close(1)
    slots.open(opening(1, [1], SamplingParams()))
    assert slots.failure(1) is None
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="slot"):
            slots.close(bad)


def test_history_costs_nothing_unless_a_penalty_needs_it():
    slots = Slots(2, 8, pages=50, vocab_size=VOCAB)
    slots.open(opening(0, [1, 2], SamplingParams(top_k=3, top_p=0.5, logprobs=2)))
    slots.open(opening(1, [1, 2], SamplingParams(presence_penalty=0.1)))
    assert slots.stream(0).history is None
    assert slots.stream(1).history is not None


def test_states_are_told_and_checked():
    """A second group whose pages are states: some are not there, and must not be where one is needed."""
    slots = Slots(2, CONTEXT // PAGE, pages=20, vocab_size=VOCAB, more=[(6, 0)], states=[False, True])
    builder = BatchBuilder(
        page_size=PAGE, vocab_size=VOCAB, max_seqs=2, max_tokens=TOKENS, max_context=CONTEXT, max_rows=ROWS, groups=2
    )

    def step(start: int, n: int, row: list[int]):
        work = known(0, [7] * n, start, sample=False, pages=list(range(len(row))))
        work.more = [row]
        slots.place(work)
        return builder.build([work], slots)

    slots.open(opening(0, [7] * 40, SamplingParams()))
    batch = step(8, 7, [-1, 3, -1, 5])  # from a state that another left
    assert batch.more[0].pages.tolist() == [[-1, 3, -1, 5]] and (batch.more[0].write == -1).all()
    for start, n, row in ((8, 7, [-1, -1, -1, 5]), (8, 7, [-1, 3, 5, -1])):
        with pytest.raises(ValueError, match="no state before position 8"):
            step(start, n, row)
    slots.length[0] = 15
    assert step(15, 1, [-1, 3, -1, 5]).kv_len.tolist() == [16]
    with pytest.raises(ValueError, match="position 12 after 15 tokens: a state cannot go back"):
        step(12, 3, [-1, 3, 1, 5])
    with pytest.raises(ValueError, match="in a pool of 6"):
        step(15, 1, [-1, 3, -1, 6])
