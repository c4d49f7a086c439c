"""onnxruntime-genai's figures, in a Python that has it: `python onnx_child.py FOLDER THREADS TESTS`, prints JSON.

Stands alone, because that Python has none of our packages. TESTS is a JSON list of {"prompt": n, "output": n}; a test
gives the prompt's tokens per second (to the first token) and the later ones'.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import onnxruntime_genai as og  # pyright: ignore[reportMissingImports]


def main() -> None:
    folder, threads, tests = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    config = og.Config(folder)
    options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = og.Model(config)

    def run(prompt: int, output: int, salt: int) -> dict[str, float]:
        params = og.GeneratorParams(model)
        length = prompt + output
        params.set_search_options(do_sample=False, max_length=length, min_length=length)  # no early end
        generator = og.Generator(model, params)
        tokens = np.array([1 + (i * 104729 + salt * 7919) % 40000 for i in range(prompt)], dtype=np.int32)
        begun = time.perf_counter()
        generator.append_tokens(tokens)
        generator.generate_next_token()
        first = time.perf_counter()
        made = 1
        while not generator.is_done():
            generator.generate_next_token()
            made += 1
        ended = time.perf_counter()
        if made != output:
            raise RuntimeError(f"{made} tokens came: {output} were asked for")
        return {"prefill": prompt / (first - begun), "decode": (made - 1) / (ended - first) if made > 1 else 0.0}

    run(512, 4, 0)  # as everybody warms up
    print(json.dumps([run(t["prompt"], t["output"], i + 1) for i, t in enumerate(tests)]))
    print(og.__version__)


if __name__ == "__main__":
    main()
