"""What adapters cost: tokens per second of a batch that mixes several LoRA adapters, and of the same batch without, in turns.

    python -m benchmarks.lora [MODEL] [--streams 32] [--adapters 8] [--rank 16] [--rounds 5] [--tokens 64] [--save]

The adapters are random, on every projection, in half precision, written to a temporary folder as PEFT folders. Three kinds take turns, each
round with all of them, after one that is thrown away:

    plain    an engine that was started without room for adapters: the model as it was
    none     an engine with the adapters loaded, and requests that use none
    mixed    the same engine, where stream i uses adapter i modulo their number

Prints the rates of decoding (from the first token of an answer on) and the ratios with their spread over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import files
from benchmarks.record import save
from quire import LLM, SamplingParams
from quire.config import DEFAULT_MODEL, PAGE_SIZE

PROMPT = "The history of the city begins with"
KINDS = ("plain", "none", "mixed")


def write_adapters(path: str, folder: Path, count: int, rank: int) -> dict[str, str]:
    """Random adapters for the model at `path`, on everything but the head."""
    from safetensors.numpy import save_file

    from quire import models
    from quire.models.adapter_targets import HEAD, AdapterTargets
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.gguf.file import GGUF

    with open_checkpoint(path) as checkpoint:
        model = models.load(checkpoint)
        gguf = isinstance(checkpoint, GGUF)
        targets = AdapterTargets(model, checkpoint.architecture, gguf, model.kv(1, PAGE_SIZE), slots=1, rank=rank)
        shapes = {target.name: (target.n, target.k) for target in targets.by_weight.values() if target.name != HEAD}
    made: dict[str, str] = {}
    for i in range(count):
        rng, own = np.random.default_rng(i), folder / f"adapter-{i}"
        own.mkdir()
        tensors = {}
        for name, (n, k) in shapes.items():
            stem = f"base_model.model.model.{name}.lora_"
            tensors[f"{stem}A.weight"] = (rng.standard_normal((rank, k)) / np.sqrt(k)).astype(np.float16)
            tensors[f"{stem}B.weight"] = (rng.standard_normal((n, rank)) * 0.01).astype(np.float16)
        save_file(tensors, own / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
        (own / "adapter_config.json").write_text(json.dumps(config))
        made[f"adapter-{i}"] = str(own)
    return made


def rate(llm: LLM, names: list[str], streams: int, tokens: int, seed: int) -> float:
    """Tokens per second of all streams together, from the first token of the answers on."""
    params = SamplingParams(temperature=0.7, max_tokens=tokens, seed=seed, ignore_eos=True)
    loras = [names[i % len(names)] for i in range(streams)] if names else ""
    outputs = [o.outputs[0] for o in llm.generate([PROMPT] * streams, params, lora=loras, progress=False)]
    if any(len(one.tokens) != tokens for one in outputs):
        raise SystemExit(f"answers of {sorted({len(one.tokens) for one in outputs})} tokens: {tokens} were wanted")
    return streams * (tokens - 1) / max(one.receipt.decode_seconds for one in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--save", action="store_true", help="keep a record in benchmarks/results")
    asked = parser.parse_args()
    path = str(files.model(asked.model))
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        loras = write_adapters(path, Path(folder), asked.adapters, asked.rank)
        with (
            LLM(asked.model, progress=False, backend=asked.backend) as plain,
            LLM(asked.model, progress=False, backend=asked.backend, loras=loras) as adapted,
        ):
            names = list(loras)
            runs = {"plain": (plain, []), "none": (adapted, []), "mixed": (adapted, names)}
            for turn in range(asked.rounds + 1):
                for kind in KINDS:
                    found = rate(*runs[kind], asked.streams, asked.tokens, turn)
                    if turn:
                        rates[kind].append(found)
            told = [line for line in adapted.info.decisions if "adapter" in line][:2]
            backend = adapted.info.backend
    print(f"{asked.model}, {backend}, {asked.streams} streams; {told[0]}")
    for kind, found in rates.items():
        print(f"{kind:6} {statistics.median(found):8.1f} tokens/s")
    ratios: dict[str, list[float]] = {}
    for kind, base in (("none", "plain"), ("mixed", "none"), ("mixed", "plain")):
        each = sorted(a / b for a, b in zip(rates[kind], rates[base], strict=True))
        ratios[f"{kind}/{base}"] = each
        print(f"{kind}/{base}: {statistics.median(each):.3f} (rounds: {each[0]:.3f} to {each[-1]:.3f})")
    if asked.save:
        settings = {**vars(asked), "backend": backend, "dtype": "float16"}
        print(save("lora", {"settings": settings, "tokens_per_second": rates, "ratios": ratios}))


if __name__ == "__main__":
    main()
