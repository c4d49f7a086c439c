"""The library: a model in this process, asked from Python. `LLM` for scripts and notebooks, `AsyncLLM` for asyncio.

It runs no inference itself: it finds the model, builds engine, tokenizer and template side by side, and turns the completer's chunks
into outputs.

The defaults: without parameters an answer is greedy and at most 512 tokens (`DEFAULT_PARAMS`); its
`finish_reason` is "length" when that cut it.
"""

from __future__ import annotations

from quire.llm.asynchronous import AsyncLLM, AsyncTextStream, Options
from quire.llm.outputs import DEFAULT_PARAMS, Completion, Message, Output, Prompt, Thought
from quire.llm.synchronous import LLM, TextStream

__all__ = [
    "DEFAULT_PARAMS",
    "LLM",
    "AsyncLLM",
    "AsyncTextStream",
    "Completion",
    "Message",
    "Options",
    "Output",
    "Prompt",
    "TextStream",
    "Thought",
]
