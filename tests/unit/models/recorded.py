"""What transformers answers about the default model, written down: loading it there takes as long as a test should.

test_llama.py, which has it loaded, asks again and holds these to it. The recipe: `tiny.from_gguf` makes the model of weights
that the gguf package dequantized; `continuation` and `perplexity` below.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TOKENS = 10
CONTINUATIONS: dict[str, list[int]] = {
    "The capital of France is": [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34],
    "def fibonacci(n):\n    ": [753, 3987, 46477, 24, 94, 727, 466, 585, 304, 1758],
}
TEXT = "A quire is a set of pages bound together. The reader opens it and follows the lines from left to right. " * 3
READ, CONTEXT, STRIDE = 60, 40, 20  # tokens of that text, in windows
PERPLEXITY = 9.12938


def continuation(oracle: Any, prompt: list[int]) -> list[int]:
    """Greedy, in float32."""
    import torch

    with torch.no_grad():
        answer = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
    return answer[0, len(prompt) :].tolist()


def perplexity(oracle: Any, tokens: list[int], context: int, stride: int) -> float:
    """From transformers' own loss: labels of -100 are left out."""
    import torch

    from benchmarks.perplexity import windows

    total, count = 0.0, 0
    for begin, wanted, end in windows(len(tokens), context, stride):
        ids = torch.tensor([tokens[begin:end]])
        labels = ids.clone()
        labels[:, : wanted - begin] = -100
        with torch.no_grad():
            total += float(oracle(input_ids=ids, labels=labels).loss) * (end - wanted)
        count += end - wanted
    return float(np.exp(total / count))
