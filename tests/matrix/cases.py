"""The matrix: on which models, layouts and step sizes the capture is compared with transformers."""

from dataclasses import asdict, dataclass
from typing import Any

from hsray.records import JsonDict
from tests.tiny_models import KINDS

# Three sizes of a prefill step against prompts of 1 to 192 tokens (tests/matrix/prompts.py): most are longer, the
# longest is just as long, all are shorter and most of them fit into one step together.
BELOW, AT, ABOVE = 48, 192, 4096
# Bounds a step where prompts are not cut (chunked_prefill_size -1).
BUDGET = 96


@dataclass(frozen=True, slots=True)
class Case:
    """One engine.

    Attributes:
        family: one of `tests.tiny_models.KINDS`.
        step_tokens: prompts are cut so that a step has no more (SGLang's chunked_prefill_size); -1 never cuts one.
        tp, dp: tensor-parallel size, and data-parallel attention over so many of its ranks.
        refused: SGLang's own capture is wrong here: the self-test must stop the replica, and say this.
    """

    family: str
    step_tokens: int = BELOW
    tp: int = 1
    dp: int = 1
    refused: str = ""

    @property
    def name(self) -> str:
        step = f"chunk{self.step_tokens}" if self.step_tokens > 0 else f"budget{BUDGET}"
        return "-".join(
            [self.family, step, *([f"tp{self.tp}"] if self.tp > 1 else []), *([f"dp{self.dp}"] if self.dp > 1 else [])]
        )

    @property
    def engine_args(self) -> dict[str, Any]:
        args: dict[str, Any] = {
            "device": "cpu",
            # Which SGLang divides among the data-parallel ranks.
            "chunked_prefill_size": self.step_tokens * self.dp if self.step_tokens > 0 else -1,
            "max_running_requests": 64,
            "tp_size": self.tp,
            # An idle scheduler otherwise keeps a core busy, and the machine has two.
            "sleep_on_idle": True,
        }
        if self.step_tokens < 0:
            args["max_prefill_tokens"] = BUDGET
        if self.dp > 1:
            args |= {"dp_size": self.dp, "enable_dp_attention": True}
        return args

    @property
    def engine_env(self) -> dict[str, str]:
        # One core to each rank: SGLang on a CPU otherwise asks for a NUMA node per rank.
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in range(self.tp))} if self.tp > 1 else {}

    def why_not_on(self, sglang_version: str) -> str | None:
        """Why the case cannot run on a version of SGLang, or None."""
        if self.dp > 1 and sglang_version == "0.5.17":
            return "it pins host memory for data-parallel attention, which torch refuses without a GPU"
        return None

    def to_json(self) -> JsonDict:
        return {"name": self.name, **asdict(self)}


FAMILIES = tuple(kind for kind in KINDS if kind != "gemma3")
# One class of SGLang under several names.
LLAMAS = ("llama", "mistral", "ministral3", "phi3")
# Its layers hand the residual on apart from their output, and the capture takes the output alone.
GEMMA3 = Case("gemma3", refused="resid_pre_1")

# One model per axis, for every run of CI.
CI = (
    Case("llama"),
    Case("qwen3_moe"),
    Case("kimi_k25"),
    Case("llama", tp=2),
    Case("deepseek_v3", tp=2, dp=2),
)
# What another version of SGLang must pass to get into hsray/capture/tested.py.
VERSION = (
    *(Case(family) for family in FAMILIES),
    Case("llama", tp=2),
    Case("deepseek_v3", tp=2, dp=2),
    GEMMA3,
)
ALL = (
    *(Case(family) for family in FAMILIES),
    Case("llama", tp=2),
    *(Case(family, step) for family in ("llama", "qwen3_moe", "deepseek_v3") for step in (AT, ABOVE, -1)),
    *(Case(family, tp=2) for family in FAMILIES if family not in LLAMAS),
    *(Case(family, step, tp=2) for family in ("llama", "deepseek_v3") for step in (AT, ABOVE)),
    Case("deepseek_v3", tp=2, dp=2),
    Case("deepseek_v3", ABOVE, tp=2, dp=2),
    Case("kimi_k25", tp=2, dp=2),
    GEMMA3,
)
SETS = {"ci": CI, "version": VERSION, "all": ALL}
