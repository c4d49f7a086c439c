"""What a constraint costs: tokens per second with a schema and without, on the same prompt, in turns.

    python -m benchmarks.structured [MODEL] [--sequences 1] [--rounds 5] [--tokens 128]

Both kinds generate the same number of tokens from the same prompt: the schema is an array that cannot end before that.
Prints the rates, and the ratio of their medians with its spread. The first round of each is thrown away, so compilation, which
happens once for each schema, is not in it; it is told on a line of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time

from quire import LLM, Constraint, SamplingParams
from quire.config import DEFAULT_MODEL

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "city": {"enum": ["Paris", "Rome", "Oslo"]},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "city", "active"],
        "additionalProperties": False,
    },
}
PROMPT = "A list of people as JSON:\n"


def rate(llm: LLM, constraint: Constraint | None, sequences: int, tokens: int, seed: int) -> float:
    """Tokens per second, all sequences together, from the first token of the answer on."""
    params = SamplingParams(temperature=0.7, max_tokens=tokens, seed=seed, ignore_eos=constraint is None)
    outputs = llm.generate([PROMPT] * sequences, params, constraint=constraint, progress=False)
    made = [o.outputs[0] for o in outputs]
    if any(len(one.tokens) != tokens for one in made):
        raise SystemExit(f"answers of {[len(one.tokens) for one in made]} tokens: {tokens} were wanted")
    return sum(tokens - 1 for _ in made) / max(one.receipt.decode_seconds for one in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    constraint = Constraint.json_schema(SCHEMA)
    with LLM(asked.model, progress=False) as llm:
        began = time.perf_counter()
        rate(llm, constraint, asked.sequences, asked.tokens, 0)
        first = time.perf_counter() - began
        rate(llm, None, asked.sequences, asked.tokens, 0)
        began = time.perf_counter()
        rate(llm, constraint, asked.sequences, asked.tokens, 0)
        again = time.perf_counter() - began
        print(f"vocabulary, compiler and schema, once: {1000 * (first - again):.0f} ms")
        free, held = [], []
        for seed in range(1, asked.rounds + 1):
            free.append(rate(llm, None, asked.sequences, asked.tokens, seed))
            held.append(rate(llm, constraint, asked.sequences, asked.tokens, seed))
    ratios = sorted(h / f for h, f in zip(held, free, strict=True))
    print(f"free text:     {statistics.median(free):.1f} tokens/s")
    print(f"with a schema: {statistics.median(held):.1f} tokens/s")
    print(
        f"ratio:         {statistics.median(held) / statistics.median(free):.3f} (rounds: {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


if __name__ == "__main__":
    main()
