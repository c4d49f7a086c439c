"""The files that the CPU benchmarks run: the default model in other formats, and a 1B shape with random weights.

`python -m benchmarks.files FOLDER` writes what is missing there. The 1B shape is that of Llama 3.2 1B (2048 wide, 16
layers, 32 heads over 8, ffn 8192) with the default model's vocabulary, so that one tokenizer serves both. Random weights
cost what real ones cost. Quantizing is `llama-quantize`'s work, so that the peer reads files of its own making.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import environment, find, missing

SMALL = "smollm2-135m"
LARGE = "llama-1b"
NAMES = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0", "F16", "F16_BF16")  # the last: float16 whose numbers bfloat16 holds too
FORMATS = {SMALL: NAMES, LARGE: NAMES}

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, FFN, CONTEXT = 2048, 16, 32, 8, 64, 8192, 16384


def path_of(folder: Path, shape: str, name: str) -> Path:
    return folder / f"{shape}-{name.lower()}.gguf"


def write_large(source: Path, target: Path) -> None:
    """The 1B shape in float16: metadata and vocabulary of `source`, random weights."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(str(source))
    writer = GGUFWriter(str(target), "llama")
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            sub = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(1)
    rng = np.random.default_rng(1)

    def matrix(n: int, k: int) -> np.ndarray[Any, np.dtype[np.float16]]:
        return (rng.standard_normal((n, k), np.float32) / np.float32(np.sqrt(k))).astype(np.float16)

    ones = np.ones(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", matrix(vocabulary, WIDTH))
    for i in range(LAYERS):
        at = f"blk.{i}."
        writer.add_tensor(at + "attn_norm.weight", ones)
        writer.add_tensor(at + "attn_q.weight", matrix(HEADS * HEAD, WIDTH))
        writer.add_tensor(at + "attn_k.weight", matrix(KV_HEADS * HEAD, WIDTH))
        writer.add_tensor(at + "attn_v.weight", matrix(KV_HEADS * HEAD, WIDTH))
        writer.add_tensor(at + "attn_output.weight", matrix(WIDTH, HEADS * HEAD))
        writer.add_tensor(at + "ffn_norm.weight", ones)
        writer.add_tensor(at + "ffn_gate.weight", matrix(FFN, WIDTH))
        writer.add_tensor(at + "ffn_up.weight", matrix(FFN, WIDTH))
        writer.add_tensor(at + "ffn_down.weight", matrix(WIDTH, FFN))
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, name: str) -> None:
    """Let llama-quantize write `target`; an unfinished file never has the final name."""
    program = find("llama-quantize")
    if program is None:
        raise RuntimeError(f"{target.name} is not there, and to make it {missing('llama-quantize')}")
    part = target.with_suffix(".part")
    command = [program, "--allow-requantize", *(["--pure"] if name == "Q4_1" else []), str(source), str(part), name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(program))
    if done.returncode:
        raise RuntimeError(f"llama-quantize could not write {target.name}: {done.stderr[-1000:]}")
    part.rename(target)


def round_to_bfloat(source: Path, target: Path) -> None:
    """The float16 file as it would be had its checkpoint been bfloat16, as most are: the same but for three bits a number."""
    from gguf import GGMLQuantizationType, GGUFReader

    shutil.copyfile(source, target)
    reader = GGUFReader(str(target), "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.F16:
            bits = tensor.data.astype(np.float32).view(np.uint32)
            tensor.data[:] = (bits + np.uint32(0x8000) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float16)
    reader.data.flush()


def model(name: str = "") -> Path:
    """Where a model is, the default one without a name; it is fetched, with progress, if it is not on this machine."""
    from quire.cli.pull import here
    from quire.config import DEFAULT_MODEL
    from quire.weights.store.store import Store

    return Path(here(Store(), name or DEFAULT_MODEL))


def prepare(folder: Path, shape: str, name: str) -> Path:
    """The file of this shape and format, written when it is not there. RuntimeError says what that would need."""
    target = path_of(folder, shape, name)
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"writing {target}", file=sys.stderr, flush=True)
    original = model()
    if name == "F16_BF16":
        whole = prepare(folder, shape, "F16")
        _write(target, lambda part: round_to_bfloat(whole, part))
    elif shape == SMALL:
        if name == "Q4_1":
            target.symlink_to(original)
        else:
            quantize(original, target, name)
    elif name == "F16":
        _write(target, lambda part: write_large(original, part))
    else:
        quantize(prepare(folder, LARGE, "F16"), target, name)
    return target


def _write(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make it; an unfinished file never has the final name."""
    part = target.with_suffix(".part")
    try:
        write(part)
    except ImportError as e:
        raise RuntimeError(f"{target.name} is not there, and making it needs the gguf package: {e}") from None
    part.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    for shape, names in FORMATS.items():
        for name in names:
            print(prepare(args.folder, shape, name))


if __name__ == "__main__":
    main()
