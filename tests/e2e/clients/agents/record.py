"""Record anew what each agent sends: python -m tests.e2e.clients.agents.record [--whole FOLDER] [AGENT ...]

Runs the agents of build/clients/agents on the scripted model through a task, a resumed turn and what else makes them send a kind of request of its
own (a summary of the conversation, counting), and writes tests/unit/server/agents/requests.json.xz, which `make test` replays. With --whole
the requests and answers are also written as they are, to look at: they are the makers' texts and yours, and not to be committed.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.clients.agents import kit
from tests.e2e.clients.agents.redact import Redactor

OUT = kit.ROOT / "tests" / "unit" / "server" / "agents" / "requests.json.xz"
HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "user-agent", "x-app")
FLAGS = kit.CASES["aider"].again[:4]
# After the task: options of the server, and arguments of the agent.
MORE: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    "codex": (((), ("-c", "model_auto_compact_token_limit=100", *kit.CASES["codex"].again, kit.AGAIN)),),
    "claude": (((), ("--continue", "-p", "/compact")), ((), ("--continue", "-p", "/context"))),
    "opencode": ((("--context", "10500"), ("run", "--continue", kit.AGAIN)),),
    "qwen": ((("--context", "26500"), ("--yolo", "--continue", "-p", kit.AGAIN)),),
    "aider": (((), (*FLAGS, "--restore-chat-history", "--max-chat-history-tokens", "10", "--message", kit.AGAIN)),),
    "llm": (),
}


def record(name: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """All requests of an agent in order, and the project's path."""
    case, place, told = kit.CASES[name], kit.place(folder), []
    runs = [((), (*case.first, kit.TASK)), ((), (*case.again, kit.AGAIN)), *MORE[name]]
    for number, (options, arguments) in enumerate(runs):
        with kit.scripted(folder / f"server-{number}", case.rules(place.project), *options) as server:
            done = place.launch(name, server.url, arguments, **case.variables)
            print(f"{name} {arguments[-1]!r}: exit {done.returncode}, {len(server.recorded())} requests", flush=True)
            for path in sorted(server.folder.glob("*.json")):
                seen = json.loads(path.read_text())
                if seen["method"] == "POST":  # the others have no body
                    told.append(seen)
    return str(place.project), told


def fixtures(name: str, project: str, told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is kept of an agent's requests."""
    redactor = Redactor(project)
    kept = [
        {
            "agent": name,
            "path": seen["path"] + (f"?{seen['query']}" if seen["query"] else ""),
            "headers": {key: redactor.header(key, seen["headers"][key]) for key in HEADERS if key in seen["headers"]},
            "body": redactor.body(seen["body"]),
        }
        for seen in told
    ]
    leaks = redactor.leaks(json.dumps(kept, ensure_ascii=False))
    assert not leaks, f"{name}: {leaks[:5]} would be kept"
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", type=Path, help="a folder for the requests and answers as they are")
    parser.add_argument("agents", nargs="*", default=list(kit.CASES))
    a = parser.parse_args()
    kept = json.loads(lzma.decompress(OUT.read_bytes())) if OUT.exists() else []
    for name in a.agents:
        with tempfile.TemporaryDirectory() as folder:
            project, told = record(name, Path(folder))
        for number, seen in enumerate(told if a.whole else [], 1):
            (a.whole / name).mkdir(parents=True, exist_ok=True)
            (a.whole / name / f"{number:03d}.json").write_text(json.dumps(seen, indent=1, ensure_ascii=False))
        kept = [one for one in kept if one["agent"] != name] + fixtures(name, project, told)
    OUT.write_bytes(lzma.compress(json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode(), preset=9))
    print(f"{len(kept)} requests, {OUT.stat().st_size} bytes: {OUT}")


if __name__ == "__main__":
    main()
