"""Mutated tokenizer files against their readers: a tokenizer that can be used, or a QuireError that names the file.

    python -m tests.fuzz.tokenizers --runs 20000 --seed 7

The kinds: tokenizer.json (byte-level BPE, SentencePiece BPE, unigram, WordPiece) with tokenizer_config.json and config.json,
tokenizer.model, tekken.json.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.chat.hub import read_template, read_tokenizer
from quire.observe.errors import BadRequest
from quire.weights.folder import Folder
from tests.fuzz import kit
from tests.unit.chat import hub_kit
from tests.unit.chat.tokenizers import test_spm_file, test_tekken

TEXTS = [
    "",
    "Hello, world",
    " <|im_start|>user\nnaïve 🎉<|im_end|>",
    "<s>[CLS] a</s>[SEP]",
    "a" * 200 + " " * 50,
    "1234\x00",
]
JSON_FILES = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "config.json")


def make(folder: Path) -> dict[str, Path]:
    """One folder for each kind."""
    found = {}
    for kind in ("byte_level", "sentencepiece", "unigram", "wordpiece"):
        getattr(hub_kit, kind)(folder / kind)
        found[kind] = folder / kind
    for kind in ("unigram", "bpe, llama"):
        found[f"model, {kind}"] = path = folder / f"model-{len(found)}"
        test_spm_file.put(path, test_spm_file.train(**test_spm_file.MODELS[kind]))
    found["tekken"] = path = folder / "tekken"
    path.mkdir()
    test_tekken.write(path, test_tekken.learn())
    return found


def mutate(path: Path, rng: random.Random) -> str:
    """Change one file of a folder; says which and how."""
    if (path / "tokenizer.model").exists():
        name = rng.choice(("tokenizer.model", "tokenizer.model", "config.json"))
    elif (path / "tekken.json").exists():
        name = rng.choice(("tekken.json", "tekken.json", "config.json"))
    else:
        name = rng.choice([n for n in JSON_FILES if (path / n).exists()])
    file = path / name
    if name.endswith(".json") and rng.random() < 0.75:
        file.write_text(json.dumps(kit.stir(json.loads(file.read_text()), rng)))
        return f"{name}, stirred"
    file.write_bytes(kit.mangle(file.read_bytes(), rng))
    return f"{name}, mangled"


def look(path: Path) -> None:
    """Read the folder's words and use them. Raises QuireError."""
    folder = Folder.open(path)
    tokenizer = read_tokenizer(folder)
    read_template(folder, tokenizer)
    for text in TEXTS:
        for parse in (True, False):
            with contextlib.suppress(BadRequest):
                tokenizer.decode(tokenizer.encode(text, add_special=True, parse_special=parse))
    with contextlib.suppress(BadRequest):
        tokenizer.encode_parts(tokenizer.controls(TEXTS[2]))


def fuzz(numbers: Iterable[int], seed: int, folder: Path, tell: Callable[[str], None] | None = None) -> Counter[str]:
    made = make(folder)

    def put(rng: random.Random) -> kit.Mutant:
        kind = rng.choice(sorted(made))
        return kit.put_folder(made[kind], folder / "mutant", kind, mutate, rng)

    return kit.drive(numbers, seed, put, look, tell=tell)


if __name__ == "__main__":
    kit.main(__doc__, fuzz, runs=2000)
