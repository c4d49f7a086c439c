"""onnxruntime-genai int4 on the default model: decode at two depths, prefill of 128 and 512, the same thread count.

`--onnx FOLDER --onnx-python PYTHON` names the model and a Python that has onnxruntime-genai. Both are made once, in a
virtual environment of their own (torch first, by itself, for it is large):

    python3 -m venv onnx && onnx/bin/pip install torch==2.13.0
    onnx/bin/pip install onnxruntime-genai onnxruntime onnx onnx-ir transformers gguf accelerate
    onnx/bin/python -m benchmarks.sections.onnx MODEL.gguf onnx/hf     # from this repository: weights as transformers has them
    onnx/bin/python -m onnxruntime_genai.models.builder -m onnx/hf -o onnx/int4 -p int4 -e cpu -c onnx/cache

The builder quantizes again, to its own int4 in blocks of 32: the same size of weights, not the same weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.figures import Group, Sample
    from benchmarks.world import World

NAME = "onnxruntime-genai"
DEPTHS, LENGTHS, TOKENS = (0, 2048), (128, 512), 128
CHILD = Path(__file__).resolve().parent.parent / "onnx_child.py"


def theirs(python: str, folder: Path, threads: int) -> Sample:
    tests = [{"prompt": max(1, d), "output": TOKENS + 1} for d in DEPTHS] + [
        {"prompt": n, "output": 1} for n in LENGTHS
    ]
    command = [python, str(CHILD), str(folder), str(threads), json.dumps(tests)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"onnxruntime-genai failed:\n{done.stderr[-1500:]}")
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    sample = {(f"depth {d}", ""): f["decode"] for d, f in zip(DEPTHS, found, strict=False)}
    sample.update({(f"prefill {n}", ""): f["prefill"] for n, f in zip(LENGTHS, found[len(DEPTHS) :], strict=True)})
    return sample


def quire(path: Path, threads: int) -> Sample:
    from benchmarks import ours

    found = ours.measure(
        path, threads, [*(ours.decode(d, TOKENS) for d in DEPTHS), *(ours.prefill(n) for n in LENGTHS)]
    )
    names = [*(f"depth {d}" for d in DEPTHS), *(f"prefill {n}" for n in LENGTHS)]
    return {(name, ""): f["tokens/s"] for name, f in zip(names, found, strict=True)}


def groups(world: World) -> list[Group]:
    from benchmarks.figures import OURS, Group, Side
    from benchmarks.world import DEFAULT_FORMAT, SMALL, figure

    if (SMALL, DEFAULT_FORMAT) not in world.pairs():
        return []
    path = world.path(SMALL, DEFAULT_FORMAT)
    names = [*(f"depth {d}" for d in DEPTHS), *(f"prefill {n}" for n in LENGTHS)]
    figures = [figure("onnx", SMALL, DEFAULT_FORMAT, name) for name in names]
    sides = [Side(OURS, lambda: quire(path, world.threads), 7)]
    notes = []
    folder = world.onnx
    if folder is not None:
        sides.append(Side(NAME, lambda: theirs(world.onnx_python, folder, world.threads), 20))
    else:
        notes.append("no --onnx FOLDER was given: ours alone (benchmarks/sections/onnx.py says how to make one)")
    return [Group(f"beside {NAME} int4, {SMALL} {DEFAULT_FORMAT}", figures, sides, world.turns(), notes)]


def export(source: Path, target: Path) -> None:
    """A GGUF file as a folder that transformers and the builder read, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = source.resolve()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are plain floats by now; what remembers that they were quantized stops them from being saved.
    vars(model).update(hf_quantizer=None, is_quantized=False)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
