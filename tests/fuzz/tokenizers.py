"""Mutated tokenizer files against their readers: a tokenizer that can be used, or a QuireError that names the file.

    python -m tests.fuzz.tokenizers --runs 20000 --seed 7

The kinds: tokenizer.json (byte-level BPE, SentencePiece BPE, unigram, WordPiece) with tokenizer_config.json and config.json,
tokenizer.model, tekken.json. A run is decided by (seed, number) alone. Each must end within SECONDS and GROWTH bytes of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.chat.hub import read_template, read_tokenizer
from quire.observe.errors import BadRequest, QuireError
from quire.weights.folder import Folder
from tests.fuzz.safetensors import stir
from tests.unit.chat import hub_kit, test_spm_file, test_tekken

SECONDS = 20.0
GROWTH = 1 << 30
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


def mangled(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few places changed, cut or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        at = rng.randrange(max(1, len(out)))
        how = rng.randrange(5)
        if how == 0:
            out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)]) if out else b"x"
        elif how == 1:
            del out[at : at + rng.choice((1, 5, 100))]
        elif how == 2:
            out[at:at] = rng.choice((b"\xff" * 10, bytes(8), rng.randbytes(4), b'"', b"{", b"[" * 2000))
        elif how == 3:
            del out[at:]
        else:
            out[at:at] = out[at : at + 40]
    return bytes(out)


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
        file.write_text(json.dumps(stir(json.loads(file.read_text()), rng)))
        return f"{name}, stirred"
    file.write_bytes(mangled(file.read_bytes(), rng))
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


def fuzz(numbers: Iterable[int], seed: int, folder: Path) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    kinds = make(folder)
    for number in numbers:
        rng = random.Random(f"{seed}:{number}")
        kind = rng.choice(sorted(kinds))
        path = folder / "mutant"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(kinds[kind], path)
        how = mutate(path, rng)
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            look(path)
            outcomes["made"] += 1
        except QuireError as e:
            assert str(path) in str(e), f"run {number} ({kind}: {how}): {e} does not name the file"
            str(e).encode()  # a terminal can show it
            outcomes["refused"] += 1
        took, grew = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert took < SECONDS, f"run {number} ({kind}: {how}) took {took:.1f} s"
        assert grew * 1024 < GROWTH, f"run {number} ({kind}: {how}) took {grew} KiB"
        outcomes[kind] += 1
    return outcomes


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one run by its number")
    options = parser.parse_args()
    numbers = range(options.runs) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory() as folder:
        print(dict(fuzz(numbers, options.seed, Path(folder))))


if __name__ == "__main__":
    main()
