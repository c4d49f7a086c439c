"""tokenizer.model, and the same vocabularies inside a GGUF, against SentencePiece itself."""

from __future__ import annotations

import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.chat.choice import Detokenizer
from quire.chat.hub import read_tokenizer
from quire.chat.tokenizers import spm
from quire.chat.tokenizers.spm_file import parse
from quire.chat.tokenizers.spm_text import CharacterMap
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import BadModelFile, QuireError, Unsupported
from tests.unit.chat import hub_kit
from tests.unit.chat.toys import sentencepiece as sentencepiece_toy

sentencepiece = pytest.importorskip("sentencepiece", reason="needs the test extra: sentencepiece is the oracle")

SAID = "the quick brown fox jumps over a lazy dog while seven wizards naïvely boxed ﬁve café crêpes ①２３"
TEXTS = [
    "the quick brown fox",
    "",
    " ",
    "   leading  doubled and trailing   ",
    "unknown 漢字 🎉 and ＦＵＬＬ width ﬁne e\u0301 A\u030a ㎏ \u00a0nbsp \u3000wide",
    "<tool>the fox<tool> boxed  <tool>",
    "<s>control</s> <unk> <0x41> bytes",
    "tabs\tnew\nlines\r\n\n",
    "zero\u200bwidth \x01\x7f \ufeff",
    "x" * 300 + " " * 50 + "the" * 40,
    "\u2581already\u2581there",
    "three in one: \u1112\u1161\u11ab a\u0323\u0302 \u0041\u030a\u0301",
]
# (name, options of the trainer)
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "unigram, bytes": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 400},
    "unigram, as it is": {
        "model_type": "unigram",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "bpe": {"model_type": "bpe"},
    "bpe, llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 400,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe, gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 400,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "bpe, nfkc_cf": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf"},
}


def train(**options: Any) -> bytes:
    rng = random.Random(5)
    corpus = [" ".join(rng.choices(SAID.split(), k=12)) for _ in range(400)]
    made = io.BytesIO()
    settings = {"vocab_size": 120, "user_defined_symbols": ["<tool>"], "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=made, character_coverage=1.0, **{**settings, **options}
    )
    return made.getvalue()


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest) -> bytes:
    return train(**MODELS[request.param])


def put(path: Path, data: bytes, **config: Any) -> Tokenizer:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(data)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=data).get_piece_size()
    known = {"architectures": ["LlamaForCausalLM"], "vocab_size": pieces, **config}
    (path / "config.json").write_text(json.dumps(known))
    return read_tokenizer(hub_kit.folder(path))


def test_ids_are_those_of_sentencepiece(made: bytes, tmp_path: Path):
    ours, theirs = put(tmp_path, made), sentencepiece.SentencePieceProcessor(model_proto=made)
    assert ours.vocab_size == theirs.get_piece_size()
    for text in TEXTS:
        assert ours.encode(text, add_special=False, parse_special=False) == theirs.encode(text), text


def test_text_comes_back_whole_and_in_pieces(made: bytes, tmp_path: Path):
    ours, theirs = put(tmp_path, made), sentencepiece.SentencePieceProcessor(model_proto=made)
    for text in TEXTS:
        ids = theirs.encode(text)
        if theirs.unk_id() in ids:
            continue  # SentencePiece writes a sign of its own for what it does not know
        whole = ours.decode(ids)
        assert whole == theirs.decode(ids).replace("\u2047", ""), text
        stream = Detokenizer(ours, at_start=True)
        assert "".join(map(stream.feed, ids)) + stream.finish() == whole


def test_the_same_vocabulary_in_a_gguf(made: bytes):
    theirs = sentencepiece.SentencePieceProcessor(model_proto=made)
    model = parse("x", made)
    metadata = {
        "tokenizer.ggml.model": {1: "t5", 2: "llama"}[model.model_type],
        "tokenizer.ggml.tokens": model.texts,
        "tokenizer.ggml.scores": np.array(model.scores, np.float32),
        "tokenizer.ggml.token_type": np.array(model.types, np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": model.add_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": model.collapse,
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(model.charsmap, np.uint8),
    }
    ours = Tokenizer.from_gguf(metadata)
    for text in TEXTS:
        if "<tool>" not in text:  # a GGUF's words after a special token begin a text of their own
            assert ours.encode(text, add_special=False, parse_special=False) == theirs.encode(text), text
    ends = model.model_type == 1
    assert (ours.add_bos, ours.add_eos) == (not ends, ends)


def test_the_characters_map_is_sentencepieces(made: bytes):
    model = parse("x", made)
    if not model.charsmap:
        pytest.skip("needs a model with a character map; this one takes characters as they are")
    theirs = sentencepiece.SentencePieceNormalizer(
        model_proto=made, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )
    ours = CharacterMap(model.charsmap)
    for text in ("\u1112\u1161\u11ab", "a\u0323\u0302", "A\u030a\u0301", "\u0915\u093c\u0915"):
        assert ours.apply(text) == theirs.normalize(text)
    rng = random.Random(3)
    ranges = [
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x300, 0x370),
        (0x1100, 0x1200),
        (0x2000, 0x2200),
        (0x3040, 0x3200),
        (0xF900, 0xFFFF),
    ]
    for _ in range(300):
        text = "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(20))
        assert ours.apply(text) == theirs.normalize(text), [hex(ord(c)) for c in text]


@pytest.fixture
def words() -> Any:
    return pytest.importorskip(
        "quire.chat.tokenizers._words", reason="needs the compiled encoder of scored pieces (a built wheel)"
    )


def test_the_compiled_encoder_and_the_library_agree(words: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Random vocabularies without equal scores, in which every letter is a piece, and random texts of these and others."""
    rng = random.Random(9)
    for _ in range(30):
        letters = rng.sample("abcde\u00e9\u6f22", 4)
        pieces = dict.fromkeys([*letters, "\u2581"])
        for _ in range(25):
            pieces["".join(rng.choices([*letters, "\u2581"], k=rng.randrange(2, 5)))] = None
        scores = [float(s) for s in rng.sample(range(-1000, 0), len(pieces))]
        data = sentencepiece_toy(dict(zip(pieces, scores, strict=True)))
        fast = Tokenizer.from_gguf(data)
        with monkeypatch.context() as m:
            m.setattr(spm, "_compiled", lambda *_: None)
            slow = Tokenizer.from_gguf(data)
        for _ in range(40):
            text = "".join(rng.choices([*letters, " ", "z"], k=rng.randrange(0, 60)))
            want = slow.encode(text, add_special=False, parse_special=False)
            assert fast.encode(text, add_special=False, parse_special=False) == want, (data, text)


def test_letters_join_even_where_one_alone_is_no_piece(words: Any):
    tokenizer = Tokenizer.from_gguf(sentencepiece_toy({"a": -9.0, "ab": -1.0}, add_space_prefix=False))
    ids = tokenizer.encode("abab", add_special=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["ab", "ab"]


def test_of_equal_scores_the_leftmost_is_joined_first(words: Any):
    tokenizer = Tokenizer.from_gguf(
        sentencepiece_toy({"a": -9.0, "b": -9.0, "ba": -1.0, "ab": -1.0}, add_space_prefix=False)
    )
    ids = tokenizer.encode("aba", add_special=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["ab", "a"]


def test_a_text_of_a_million_characters(words: Any):
    tokenizer = Tokenizer.from_gguf(sentencepiece_toy({"a": -9.0, "aa": -1.0, "aaaa": -2.0, "\u2581": -3.0}))
    ids = tokenizer.encode("a" * 1_000_001, add_special=False, parse_special=False)
    assert len(ids) == 250_002 and tokenizer.decode(ids) == "a" * 1_000_001


def test_added_tokens_and_what_stands_around_a_text(tmp_path: Path):
    data = train(**MODELS["bpe, llama"])
    count = sentencepiece.SentencePieceProcessor(model_proto=data).get_piece_size()
    tmp_path.joinpath("tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {
                    str(count): {"content": "<|im_end|>", "special": True},
                    str(count + 1): {"content": "<call>", "special": False},
                },
            }
        )
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<late>": count + 2, "<call>": count + 1}))
    ours = put(tmp_path, data, vocab_size=count + 8)
    assert ours.vocab_size == count + 8
    assert ours.eos_id == count and ours.add_bos and not ours.add_eos
    ids = ours.encode("the<|im_end|>fox<call><late>", add_special=True, parse_special=True)
    assert ids[0] == 1 and ids.count(count) == 1 and ids[-2:] == [count + 1, count + 2]
    assert ours.decode(ids, skip_special=True) == "thefox<call><late>"  # no space is made up after added tokens
    plain = ours.encode("the<|im_end|>fox", add_special=False, parse_special=False)
    assert count not in plain and ours.decode(plain) == "the<|im_end|>fox"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "legacy": True, "add_bos_token": False, "add_eos_token": True})
    )
    old = put(tmp_path, data, vocab_size=count + 8)
    assert (
        old.decode(old.encode("the<|im_end|>fox", add_special=True, parse_special=True))
        == "the<|im_end|> fox<|im_end|>"
    )


def test_the_old_way_after_symbols_of_sentencepiece(tmp_path: Path):
    """Legacy: a text begins anew after an added token, and goes on after a symbol of the model's own."""
    data = train(**MODELS["bpe, llama"])
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": true}')
    ours, theirs = put(tmp_path, data), sentencepiece.SentencePieceProcessor(model_proto=data)
    for text in ("the<tool>fox", "<tool>fox <tool> the"):
        assert ours.encode(text, add_special=False, parse_special=True) == theirs.encode(text)


def test_the_price_of_an_unknown_character():
    """Ten below the worst piece: here that is less than what the pieces cost that would cover it."""
    tokens = ["<unk>", "ab", "c", "bc", "b"]
    ours = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.array([0, -20, -20, -1, -20], np.float32),
            "tokenizer.ggml.token_type": np.array([2, 1, 1, 1, 1], np.int32),
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    assert ours.encode("abc", add_special=False, parse_special=False) == [0, 3]


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path):
    with pytest.raises(BadModelFile, match=r"tokenizer.model has \d+ pieces, but config.json says a vocab_size of 50"):
        put(tmp_path, train(model_type="bpe"), vocab_size=50)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no pieces"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than ten bytes"),
        (b"\x0a\x80", "before it is whole"),
        (b"\x0a\x7f\x0a", "beyond its end"),
        (b"\x0b\x00", "unknown kind 3"),
        (b"\x0a\x04\x0a\x02\xff\xfe", "codec can't decode"),
        (b"\x0a\x05\x0a\x01a\x18\x09", "the kind 9"),
        (b"\x0a\x08\x0a\x01a\x15" + struct.pack("<f", float("nan")), "the score nan"),
        (b"YQ== 0\nYg== 1\n", "SentencePiece"),
    ],
)
def test_bytes_that_are_no_model(data: bytes, why: str):
    with pytest.raises(BadModelFile, match=why):
        parse("tokenizer.model", data)


def test_kinds_that_are_not_served(tmp_path: Path):
    with pytest.raises(Unsupported, match="'char'"):
        put(tmp_path, train(model_type="char"))


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"\x01", "1 bytes"),
        (struct.pack("<I", 2**31) + b"\0" * 8, "a trie of 2147483648"),
        (struct.pack("<I", 6) + b"\0" * 8, "a trie of 6"),
        (struct.pack("<I", 4) + b"\0" * 4 + b"x" * 1000, "1000 bytes of one text"),
        (struct.pack("<I", 4) + b"\0" * 4 + b"\xff\0", "not UTF-8"),
    ],
)
def test_character_maps_that_are_none(blob: bytes, why: str):
    with pytest.raises(BadModelFile, match=why):
        CharacterMap(blob)


def test_mutated_files_make_a_tokenizer_or_are_refused(tmp_path: Path):
    originals = [train(**MODELS[name]) for name in ("unigram", "bpe, llama")]
    outcomes = {"made": 0, "refused": 0}
    for number in range(200):
        rng = random.Random(f"2026:{number}")
        data = bytearray(rng.choice(originals))
        for _ in range(rng.choice((1, 1, 2, 6))):
            at = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(400, len(data)))
            how = rng.randrange(4)
            if how == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1:
                del data[at : at + rng.choice((1, 5, 100))]
            elif how == 2:
                data[at:at] = rng.choice((b"\xff" * 10, bytes(8), rng.randbytes(4)))
            else:
                data[at] = rng.choice((0, 0x7F, 0x80, 0xFF))
        (tmp_path / "tokenizer.model").write_bytes(data)
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "vocab_size": 500}')
        try:
            ours = read_tokenizer(hub_kit.folder(tmp_path))
            for text in TEXTS:
                ours.decode(ours.encode(text, add_special=True, parse_special=True))
            outcomes["made"] += 1
        except QuireError as e:
            str(e).encode()
            outcomes["refused"] += 1
    assert outcomes["made"] > 20 and outcomes["refused"] > 20, outcomes
