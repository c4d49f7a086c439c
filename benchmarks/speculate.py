"""What speculative decoding is worth: tokens per second with and without, on text that repeats and on text that does not, in turns.

    python -m benchmarks.speculate [MODEL] [--sequences 1] [--rounds 5] [--tokens 128] [--draft-tokens 4] [--backend auto]

Greedy, the same prompts and as many tokens for both. Prints the median rates and their ratio with its spread, how many drafts were
right, and whether every token was the same (on a GPU without --deterministic, sums of other shapes may round otherwise at a tie).
The first round of each is thrown away.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from quire import LLM, SamplingParams
from quire.config import DEFAULT_MODEL
from quire.llm.outputs import Output

FIELDS = ("name", "street", "city", "country", "phone", "email", "notes", "created")
TEXTS = {
    "a file to be written again": "Here is the file:\n"
    + "".join(f"    self.{f} = record.get('{f}', default.{f})\n" for f in FIELDS)
    + "And here it is once more, unchanged:\n",
    "a table that goes on": "id,name,city,status\n" + "".join(f"{i},user{i},Oslo,active\n" for i in range(1, 12)),
    "prose": "The old harbour had been empty for years when the first of the ships came back, and nobody in the town could say",
}


def ask(llm: LLM, text: str, sequences: int, tokens: int) -> tuple[float, list[Output]]:
    """Tokens per second of all sequences together, from the first token of the answer on."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([text] * sequences, params, progress=False)
    seconds = max(o.receipt.decode_seconds for o in outputs)
    return sequences * (tokens - 1) / seconds, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--deterministic", action="store_true")
    asked = parser.parse_args()
    settings: dict[str, Any] = {
        "backend": asked.backend, "deterministic": asked.deterministic, "context": 2048, "kv_memory": "512MiB", "progress": False,
    }  # fmt: skip
    with (
        LLM(asked.model, **settings) as plain,
        LLM(asked.model, **settings, speculate="ngram", draft_tokens=asked.draft_tokens) as speculating,
    ):
        print(f"{asked.model}, {plain.info.backend}: {asked.sequences} x {asked.tokens} tokens, {asked.rounds} rounds")
        for name, text in TEXTS.items():
            rates: dict[str, list[float]] = {"plain": [], "speculating": []}
            ratios: list[float] = []
            same, receipts = True, []
            for turn in range(asked.rounds + 1):
                without, want = ask(plain, text, asked.sequences, asked.tokens)
                ahead, have = ask(speculating, text, asked.sequences, asked.tokens)
                same &= [o.outputs[0].tokens for o in want] == [o.outputs[0].tokens for o in have]
                receipts = [o.receipt for o in have]
                if turn:
                    rates["plain"].append(without)
                    rates["speculating"].append(ahead)
                    ratios.append(ahead / without)
            drafted, right = (sum(getattr(r, f) for r in receipts) for f in ("drafted_tokens", "accepted_tokens"))
            print(
                f"{name}: {statistics.median(rates['plain']):.1f} -> {statistics.median(rates['speculating']):.1f} tok/s, "
                f"x{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); "
                f"{right} of {drafted} drafts right, {receipts[0].steps} steps; tokens {'the same' if same else 'DIFFER'}"
            )


if __name__ == "__main__":
    main()
