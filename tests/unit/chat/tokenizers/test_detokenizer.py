from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.chat.choice import Detokenizer
from quire.chat.tokenizers.tokenizer import Tokenizer
from tests.unit.chat.toys import byte_level, sentencepiece

BYTES = Tokenizer.from_gguf(byte_level(("Ã ©", "ð Ł", "ðŁ ĺ"), user_defined=("日本",)))
PIECES = Tokenizer.from_gguf(sentencepiece({"▁": -1.0, "a": -2.0, "▁a": -3.0, "é": -4.0, "▁▁": -5.0}))


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)


@given(ids_of(BYTES), ids_of(PIECES), st.booleans(), st.booleans())
@settings(max_examples=400)
def test_joined_output_is_the_decoding_of_the_whole(a: list[int], b: list[int], skip: bool, start: bool):
    for tokenizer, ids in ((BYTES, a), (PIECES, b)):
        whole = tokenizer.decode(ids, skip_special=skip, at_start=start)
        assert "".join(stream(tokenizer, ids, skip_special=skip, at_start=start)) == whole


@given(st.text(max_size=20))
def test_valid_text_never_shows_a_replacement_character(text: str):
    text = text.replace("\ufffd", "")
    for tokenizer in (BYTES, PIECES):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        parts = stream(tokenizer, ids, at_start=True)
        assert "\ufffd" not in "".join(parts)
        assert "".join(parts) == text


def test_an_emoji_comes_out_whole_and_at_once():
    ids = BYTES.encode("🙂!", add_special=False, parse_special=False)
    assert len(ids) > 2
    assert [part for part in stream(BYTES, ids) if part] == ["🙂", "!"]


def test_bytes_that_never_become_a_character():
    half = BYTES.encode("🙂", add_special=False, parse_special=False)[:-1]
    bang = BYTES.encode("!", add_special=False, parse_special=False)
    assert stream(BYTES, half)[-1] == "\ufffd"
    assert "".join(stream(BYTES, half + bang)) == "\ufffd!"


def test_the_leading_space_belongs_to_a_continuation():
    ids = PIECES.encode("a a", add_special=False, parse_special=False)
    assert "".join(stream(PIECES, ids, at_start=True)) == "a a"
    assert "".join(stream(PIECES, ids, at_start=False)) == " a a"


def test_special_tokens():
    ids = BYTES.encode("a<|im_end|>b", add_special=False, parse_special=True)
    assert "".join(stream(BYTES, ids)) == "ab"
    assert "".join(stream(BYTES, ids, skip_special=False)) == "a<|im_end|>b"
