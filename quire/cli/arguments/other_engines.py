"""Verbs and options of llama.cpp, Ollama and vLLM, and what each is called here. Read only when a command line was not understood.

None of them is accepted as an alias, because a flag that means nearly the same is how a setting gets lost: the error message names ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

VERBS = {
    "ls": "list",
    "chat": "run",
    "ask": "run",
    "generate": "run",
    "complete": "run",
    "start": "serve",
    "up": "serve",
    "download": "pull",
    "get": "pull",
    "add": "pull",
    "remove": "rm",
    "delete": "rm",
    "info": "show",
    "inspect": "show",
    "status": "ps",
    "perf": "bench",
    "check": "doctor",
}

MODEL = "the model comes first, without a flag"
PROMPT = "the prompt comes after the model, without a flag"
# The options that mean the same; where the verb has none of that name, nothing is said.
OPTIONS = {
    "--context": "-c --ctx-size --max-model-len --num-ctx --n-ctx",
    "--max-tokens": "-n --n-predict --predict --num-predict --max-new-tokens",
    "--threads": "-t --num-threads --num-thread",
    "--temperature": "--temp",
    "--seed": "-s",
    "--system": "-sys --system-prompt",
    "--stats": "--verbose -v --timings",
    "--kv-dtype": "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype",
    "--kv-memory": "--gpu-memory-utilization --kv-cache-memory-bytes --mem-fraction-static",
    "--max-seqs": "-np --parallel --max-num-seqs --max-running-requests",
    "--max-batch-tokens": "-b -ub --batch-size --ubatch-size --max-num-batched-tokens --chunked-prefill-size",
    "--name": "-a --alias --served-model-name",
    "--chat-template": "--chat-template-file",
    "--lora": "--lora-modules --enable-lora --lora-scaled",
    "--speculate": "--speculative-config --spec-type --speculative-algorithm",
    "--no-prefix-cache": "--no-cache-prompt --no-enable-prefix-caching --disable-radix-cache",
    "--json-schema": "-j --json-schema-file --format",
    "--allowed-host": "--allowed-hosts",
    "--cors-origin": "--allowed-origins",
    "--prompt-tokens": "-pg --n-prompt --input-len --random-input-len",
    "--output-tokens": "-n --n-gen --output-len --random-output-len",
    "--requests": "--num-prompts",
    "--concurrency": "--max-concurrency",
    "--rounds": "-r --repetitions --num-iters",
    "--depth": "-d --n-depth",
    "--isa": "--cpu-isa",
}
SENTENCES = {
    MODEL: "-m --model --model-path",
    PROMPT: "-p --prompt",
    "hf:org/repo or hf:org/repo/file.gguf stands in the model's place": "-hf --hf-repo -hff --hf-file",
    "a model is on the GPU as a whole or not at all: --device cuda or --device cpu": "-ngl --n-gpu-layers --gpu-layers --cpu-offload-gb",
    "one GPU is used: --device cuda:N says which": "-tp --tensor-parallel-size -sm --split-mode -ts --tensor-split",
    "prefixes are cached unless --no-prefix-cache says otherwise": "--enable-prefix-caching --cache-prompt --cache-reuse",
    "how a model calls tools and reasons is found from its chat template": (
        "--enable-auto-tool-choice --tool-call-parser --reasoning-parser --reasoning-format --enable-reasoning"
    ),
    "templates always run": "--jinja",
    "how a file is quantized is read from the file": "--quantization",
    "no code of a model's folder is ever run": "--trust-remote-code",
    "nothing need be said, it is always so": "-fa --flash-attn -cb --cont-batching --enable-chunked-prefill --metrics --slots",
    "files are always mapped": "--no-mmap --mlock",
    "the model stays loaded while the server runs": "--keepalive --keep-alive --sleep-idle-seconds",
    "every model that generates embeds, too; --task embed is for one that shall do nothing else": "--embedding --embeddings",
    "how rows become an embedding is read from the model's files": "--pooling --pooler-config --override-pooler-config",
    "--debug goes before the verb: quire --debug VERB …": "--debug",
}


def _table(rows: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for ours, theirs in rows.items():
        for flag in theirs.split():
            found.setdefault(flag, []).append(ours)
    return found


def hint(refused: str, words: Sequence[str], known: Iterable[str]) -> str | None:
    """What to say of an option that was refused, for a verb that knows the options `known`. One of several letters behind one dash
    (-ngl) is refused by its first; `words` has it whole."""
    options, sentences, own = _table(OPTIONS), _table(SENTENCES), set(known)
    for word in words:
        if not word.startswith(refused):
            continue
        flag = word.partition("=")[0].replace("_", "-")
        for ours in options.get(flag, []):
            if ours in own:
                return f"here it is {ours}"
        if flag in sentences:
            return sentences[flag][0]
    return None
