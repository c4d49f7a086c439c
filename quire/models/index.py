"""Which families answer to an architecture's name, so that loading a model imports those modules and no others.

A copy of what the modules say themselves (`ARCHS`, then `HF_ARCHS`), which tests/unit/models/test_index.py holds it to. It
only saves time: a name that is not here is looked for in every module.
"""

from __future__ import annotations

NAMES: dict[str, tuple[str, ...]] = {
    "bert": (
        "bert",
        "BertModel",
        "BertForMaskedLM",
        "BertForSequenceClassification",
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
        "CamembertModel",
        "CamembertForMaskedLM",
        "CamembertForSequenceClassification",
        "DistilBertModel",
        "DistilBertForMaskedLM",
        "DistilBertForSequenceClassification",
    ),
    "cohere": ("command-r", "cohere2", "CohereForCausalLM", "Cohere2ForCausalLM"),
    "deepseek": ("deepseek2", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "glm4": ("glm4", "chatglm", "Glm4ForCausalLM", "GlmForCausalLM"),
    "glm4_moe": ("glm4moe", "Glm4MoeForCausalLM"),
    "gpt_oss": ("gpt-oss", "GptOssForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "granite_moe": ("granitemoe", "GraniteMoeForCausalLM"),
    "llama": (
        "llama",
        "qwen2",
        "smollm3",
        "LlamaForCausalLM",
        "LLaMAForCausalLM",
        "MistralForCausalLM",
        "MinistralForCausalLM",
        "Qwen2ForCausalLM",
        "SmolLM3ForCausalLM",
    ),
    "mixtral": ("llama", "MixtralForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"),
    "qwen3_next": ("qwen3next", "Qwen3NextForCausalLM"),
    "qwen_moe": ("qwen2moe", "qwen3moe", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
}
