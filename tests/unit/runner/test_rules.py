"""Each rule against the naive oracle and, where it is installed, against transformers' own processors."""

import re
from collections.abc import Sequence

import numpy as np
import pytest

from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from quire.runner.rules import RULES, Choice, History, needs_history, rules_for
from tests.unit.runner.naive_sampling import distribution

V = 700


def _logits(seed: int, spread: float = 3.0, size: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def _apply(
    logits: np.ndarray, params: SamplingParams, *, prompt=(), output=(), stop_ids=(), mask=None
) -> dict[int, float]:
    """What the rules leave, as probabilities by token."""
    history = History(prompt, output) if needs_history(params) else None
    stops = np.array(stop_ids, np.intp)
    choice = Choice(logits.astype(np.float64), params, len(output), stops, history, mask)
    for rule in rules_for(params, masked=mask is not None):
        rule.apply(choice)
    weights = choice.weights()
    ids = range(weights.size) if choice.ids is None else choice.ids.tolist()
    return {t: w / weights.sum() for t, w in zip(ids, weights.tolist(), strict=True) if w > 0}


CASES = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40),
    SamplingParams(top_k=V),
    SamplingParams(top_k=10 * V),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.9999),
    SamplingParams(temperature=30.0, top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0),
    SamplingParams(typical_p=0.2),
    SamplingParams(typical_p=0.95),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=50, typical_p=0.8, top_p=0.9, min_p=0.02),
    SamplingParams(logit_bias={3: 5.0, 10: -100.0, 699: 100.0}, temperature=3.0),
    SamplingParams(repetition_penalty=1.5, temperature=0.9),
    SamplingParams(repetition_penalty=0.8),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(presence_penalty=-2.0, frequency_penalty=-2.0),
    SamplingParams(min_tokens=9, temperature=0.8),
    SamplingParams(min_tokens=3, temperature=0.8),
    SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={1: 2.0}, top_p=0.8, top_k=99
    ),
]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_rules_agree_with_the_naive_oracle(params: SamplingParams, seed: int):
    params.validate(V)
    logits = _logits(seed)
    context = {"prompt": [1, 2, 3, 3, 500], "output": [7, 7, 7, 1, 650], "stop_ids": [int(logits.argmax()), 5]}
    want = {t: p for t, p in distribution(logits, params, **context).items() if p > 0}
    have = _apply(logits, params, **context)
    assert list(have) == list(want)
    np.testing.assert_allclose(list(have.values()), list(want.values()), rtol=1e-12)


def test_mask_rules_out_and_then_filters_see_only_what_is_left():
    logits, params = _logits(0), SamplingParams(top_k=3, top_p=0.9)
    allowed = [5, 6, 7, 400, 401]
    mask = np.zeros(V, np.bool_)
    mask[allowed] = True
    assert list(_apply(logits, params, mask=mask)) == list(distribution(logits, params, allowed=allowed))
    one = np.zeros(V, np.bool_)
    one[123] = True
    assert _apply(logits, params, mask=one) == {123: 1.0}


def test_ties_go_to_the_smaller_id():
    flat = np.zeros(V, np.float32)
    assert list(_apply(flat, SamplingParams(top_k=5))) == [0, 1, 2, 3, 4]
    assert list(_apply(flat, SamplingParams(top_p=0.01))) == list(range(7))
    assert list(_apply(flat, SamplingParams(top_p=0.5, temperature=9.0))) == list(range(350))
    assert list(_apply(flat, SamplingParams(typical_p=0.01))) == list(range(7))
    assert len(_apply(flat, SamplingParams(min_p=1.0))) == V


def test_one_token_left_survives_every_filter():
    logits = np.full(V, -np.inf, np.float32)
    logits[77] = -3.0
    for params in CASES:
        if not params.min_tokens:
            assert _apply(logits, params, prompt=[77], output=[77]) == {77: 1.0}


def test_extreme_temperatures():
    logits = _logits(3)
    best = int(logits.argmax())
    for tiny in (1e-3, 1e-30, 5e-324):
        assert _apply(logits, SamplingParams(temperature=tiny)) == {best: 1.0}
    hot = _apply(logits * 1e-3, SamplingParams(temperature=100.0))
    np.testing.assert_allclose(list(hot.values()), 1 / V, rtol=1e-3)


def test_inactive_rules_are_not_called():
    assert rules_for(SamplingParams()) == ()
    assert rules_for(SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, typical_p=0.5)) == ()  # greedy
    assert not needs_history(SamplingParams(temperature=0.5, top_k=3))
    everything = SamplingParams(
        logit_bias={1: 1.0}, repetition_penalty=2, presence_penalty=1, min_tokens=1, temperature=2,
        top_k=1, typical_p=0.5, top_p=0.5, min_p=0.5,
    )  # fmt: skip
    assert rules_for(everything, masked=True) == RULES
    names = [type(rule).__name__ for rule in RULES]
    assert names == (
        ["Bias", "Repetition", "Recurrence", "MinTokens", "Mask", "Temperature", "TopK", "Typical", "TopP", "MinP"]
    )


def test_openai_formula():
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, over the output alone."""
    logits = _logits(5)
    output = [4] * 3 + [9]
    expected = logits.astype(np.float64)
    for token, count in ((4, 3), (9, 1)):
        expected[token] -= count * 0.7 + 1.1
    choice = Choice(
        logits.astype(np.float64),
        SamplingParams(frequency_penalty=0.7, presence_penalty=1.1),
        history=History([4, 8, 8], output),
    )
    for rule in rules_for(choice.params):
        rule.apply(choice)
    np.testing.assert_allclose(choice.scores, expected, rtol=1e-15)


def test_history_grows_and_counts():
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 5000, 300).tolist(), rng.integers(0, 5000, 3000).tolist()
    grown = History(prompt)
    for token in output:
        grown.add(token)
    want = {t: output.count(t) for t in {*prompt, *output}}
    assert dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True)) == want
    resumed = History(prompt, output)
    assert dict(zip(resumed.ids.tolist(), resumed.counts.tolist(), strict=True)) == want


class TestTransformers:
    """The definitions that most people compare with."""

    @pytest.fixture(autouse=True)
    def libraries(self):
        self.torch = pytest.importorskip("torch", reason="needs torch to run transformers' processors")
        self.process = pytest.importorskip(
            "transformers.generation.logits_process", reason="needs transformers for its processors"
        )

    def _compare(
        self, params: SamplingParams, processors: list, logits: np.ndarray, prompt: Sequence[int] = ()
    ) -> None:
        scores = self.torch.tensor(logits[None], dtype=self.torch.float64)
        for processor in processors:
            scores = processor(self.torch.tensor([list(prompt)], dtype=self.torch.long), scores)
        want = self.torch.softmax(scores[0], dim=-1).numpy()
        have = _apply(logits, params, prompt=prompt)
        assert list(have) == np.flatnonzero(want).tolist()
        np.testing.assert_allclose(list(have.values()), want[want > 0], rtol=1e-6)

    @pytest.mark.parametrize("seed", range(5))
    def test_filters(self, seed: int):
        p, logits = self.process, _logits(seed)
        self._compare(SamplingParams(temperature=0.6), [p.TemperatureLogitsWarper(0.6)], logits)
        self._compare(SamplingParams(top_k=17), [p.TopKLogitsWarper(17)], logits)
        for top_p in (0.1, 0.5, 0.9, 0.99):
            self._compare(SamplingParams(top_p=top_p), [p.TopPLogitsWarper(top_p)], logits)
            self._compare(SamplingParams(typical_p=top_p), [p.TypicalLogitsWarper(top_p)], logits)
        for min_p in (0.01, 0.1, 0.7):
            self._compare(SamplingParams(min_p=min_p), [p.MinPLogitsWarper(min_p)], logits)

    @pytest.mark.parametrize("seed", range(5))
    def test_in_a_row(self, seed: int):
        p = self.process
        warpers = [
            p.RepetitionPenaltyLogitsProcessor(1.3),
            p.TemperatureLogitsWarper(1.7),
            p.TopKLogitsWarper(90),
            p.TypicalLogitsWarper(0.95),
            p.TopPLogitsWarper(0.9),
            p.MinPLogitsWarper(0.03),
        ]
        params = SamplingParams(
            repetition_penalty=1.3, temperature=1.7, top_k=90, typical_p=0.95, top_p=0.9, min_p=0.03
        )
        logits = _logits(seed)
        self._compare(params, warpers, logits, prompt=[3, 3, 9, int(logits.argmax()), int(logits.argmin())])


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(max_tokens=-3), "max_tokens is -3: it must be in [1, 2147483647]"),
        (SamplingParams(top_p=0.0), "top_p is 0.0: it must be in (0, 1]"),
    ],
)
def test_a_bound_is_said_in_full(params: SamplingParams, said: str):
    with pytest.raises(BadRequest, match=re.escape(said)):
        params.validate(V)
