"""What this project's own tests have run the capture on, end to end, against transformers (tests/matrix).

A version is here when `scripts/test --sglang VERSION` has passed for every class in its row.
"""

from collections.abc import Mapping

_CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Phi3ForCausalLM",
    "ArceeForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
)
TESTED: Mapping[str, tuple[str, ...]] = {
    "0.5.17": _CLASSES,
    "0.5.21": _CLASSES,
    "0.5.23": _CLASSES,
}
TESTED_VERSIONS = tuple(TESTED)
TESTED_MODELS = tuple(dict.fromkeys(name for classes in TESTED.values() for name in classes))
# Tested and found wrong: why.
WRONG: Mapping[str, str] = {
    "Gemma3ForCausalLM": (
        "SGLang captures what its layers add to the residual stream, not the stream; only final sites are right"
    ),
}


def untested(sglang_version: str | None, model_class: str) -> str | None:
    """What is not in the tables, in words, or None. A version of None is not looked at."""
    where = [version for version, classes in TESTED.items() if model_class in classes]
    problems = []
    if sglang_version is not None and sglang_version not in TESTED:
        problems.append(f"capture was not tested on SGLang {sglang_version} (tested: {', '.join(TESTED_VERSIONS)})")
    if model_class in WRONG:
        problems.append(f"capture is wrong on model class {model_class}: {WRONG[model_class]}")
    elif not where:
        problems.append(f"capture was not tested on model class {model_class} (tested: {', '.join(TESTED_MODELS)})")
    elif sglang_version in TESTED and sglang_version not in where:
        problems.append(
            f"capture was not tested on model class {model_class} with SGLang {sglang_version} "
            f"(tested with: {', '.join(where)})"
        )
    if not problems:
        return None
    return f"{'. '.join(problems)}. Set engine.allow_untested: true to let the self-test decide"
