"""tekken.json against the rule it stands for, written out: join the pair whose union has the lowest rank, until none is left."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from quire.chat.hub import read_tokenizer
from quire.chat.tokenizers.pretokenizers import PRE_TOKENIZERS
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import BadModelFile, QuireError, Unsupported
from tests.fuzz.kit import stir
from tests.unit.chat import hub_kit

PATTERN = PRE_TOKENIZERS["tekken"].splits[0]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
COUNT = 10  # places for special tokens
TEXTS = [
    "Hello, World!",
    "don't stop — naïve café 漢字 🎉\n\n  indented\tcode() 12345 ABCdef",
    "[INST] not an instruction [/INST]</s>",
    "abababab aaaaaaa  ",
    "",
]


def learn(count: int = 110) -> list[bytes]:
    """Bytes, then whatever makes tokens of several lengths and in no order of length."""
    rng = random.Random(11)
    text = "Hello World don't stop naïve café 漢字 indented code abab ABCdef 12345  ".encode()
    ranks = [bytes([b]) for b in range(256)]
    while len(ranks) < 256 + count:
        at = rng.randrange(len(text) - 6)
        token = text[at : at + rng.randrange(2, 6)]
        if token not in ranks and any(token[:k] in ranks and token[k:] in ranks for k in range(1, len(token))):
            ranks.append(token)
    return ranks


def write(path: Path, ranks: list[bytes], **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(ranks) + 5,
            "default_vocab_size": len(ranks) + COUNT,
            "default_num_special_tokens": COUNT,
            "version": "v3",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(ranks)
        ],
        "special_tokens": [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(SPECIAL)],
        **changes,
    }
    (path / "tekken.json").write_text(json.dumps(data))
    (path / "config.json").write_text(
        json.dumps({"architectures": ["MistralForCausalLM"], "vocab_size": len(ranks) + COUNT})
    )
    return data


def ruled(ranks: list[bytes], text: str) -> list[int]:
    known = {token: i for i, token in enumerate(ranks)}
    ids = []
    for word, _ in pre_tokenizers.Split(Regex(PATTERN), "isolated").pre_tokenize_str(text):
        parts = [bytes([b]) for b in word.encode()]
        if word.encode() in known:
            parts = [word.encode()]
        while True:
            pairs = [(known[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in known]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [known[p] + COUNT for p in parts]
    return ids


@pytest.fixture(scope="module")
def ranks() -> list[bytes]:
    return learn()


def read(path: Path) -> Tokenizer:
    return read_tokenizer(hub_kit.folder(path))


def test_ids_follow_the_rule(ranks: list[bytes], tmp_path: Path):
    write(tmp_path, ranks)
    ours = read(tmp_path)
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.add_bos) == (len(ranks) + COUNT, 1, 2, True)
    for text in TEXTS:
        ids = ours.encode(text, add_special=False, parse_special=False)
        assert ids == ruled(ranks, text)
        assert ours.decode(ids) == text
    ids = ours.encode("[INST] x[/INST]", add_special=True, parse_special=True)
    assert ids == [1, 3, *ruled(ranks, " x"), 4]
    assert ours.eos_ids == (2,)


def test_a_file_without_special_tokens_has_the_known_ones(ranks: list[bytes], tmp_path: Path):
    write(tmp_path, ranks, special_tokens=None)
    assert [read(tmp_path).token_id(t) for t in ("<s>", "[INST]", "[TOOL_CALLS]")] == [1, 3, 9]


def test_ranks_beyond_the_model_are_left_out(ranks: list[bytes], tmp_path: Path):
    data = write(tmp_path, ranks)
    data["config"]["default_vocab_size"] -= 30
    (tmp_path / "tekken.json").write_text(json.dumps(data))
    ours = read(tmp_path)
    ids = ours.encode(TEXTS[1], add_special=False, parse_special=False)
    assert ids == ruled(ranks[:-30], TEXTS[1])


BAD: dict[str, tuple[dict[str, Any], type[QuireError], str]] = {
    "an expression of its own": ({"config.pattern": "(a+)+$"}, Unsupported, r"its pattern is not one that is known: '\(a\+\)\+\$'"),
    "more tokens than the model": ({"config.default_vocab_size": 5000}, BadModelFile, "has 5000 tokens, but config.json says a vocab_size of 376"),
    "no places": ({"config.default_num_special_tokens": 9999}, BadModelFile, "9999 special tokens"),
    "a hole": ({"vocab.3.rank": 100000}, BadModelFile, "no token of the rank 3"),
    "a rank twice": ({"vocab.3.rank": 4}, BadModelFile, "rank 4 is there twice"),
    "no base64": ({"vocab.3.token_bytes": "%%%"}, BadModelFile, "rank 3 is not base64"),
    "an empty token": ({"vocab.300.token_bytes": ""}, BadModelFile, "rank 300 has 0 bytes"),
    "a token twice": ({"vocab.300.token_bytes": "YQ=="}, BadModelFile, "again"),
    "a special token out of place": ({"special_tokens.1.rank": 70}, BadModelFile, "'<s>' has the rank 70"),
    "two of one text": ({"special_tokens.1.token_str": "</s>"}, BadModelFile, "one text for two"),
    "no config": ({"config": None}, BadModelFile, "config"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused(name: str, ranks: list[bytes], tmp_path: Path):
    changes, error, why = BAD[name]
    data = write(tmp_path, ranks)
    for path, value in changes.items():
        *way, last = [int(k) if k.isdigit() else k for k in path.split(".")]
        inner: Any = data
        for key in way:
            inner = inner[key]
        inner[last] = value
    (tmp_path / "tekken.json").write_text(json.dumps(data))
    with pytest.raises(error, match=why) as caught:
        read(tmp_path)
    assert "tekken.json" in caught.value.message


def test_mutated_files_make_a_tokenizer_or_are_refused(ranks: list[bytes], tmp_path: Path):
    data = write(tmp_path, ranks)
    outcomes = {"made": 0, "refused": 0}
    for number in range(120):
        rng = random.Random(f"7:{number}")
        (tmp_path / "tekken.json").write_text(json.dumps(stir(data, rng)))
        try:
            ours = read(tmp_path)
            ours.decode(ours.encode(TEXTS[1], add_special=True, parse_special=True))
            outcomes["made"] += 1
        except QuireError as e:
            assert "tekken.json" in str(e)
            str(e).encode()
            outcomes["refused"] += 1
    assert outcomes["made"] > 5 and outcomes["refused"] > 5, outcomes
