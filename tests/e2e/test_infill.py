"""A model that was taught to fill in does so, by the tokens that its file has for it."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.chat import infill
from quire.chat.loading import tokenizer_of
from quire.weights.checkpoint import open_checkpoint
from quire.weights.store.store import Store

CODER = "qwen2.5-coder:1.5b"


@pytest.mark.large
def test_a_gap_is_filled():
    store = Store()
    if store.get(CODER) is None:
        pytest.skip(f"needs {CODER}: `quire pull {CODER}`")
    with open_checkpoint(str(store.resolve(CODER))) as checkpoint:
        tokenizer = tokenizer_of(checkpoint)
    tokens = tokenizer.infill
    assert tokens is not None
    prompt = infill.write(tokenizer, tokens, "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n")
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=tokens.ends)
    with LLM(CODER, progress=False, context=512) as llm:
        (output,) = llm.generate([prompt], params, progress=False)
    assert output.text == "a + b" and output.outputs[0].finish_reason == "stop"
