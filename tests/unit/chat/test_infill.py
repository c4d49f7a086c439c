"""Infill tokens: by a GGUF's keys, else by the texts that families of models use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.chat import infill
from quire.chat.infill import Infill
from quire.chat.tokenizers.vocab import Vocabulary
from quire.observe.errors import BadModelFile
from tests.unit.chat import toys


def vocabulary(*tokens: str, named: tuple[int, int, int] | None = None) -> Vocabulary:
    texts = ["a", "b", *tokens]
    return Vocabulary(
        model="gpt2",
        pre="gpt-2",
        tokens=texts,
        types=np.ones(len(texts), np.int32),
        scores=None,
        merges=(),
        bos_id=None,
        eos_id=None,
        unk_id=None,
        eos_ids=(),
        add_bos=None,
        add_eos=None,
        add_space_prefix=None,
        architecture="",
        infill=named,
    )


@pytest.mark.parametrize("family", infill.FAMILIES, ids=lambda f: f[0])
def test_families(family: tuple[str, str, str]):
    assert infill.find(vocabulary(*family)) == Infill(2, 3, 4, (2, 3, 4))
    assert infill.find(vocabulary(*family[:2])) is None  # a family is whole or is none


def test_what_ends_a_gap():
    found = infill.find(vocabulary("<|fim_prefix|>", "<|file_sep|>", "<|fim_suffix|>", "<|fim_pad|>", "<|fim_middle|>"))
    assert found == Infill(2, 4, 6, (2, 3, 4, 5, 6))


def test_the_file_names_them():
    assert infill.find(vocabulary("x", "y", named=(3, 2, 1))) == Infill(3, 2, 1, (1, 2, 3))
    assert infill.find(vocabulary("x", "y")) is None


def test_keys_are_read_and_checked():
    metadata: dict[str, Any] = toys.byte_level()
    assert Vocabulary.read(metadata).infill is None
    for keys in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):
        named = {f"tokenizer.ggml.{key}_token_id": i + 5 for i, key in enumerate(keys)}
        assert Vocabulary.read(metadata | named).infill == (5, 6, 7)
    with pytest.raises(BadModelFile, match="fim_pre"):
        Vocabulary.read(metadata | {"tokenizer.ggml.fim_pre_token_id": 10**6})


def test_what_is_written():
    class Bytes:
        add_bos, bos_id = True, 300

        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            assert not add_special and not parse_special, "a client's text stays text"
            return list(text.encode())

    tokens = Infill(260, 261, 262, ())
    plain: Any = Bytes()
    assert infill.write(plain, tokens, "ab", "c") == [300, 260, 97, 98, 261, 99, 262]
    assert infill.write(plain, tokens, "", "c") == [300, 260, 261, 99, 262]
    assert infill.write(plain, tokens, [7], "") == [300, 260, 7, 261, 262]
