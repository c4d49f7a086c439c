"""The settings in docs/agents.md, made of what `quire launch --print` shows: python -m quire.cli.agents.page docs/agents.md

A page has a pair of comments, `<!-- settings: NAME -->` and `<!-- end -->`, around what is written for an agent.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from quire.cli.agents.known import AGENTS
from quire.cli.agents.settings import Agent, Target, as_shell

MODEL, CONTEXT, URL = "qwen2.5-coder:1.5b", 32_768, "http://127.0.0.1:8000"
FOLDER = Path("/home/you/.cache/quire/agents")
_PART = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with every part made anew."""
    return _PART.sub(lambda m: f"{m[1]}{_part(AGENTS[m[2]])}{m[3]}", page)


def _part(agent: Agent) -> str:
    lines = as_shell(agent, Target(URL, MODEL, CONTEXT, None, FOLDER / agent.name))
    return f"\n```sh\n{agent.install}\n\n{lines}\n```\n\n"


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
