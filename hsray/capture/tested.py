"""What this project's own tests have run the capture on, end to end (tests/integration/test_sglang.py)."""

TESTED_VERSIONS = ("0.5.21",)
TESTED_MODELS = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
)


def untested(sglang_version: str | None, model_class: str) -> str | None:
    """What is not in the tables, in words, or None. A version of None is not looked at."""
    problems = []
    if sglang_version is not None and sglang_version not in TESTED_VERSIONS:
        problems.append(f"SGLang {sglang_version} (tested: {', '.join(TESTED_VERSIONS)})")
    if model_class not in TESTED_MODELS:
        problems.append(f"model class {model_class} (tested: {', '.join(TESTED_MODELS)})")
    if not problems:
        return None
    return (
        f"capture was not tested on {' and '.join(problems)}. "
        "Set engine.allow_untested: true to let the self-test decide"
    )
