"""Requests over HTTP that share a long prefix: tokens per second and time to first token, beside `llama-server`.

Both servers are started as a user starts them, asked the same completions through the same streaming client, and stopped;
they take turns. Every request has the shared text and a line of its own, greedy, a fixed number of tokens out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import find, missing
from benchmarks.record import ROOT, median, save, spread

SENTENCE = "The river runs past the mill, under the stone bridge, and on to the sea. "


@dataclass(slots=True)
class Round:
    """One round of all requests."""

    tokens_per_second: float
    first: list[float]  # seconds to the first token, one per request

    def at(self, share: float) -> float:
        ordered = sorted(self.first)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ready(url: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"the server at {url} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    sys.exit(f"the server at {url} was not ready in {seconds:.0f} s")


async def one(port: int, model: str, prompt: str, output: int) -> tuple[float, int]:
    """(seconds to the first token, tokens) of one streamed completion, over a plain socket."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    first, tokens = 0.0, 0
    while line := await reader.readline():
        if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            sys.exit(f"the server answered {line.decode().strip()}: {(await reader.read()).decode()[-500:]}")
        if not line.startswith(b"data: {"):
            continue
        if json.loads(line[6:]).get("choices"):
            first = first or time.perf_counter() - begun
            tokens += 1
    writer.close()
    return first, tokens


async def drive(port: int, model: str, shared: str, requests: int, concurrency: int, output: int) -> Round:
    gate = asyncio.Semaphore(concurrency)

    async def ask(i: int) -> float:
        async with gate:
            first, _ = await one(port, model, f"{shared}\nQuestion {i}: what comes next?\n", output)
            return first

    begun = time.perf_counter()
    first = await asyncio.gather(*(ask(i) for i in range(requests)))
    return Round(requests * output / (time.perf_counter() - begun), list(first))


def run(command: list[str], health: str, port: int, model: str, args: argparse.Namespace, concurrency: int) -> Round:
    """Start a server, drive it, stop it."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready(f"http://127.0.0.1:{port}{health}", process)
        return asyncio.run(drive(port, model, args.shared_text, args.requests, concurrency, args.output))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a name or a path; the default model when absent")
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=512, help="tokens of the shared prefix, about")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write a record to benchmarks/results")
    args = parser.parse_args()

    from quire.config import DEFAULT_MODEL, available_cores
    from quire.weights.store import Store

    name = args.model or DEFAULT_MODEL
    path = str(Store().resolve(name))
    threads = str(args.threads or available_cores())
    args.shared_text = SENTENCE * max(1, args.shared // 18)  # the sentence is about 18 tokens
    peer = find("llama-server")
    print(f"{name}, {threads} threads, {args.requests} requests, {args.shared} shared tokens, {args.output} out")
    records = {}
    for concurrency in args.concurrency:
        ours, theirs = [], []
        for _ in range(args.rounds):
            port = free_port()
            quire = [
                sys.executable,
                "-m",
                "quire.cli.main",
                "serve",
                path,
                "--name",
                "bench",
                "--port",
                str(port),
                "--threads",
                threads,
            ]
            ours.append(run(quire, "/ready", port, "bench", args, concurrency))
            if peer:
                port = free_port()
                context = str(concurrency * (args.shared + args.output + 256))
                llama = [peer, "-m", path, "-t", threads, "--port", str(port), "-np", str(concurrency), "-c", context]
                theirs.append(run(llama, "/health", port, "bench", args, concurrency))
        records[str(concurrency)] = {
            label: [vars_of(r) for r in rows] for label, rows in (("quire", ours), ("llama.cpp", theirs))
        }
        show(concurrency, ours, theirs)
    if not peer:
        print(f"  {missing('llama-server')}")
    if args.save:
        print("saved", save("served", {"model": Path(path).name, "threads": threads, "concurrency": records}))


def vars_of(r: Round) -> dict[str, float]:
    return {"tokens_per_second": r.tokens_per_second, "ttft_p50": r.at(0.5), "ttft_p99": r.at(0.99)}


def show(concurrency: int, ours: list[Round], theirs: list[Round]) -> None:
    for label, rows in (("quire", ours), ("llama.cpp", theirs)):
        if rows:
            speed = spread([r.tokens_per_second for r in rows])
            p50, p99 = median([r.at(0.5) for r in rows]), median([r.at(0.99) for r in rows])
            print(
                f"  concurrency {concurrency:2}  {label:9} {speed} tokens/s   first token p50 {p50:.2f} s, p99 {p99:.2f} s"
            )
    if theirs:
        ratios = [o.tokens_per_second / t.tokens_per_second for o, t in zip(ours, theirs, strict=True)]
        print(f"  concurrency {concurrency:2}  ratio     {spread(ratios, 2)}", flush=True)


if __name__ == "__main__":
    main()
