"""Hugging Face's own client drives TGI's routes on the default model."""

from __future__ import annotations

import openai
import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server

hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: it comes with transformers")
PROMPT = "The capital of France is"


def test_text_details_and_stream(server: Server, client: openai.OpenAI):
    tgi = hub.InferenceClient(model=server.url)
    text = tgi.text_generation(PROMPT, max_new_tokens=8)
    same = client.completions.create(model=DEFAULT_MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    assert text == same.choices[0].text and "Paris" in text
    assert tgi.text_generation(PROMPT, max_new_tokens=8, return_full_text=True) == PROMPT + text
    whole = tgi.text_generation(PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, top_n_tokens=2)
    assert whole.generated_text == text and whole.details.generated_tokens == 8
    assert "".join(t.text for t in whole.details.tokens) == text
    assert len(whole.details.top_tokens) == 8 and whole.details.prefill[0].logprob is None
    parts = list(tgi.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))
    assert "".join(p.token.text for p in parts) == text
    assert [p.token.logprob for p in parts] == [t.logprob for t in whole.details.tokens]
    assert parts[-1].generated_text == text and parts[-1].details.finish_reason == "length"


def test_sampling_stops_and_refusals(server: Server):
    tgi = hub.InferenceClient(model=server.url)
    one, two = (tgi.text_generation(PROMPT, max_new_tokens=8, do_sample=True, seed=7) for _ in range(2))
    assert one == two
    assert tgi.text_generation(PROMPT, max_new_tokens=20, stop=["Paris"]).endswith("Paris")
    with pytest.raises(Exception, match="watermark"):
        tgi.text_generation(PROMPT, watermark=True)
