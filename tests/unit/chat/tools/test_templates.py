"""Every public template in the shared data: which format is found, and that what the template writes is read back.

The table in docs/tools.md is `table()` of this file, over all turns:  python -m tests.unit.chat.tools.test_templates
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools.check import Score, check
from quire.chat.tools.detect import NAMES, detect_format, styles
from quire.chat.tools.types import Format
from tests.unit.chat.tools.kit import ToyTokenizer

# Template: format, whether calls and reasoning are read. None: the template shows neither.
FORMATS = {
    "Apertus-8B-Instruct": ("apertus", True, True),
    "Apriel-1.6-15b-Thinker-fixed": ("tool-calls", True, True),
    "Bielik-11B-v3.0-Instruct": ("hermes", True, True),
    "ByteDance-Seed-OSS": ("seed", True, True),
    "Cohere2MoE": ("command-r7b", True, True),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command-r", True, False),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("command-r7b", True, True),
    "GLM-4.6": ("glm", True, True),
    "GLM-4.7-Flash": ("glm", True, True),
    "GigaChat3-10B-A1.8B": ("gigachat-3", True, False),
    "GigaChat3.1-10B-A1.8B": ("gigachat", True, False),
    "HuggingFaceTB-SmolLM3-3B": ("think", False, True),
    "Kimi-K2-Instruct": ("kimi-k2", True, False),
    "Kimi-K2-Thinking": ("kimi-k2", True, True),
    "Kimi-K3": ("kimi-k3", True, True),
    "LFM2-8B-A1B": ("lfm2", True, False),
    "LFM2.5-8B-A1B": ("lfm2", True, True),
    "LFM2.5-Instruct": ("lfm2", True, True),
    "MiMo-VL": ("hermes", True, False),
    "MiniMax-M1": ("tool-calls", True, False),
    "MiniMax-M2": ("minimax-m2", True, True),
    "MiniMax-M3": ("minimax-m3", True, True),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral-args", True, False),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen-xml", True, True),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", True, True),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", True, False),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", True, False),
    "Qwen-QwQ-32B": ("hermes", True, True),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", True, False),
    "Qwen-Qwen3-0.6B": ("hermes", True, True),
    "Qwen3-Coder": ("qwen-xml", True, False),
    "Qwen3.5-4B": ("qwen-xml", True, True),
    "Reka-Edge": ("hermes", True, True),
    "StepFun3.5-Flash": ("qwen-xml", True, True),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek", True, True),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", True, True),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", True, True),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek-dsml", True, True),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek-dsml", True, True),
    "deepseek-ai-DeepSeek-V4": ("deepseek-dsml", True, True),
    "fireworks-ai-llama-3-firefunction-v2": ("firefunction", True, False),
    "google-gemma-2-2b-it": None,
    "google-gemma-4-31B-it-interleaved": ("gemma", True, True),
    "google-gemma-4-31B-it": ("gemma", True, True),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", True, True),
    "ibm-granite-granite-4.0": ("hermes", True, False),
    "ibm-granite-granite-4.1": ("hermes", True, False),
    "llama-cpp-deepseek-r1": ("deepseek", True, True),
    "llama-cpp-rwkv-world": ("think", False, True),
    "meetkai-functionary-medium-v3.1": ("functionary", True, False),
    "meetkai-functionary-medium-v3.2": ("functionary-v3.2", True, False),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama", True, False),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama", True, False),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama", True, False),
    "microsoft-Phi-3.5-mini-instruct": None,
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral-args", True, True),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", True, False),
    "moonshotai-Kimi-K2": ("kimi-k2", True, False),
    "muse-glimmer": ("muse", True, True),
    "openai-gpt-oss-120b": ("harmony", True, True),
    "openbmb-MiniCPM5-1B": ("minicpm", True, True),
    "poolside-Laguna-S-2.1": ("glm", True, True),
    "poolside-Laguna-XS-2.1": ("glm", True, True),
    "poolside-Laguna-XS.2": ("glm", True, True),
    "tencent-Hy3": ("hunyuan", True, True),
    "unsloth-Apriel-1.5": ("tool-calls", True, False),
    "unsloth-mistral-Devstral-Small-2507": ("mistral-args", True, False),
    "upstage-Solar-Open-100B": ("solar", True, True),
}
# Why a score is not whole, or why there is nothing to check.
REASONS = {
    "LFM2.5-8B-A1B": "the template puts strings between apostrophes and does not escape those inside",
    "NVIDIA-Nemotron-Nano-v2": "the template writes text beside calls as a turn of its own, which no model would",
    "openai-gpt-oss-120b": "the template writes text beside a call into the reasoning channel",
    "HuggingFaceTB-SmolLM3-3B": "the template writes no calls, and drops reasoning",
    "LFM2-8B-A1B": "the template shows tools and writes no calls",
    "LFM2.5-Instruct": "the template shows tools and writes no calls",
    "ibm-granite-granite-3.3-2B-Instruct": "the template says in words how to call, and writes no calls",
    "llama-cpp-deepseek-r1": "the template fails when it is given tools",
    "llama-cpp-rwkv-world": "the template drops reasoning",
    "google-gemma-2-2b-it": "the template writes neither calls nor reasoning",
    "microsoft-Phi-3.5-mini-instruct": "the template writes neither calls nor reasoning",
}


def tried(path: Path, part: int = 1, every: int = 1) -> tuple[Format | None, Score | None]:
    template = ChatTemplate(path.read_text(), "<BOS>", "<EOS>")
    form = detect_format(template, ToyTokenizer())
    return form, None if form is None else check(template, ToyTokenizer(), form, part=part, every=every)


def table(folder: Path) -> str:
    """docs/tools.md's."""
    lines = ["| template | format | tools | reasoning | |", "|---|---|---|---|---|"]
    for path in sorted(folder.glob("*.jinja"), key=lambda p: p.stem.lower()):
        form, score = tried(path)
        cells = ["–", "–"]
        if form is not None and score is not None:
            for i, (has, got) in enumerate(((form.calls, score.tools), (form.reasons, score.reasoning))):
                cells[i] = (f"{got[0]}/{got[1]}" if got else "read, not written") if has else "–"
        name = "–" if form is None else form.name
        lines.append(f"| {path.stem} | {name} | {cells[0]} | {cells[1]} | {REASONS.get(path.stem, '')} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", FORMATS)
def test_every_template(shared_data: Path, name: str) -> None:
    form, score = tried(shared_data / "templates" / f"{name}.jinja", part=1 if name in REASONS else 6, every=0)
    assert (None if form is None else (form.name, form.calls, form.reasons)) == FORMATS[name]
    if score is None:
        return
    if name in REASONS:
        assert not score.whole or score.tools is None
    else:
        assert score.whole, score.failed
        assert (score.tools is not None) == form.calls


def test_no_template_is_missing_here(shared_data: Path) -> None:
    assert {path.stem for path in (shared_data / "templates").glob("*.jinja")} == set(FORMATS)


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "GLM-4.6", "openai-gpt-oss-120b", "Kimi-K3"])
def test_at_every_split(shared_data: Path, name: str) -> None:
    score = tried(shared_data / "templates" / f"{name}.jinja", part=8, every=1)[1]
    assert score is not None and (score.whole or name in REASONS), score.failed


def test_every_format_is_met(shared_data: Path) -> None:
    used = {found[0] for found in FORMATS.values() if found is not None}
    assert set(styles()) | set(NAMES.values()) | {"think"} == used


if __name__ == "__main__":
    import sys

    sys.stdout.write(table(Path(sys.argv[1])))
