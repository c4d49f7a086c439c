"""Unigram and WordPiece out of a tokenizer.json: what transformers says, whole and in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from quire.chat.choice import Detokenizer
from quire.chat.hub import read_tokenizer
from quire.chat.tokenizers.tokenizer import Tokenizer
from tests.unit.chat import hub_kit

pytest.importorskip("transformers", reason="needs the test extra: transformers is the independent implementation")

TEXTS = [
    "",
    "Hello, world",
    "the lazy dog isn't 123456 years old, is it?",
    " leading and  doubled   spaces ",
    "Ω ≈ 3.14 — naïve café 🎉🎉 ずっと ﬁne",
    "tabs\tand\n\nlines\r\n",
    "quickly</s><unk>[SEP] foxes [MASK] . , ! don't",
    "\x00\x01",
]
MAKERS: dict[str, Any] = {
    "unigram": hub_kit.unigram,
    "unigram, bytes": lambda path: hub_kit.unigram(path, byte_fallback=True),
    "wordpiece": hub_kit.wordpiece,
}


@pytest.fixture(scope="module", params=MAKERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    path = tmp_path_factory.mktemp("hub")
    theirs = MAKERS[request.param](path)
    return read_tokenizer(hub_kit.folder(path)), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(both: tuple[Tokenizer, Any], text: str):
    ours, theirs = both
    for special in (True, False):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special=special, parse_special=True) == ids
        for skip in (True, False):
            want = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == want
            stream = Detokenizer(ours, skip_special=skip, at_start=True)
            assert "".join(map(stream.feed, ids)) + stream.finish() == want


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_never_becomes_a_control_token(both: tuple[Tokenizer, Any], text: str):
    ours, theirs = both
    unknown = theirs.unk_token_id
    ids = ours.encode(text, add_special=False, parse_special=False)
    assert not [i for i in ids if ours.is_special(i) and i != unknown]
    if "<" not in text and "[" not in text:
        assert ids == theirs.encode(text, add_special_tokens=False)


def test_a_text_may_be_any_length_when_words_become_unknown(both: tuple[Tokenizer, Any]):
    ours, _ = both
    assert ours.max_token_bytes is None or ours.max_token_bytes > 0
    ids = ours.encode("z" * 5000, add_special=False, parse_special=False)
    assert ids and all(0 <= i < ours.vocab_size for i in ids)
