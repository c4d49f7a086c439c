"""Tokenizers and templates of folders: what transformers says of the same files, and what neither of us may do in silence."""

from __future__ import annotations

import contextlib
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from quire.chat.choice import Detokenizer
from quire.chat.hub import read_template, read_tokenizer
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import BadModelFile, BadRequest, NotFound, QuireError, Unsupported
from quire.weights.folder import Folder
from tests.fuzz.kit import stir
from tests.unit.chat import hub_kit

pytest.importorskip("transformers", reason="needs the test extra: transformers is the independent implementation")

TEXTS = [
    "",
    "a",
    "Hello, world",
    " leading and  doubled   spaces ",
    "The quick brown fox isn't 123456 years old.",
    "Ω ≈ 3.14 — naïve cafe\u0301 🎉🎉 ずっと",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x <|wide|>   y<tool_call>{}</s><s> z",
    "\t\n\n  tabs\r\nand lines\n",
    "0 1 22 333 4444",
    "\x00\x01\x7f",
    "<0x41><unk>",
]
MAKERS: dict[str, Any] = {
    "byte level": hub_kit.byte_level,
    "sentencepiece": hub_kit.sentencepiece,
    "sentencepiece, old": lambda path: hub_kit.sentencepiece(path, old=True),
}


@pytest.fixture(scope="module", params=MAKERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    path = tmp_path_factory.mktemp("hub")
    theirs = MAKERS[request.param](path)
    return read_tokenizer(hub_kit.folder(path)), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(both: tuple[Tokenizer, Any], text: str):
    ours, theirs = both
    for special in (True, False):
        want = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special=special, parse_special=True) == want


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole_and_in_pieces(both: tuple[Tokenizer, Any], text: str):
    ours, theirs = both
    ids = theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        want = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special=skip) == want
        stream = Detokenizer(ours, skip_special=skip, at_start=True)
        assert "".join(map(stream.feed, ids)) + stream.finish() == want


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_never_becomes_a_control_token(both: tuple[Tokenizer, Any], text: str):
    ours, theirs = both
    ids = ours.encode(text, add_special=False, parse_special=False)
    assert not [i for i in ids if ours.is_special(i)]
    library = theirs.backend_tokenizer.to_str()
    plain = unicodedata.normalize("NFC", text) if '"NFC"' in library else text
    if "Metaspace" in library:  # does not put a space before one, and takes one away
        plain = plain.removeprefix(" ")
    assert ours.decode(ids, skip_special=False) == plain
    if "<" not in text:
        assert ids == ours.encode(text, add_special=False, parse_special=True)


def test_ids_of_tokens_that_stand_for_themselves(tmp_path: Path):
    theirs = hub_kit.byte_level(tmp_path)
    ours = read_tokenizer(hub_kit.folder(tmp_path))
    ids = theirs.get_vocab()
    assert ours.token_id("<|im_end|>") == ids["<|im_end|>"] and ours.is_special(ids["<|im_end|>"])
    assert ours.token_id("<tool_call>") == ids["<tool_call>"] and not ours.is_special(ids["<tool_call>"])
    assert ours.token_id("the") is None
    # A token of the user's own is one token even in plain text; control tokens are many.
    assert ids["<tool_call>"] in ours.encode("x<tool_call>", add_special=False, parse_special=False)
    assert ours.max_token_bytes is None  # <|wide|> takes any amount of space along
    with pytest.raises(BadRequest, match="not in the vocabulary"):
        ours.token_bytes(ours.vocab_size)
    with pytest.raises(BadRequest, match="surrogate"):
        ours.encode("\ud800", add_special=False, parse_special=True)


def test_what_ends_a_turn_is_what_every_file_says(tmp_path: Path):
    theirs = hub_kit.byte_level(tmp_path)
    ids = theirs.get_vocab()
    end, text, wide = ids["<|im_end|>"], ids["<|endoftext|>"], ids["<|wide|>"]
    assert set(read_tokenizer(hub_kit.folder(tmp_path)).eos_ids) == {end, text}  # known texts
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [wide, end, 9999]}))
    hub_kit.edit(tmp_path / "config.json", eos_token_id=5)
    ours = read_tokenizer(hub_kit.folder(tmp_path))
    assert ours.eos_id == end and set(ours.eos_ids) == {end, text, wide, 5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(BadModelFile, match="eos_token_id"):
        read_tokenizer(hub_kit.folder(tmp_path))


@pytest.mark.parametrize("silent", [True, False])
@pytest.mark.parametrize("wants", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}, {}])
def test_begin_and_end_tokens_are_those_of_transformers(wants: dict[str, bool], silent: bool, tmp_path: Path):
    from transformers import AutoTokenizer

    hub_kit.sentencepiece(tmp_path)
    hub_kit.edit(tmp_path / "tokenizer_config.json", **wants)
    if silent:
        hub_kit.edit(tmp_path / "tokenizer.json", post_processor=None)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = read_tokenizer(hub_kit.folder(tmp_path))
    assert ours.encode("Hello", add_special=True, parse_special=True) == theirs.encode("Hello")


def test_a_model_with_more_rows_than_tokens(tmp_path: Path):
    theirs = hub_kit.byte_level(tmp_path)
    size = len(theirs.get_vocab())
    hub_kit.edit(tmp_path / "config.json", vocab_size=size + 20)
    ours = read_tokenizer(hub_kit.folder(tmp_path))
    assert ours.vocab_size == size + 20
    assert ours.token_bytes(size + 19) == b"" and ours.is_special(size + 19)
    hub_kit.edit(
        tmp_path / "config.json", vocab_size=size - 5
    )  # added tokens may lie beyond: a request for one is refused
    assert read_tokenizer(hub_kit.folder(tmp_path)).vocab_size == size
    hub_kit.edit(tmp_path / "config.json", vocab_size=100)
    with pytest.raises(BadModelFile, match=r"tokenizer.json has a token \d+, but config.json says a vocab_size of 100"):
        read_tokenizer(hub_kit.folder(tmp_path))


def test_tokens_that_only_the_configuration_knows(tmp_path: Path):
    from transformers import AutoTokenizer

    theirs = hub_kit.byte_level(tmp_path)
    ids = theirs.get_vocab()
    last = max(ids.values())
    known = json.loads((tmp_path / "tokenizer.json").read_text())
    known["added_tokens"] = [t for t in known["added_tokens"] if t["id"] != last]
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    entry = {"content": "<|late|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    hub_kit.edit(tmp_path / "tokenizer_config.json", added_tokens_decoder={str(last): entry})
    ours = read_tokenizer(hub_kit.folder(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    want = theirs.encode("a<|late|>b", add_special_tokens=False)
    assert ours.encode("a<|late|>b", add_special=False, parse_special=True) == want and last in want
    hub_kit.edit(tmp_path / "tokenizer_config.json", added_tokens_decoder={"7000": entry})
    with pytest.raises(BadModelFile, match=r"'<\|late\|>' has the id 7000, but becomes"):
        read_tokenizer(hub_kit.folder(tmp_path))


def change(path: Path, **parts: Any) -> Folder:
    hub_kit.byte_level(path)
    hub_kit.edit(path / "tokenizer.json", **parts)
    return hub_kit.folder(path)


BAD: dict[str, tuple[dict[str, Any], type[QuireError], str]] = {
    "word level": ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, Unsupported, "WordLevel"),
    "a decoder of another kind": ({"decoder": {"type": "CTC"}}, Unsupported, "decoder is CTC"),
    "a text blown up": (
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}}, Unsupported, "1000 times longer"
    ),
    "no decoder": ({"decoder": None}, Unsupported, "decoder is none"),
    "no model": ({"model": None}, BadModelFile, "model"),
    "a model that is none": ({"model": [1]}, BadModelFile, "model"),
    "tokens without a text": ({"added_tokens": [{"id": 1}]}, BadModelFile, "content"),
    "another id": (
        {"added_tokens": [{"id": 3, "content": "<|new|>", "special": True, "single_word": False, "lstrip": False,
                           "rstrip": False, "normalized": False}]},
        BadModelFile,
        "has the id 3",
    ),
    "merges of nothing": ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}, BadModelFile, "cannot be used"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_tokenizer_that_cannot_be_used_is_refused(name: str, tmp_path: Path):
    parts, error, why = BAD[name]
    with pytest.raises(error, match=why) as caught:
        read_tokenizer(change(tmp_path, **parts))
    assert "tokenizer.json" in caught.value.message


def test_bytes_that_no_token_expresses_are_refused_not_dropped(tmp_path: Path):
    hub_kit.byte_level(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    letter = "é"  # stands for byte 0xE9
    data["model"]["merges"] = [m for m in data["model"]["merges"] if letter not in "".join(m)]
    data["model"]["vocab"] = {t.replace(letter, "\u2603"): i for t, i in data["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    ours = read_tokenizer(hub_kit.folder(tmp_path))
    with pytest.raises(BadRequest, match="0xe9"):
        ours.encode("龍飛\u9fff", add_special=False, parse_special=True)


def test_no_tokenizer_and_other_kinds_of_file(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(NotFound, match=r"no tokenizer.json"):
        read_tokenizer(hub_kit.folder(tmp_path))
    (tmp_path / "vocab.txt").write_bytes(b"a")
    with pytest.raises(Unsupported, match=r"has vocab.txt and no tokenizer.json.*save_pretrained"):
        read_tokenizer(hub_kit.folder(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(BadModelFile, match=r"tokenizer.model is not a SentencePiece model"):
        read_tokenizer(hub_kit.folder(tmp_path))


@pytest.mark.parametrize("changes", [{"eos_token": "\ud800"}, {"added_tokens_decoder": {"5": {"content": "\udc80"}}}])
def test_names_that_are_no_text(changes: dict[str, Any], tmp_path: Path):
    hub_kit.byte_level(tmp_path)
    hub_kit.edit(tmp_path / "tokenizer_config.json", **changes)
    with pytest.raises(BadModelFile, match=r"tokenizer_config.json.*is not text"):
        read_tokenizer(hub_kit.folder(tmp_path))


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path):
    def source() -> str | None:
        template = read_template(hub_kit.folder(tmp_path), read_tokenizer(hub_kit.folder(tmp_path)))
        return template and template.source

    theirs = hub_kit.byte_level(tmp_path)
    assert source() is None
    hub_kit.edit(tmp_path / "tokenizer_config.json", chat_template="from the configuration")
    assert source() == "from the configuration"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from its own JSON"}))
    assert source() == "from its own JSON"
    theirs.chat_template = hub_kit.TEMPLATE
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists() and source() == hub_kit.TEMPLATE
    template = read_template(hub_kit.folder(tmp_path), read_tokenizer(hub_kit.folder(tmp_path)))
    assert template is not None
    assert template.render(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False)


def test_named_templates(tmp_path: Path):
    hub_kit.byte_level(tmp_path)
    tokenizer = read_tokenizer(hub_kit.folder(tmp_path))
    named = [
        {"name": "default", "template": "plain {{ messages[0].content }} {{ pad_token }} {{ eos_token }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    hub_kit.edit(tmp_path / "tokenizer_config.json", chat_template=named)
    template = read_template(hub_kit.folder(tmp_path), tokenizer)
    assert template is not None
    assert template.render(MESSAGES) == "plain Hi <|endoftext|> <|im_end|>"
    assert template.render(MESSAGES, tools=[{"name": "f"}]) == "tools 1"
    for given, why in (([named[1], {**named[1], "name": "rag"}], "no default"), ([3], "neither"), (7, "neither")):
        hub_kit.edit(tmp_path / "tokenizer_config.json", chat_template=given)
        with pytest.raises(BadModelFile, match=why):
            read_template(hub_kit.folder(tmp_path), tokenizer)
    hub_kit.edit(tmp_path / "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(BadModelFile, match=r"tokenizer_config.json, chat_template, line 1"):
        read_template(hub_kit.folder(tmp_path), tokenizer)


def test_mutated_files_make_a_tokenizer_or_are_refused(tmp_path: Path):
    """No crash, no hang: a tokenizer that can be used, or an error that names a file."""
    made = {"byte": hub_kit.byte_level, "piece": hub_kit.sentencepiece}
    originals: dict[str, dict[str, Any]] = {}
    for name, make in made.items():
        make(tmp_path / name)
        originals[name] = {
            file: json.loads((tmp_path / name / file).read_text())
            for file in ("tokenizer.json", "tokenizer_config.json", "config.json")
        }
    outcomes = {"made": 0, "refused": 0}
    for number in range(250):
        rng = random.Random(f"2026:{number}")
        name = rng.choice(list(made))
        file = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "config.json"])
        path = tmp_path / name / file
        path.write_text(json.dumps(stir(originals[name][file], rng)))
        try:
            tokenizer = read_tokenizer(hub_kit.folder(tmp_path / name))
            read_template(hub_kit.folder(tmp_path / name), tokenizer)
            for text in TEXTS[2:8]:
                for parse in (True, False):
                    with contextlib.suppress(BadRequest):
                        tokenizer.decode(tokenizer.encode(text, add_special=True, parse_special=parse))
            outcomes["made"] += 1
        except QuireError as e:
            assert str(tmp_path) in str(e), f"run {number}: {e} does not name the file"
            str(e).encode()
            outcomes["refused"] += 1
        path.write_text(json.dumps(originals[name][file]))
    assert outcomes["made"] > 20 and outcomes["refused"] > 20, outcomes
