"""The tokenizer against what the models' own tokenizers said, for every vocabulary that is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import QuireError, Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.store.store import Store

WITH_VECTORS = ["deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-spm", "mpt", "phi-3", "refact", "starcoder"]
WITHOUT_VOCABULARY = ["command-r", "gemma-4", "llama-bpe", "qwen2", "qwen35"]
IN_THE_STORE = {"qwen2": "qwen2.5-coder:1.5b"}  # a model with that vocabulary


def metadata(folder: Path, name: str) -> Any:
    path = folder / "tokenizers" / f"ggml-vocab-{name}.gguf"
    if name in IN_THE_STORE:
        try:
            path = Store().resolve(IN_THE_STORE[name])
        except QuireError:
            pytest.skip(f"needs the vocabulary of {IN_THE_STORE[name]} in the store: quire pull {IN_THE_STORE[name]}")
    if not path.is_file():
        pytest.skip(f"needs the vocabulary {path.name} in the shared data folder")
    with GGUF.open(path) as file:
        return file.metadata


def vectors(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    stem = folder / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().split("\n")
    return [(text, [int(n) for n in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_agrees_with_the_vectors(shared_data: Path, name: str):
    tokenizer = Tokenizer.from_gguf(metadata(shared_data, name))
    pairs = vectors(shared_data, name)
    assert len(pairs) > 40
    for text, expected in pairs:
        assert tokenizer.encode(text, add_special=False, parse_special=False) == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("name", WITHOUT_VOCABULARY)
def test_vectors_without_vocabulary(shared_data: Path, name: str):
    tokenizer = Tokenizer.from_gguf(metadata(shared_data, name))  # skips, saying so, while there is no vocabulary
    for text, expected in vectors(shared_data, name):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == expected


def test_wordpiece_agrees_with_the_vectors(shared_data: Path):
    """Its text does not come back as it was (no case, no accents), so ids alone are compared."""
    tokenizer = Tokenizer.from_gguf(metadata(shared_data, "bert-bge"))
    pairs = vectors(shared_data, "bert-bge")
    assert len(pairs) > 40
    for text, expected in pairs:
        assert tokenizer.encode(text, add_special=False, parse_special=False) == expected, text
    around = tokenizer.encode("Hello, World! It is unaffable.", add_special=True, parse_special=True)
    assert around[0] == 101 and around[-1] == 102  # [CLS] and [SEP]
    assert tokenizer.decode(around, skip_special=True) == "hello, world! it is unaffable."
    assert tokenizer.decode(around).startswith("[CLS] hello, world!")
    assert not {101, 102} & set(tokenizer.encode("[CLS] [SEP]", add_special=False, parse_special=False))


def test_a_vocabulary_of_another_kind_is_refused(shared_data: Path):
    other = {**metadata(shared_data, "gpt-2"), "tokenizer.ggml.model": "rwkv"}
    with pytest.raises(Unsupported, match=r"'rwkv'.*supported: gpt2, llama, bert, t5"):
        Tokenizer.from_gguf(other)


def test_a_file_that_names_no_pre_tokenizer_is_refused(shared_data: Path):
    with pytest.raises(Unsupported, match=r"tokenizer\.ggml\.pre is missing"):
        Tokenizer.from_gguf(metadata(shared_data, "gpt-neox"))


def test_baichuan_round_trip(shared_data: Path):
    tokenizer = Tokenizer.from_gguf(metadata(shared_data, "baichuan"))  # no vectors for it, but texts
    for text, _ in vectors(shared_data, "llama-spm"):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False)) == text


def test_phi3_takes_the_space_after_its_special_tokens(shared_data: Path):
    tokenizer = Tokenizer.from_gguf(metadata(shared_data, "phi-3"))
    user, end = (tokenizer.token_id(t) for t in ("<|user|>", "<|end|>"))
    hi = tokenizer.encode("hi", add_special=False, parse_special=False)
    assert tokenizer.encode("<|user|>\n hi<|end|>\n", add_special=False, parse_special=True) == [user, *hi, end]


def test_the_default_model(model_path: Path):
    with GGUF.open(model_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert set(tokenizer.eos_ids) == {2, 0}  # <|im_end|> as the file says, <|endoftext|> by its text
    chat = "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.encode(chat, add_special=False, parse_special=True) == [1, 4093, 198, 6004, 2, 198]
    plain = tokenizer.encode(chat, add_special=False, parse_special=False)
    assert not {0, 1, 2} & set(plain)
    assert tokenizer.decode(plain) == chat


def test_the_default_model_agrees_with_the_tokenizers_library(model_path: Path):
    """An independent build of the same vocabulary: the library's own ByteLevel splitting after single digits."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    with GGUF.open(model_path) as file:
        data = file.metadata
        ours = Tokenizer.from_gguf(data)
        tokens = list(data["tokenizer.ggml.tokens"])
        merges = [tuple(m.split(" ")) for m in data["tokenizer.ggml.merges"]]
    library = Library(models.BPE(dict(zip(tokens, range(len(tokens)), strict=True)), merges))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    for text in [
        "Hello world",
        "1234 + 5678",
        "  indented\n\n\tcode()",
        "naïve café 你好 🙂👍🏽",
        "don't 'S x²½",
        "\x00\u2028",
    ]:
        assert ours.encode(text, add_special=False, parse_special=False) == library.encode(text).ids
