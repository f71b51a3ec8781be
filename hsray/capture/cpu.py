"""SGLang's engine on a CPU without its compiled kernels: what tests, laptops and the quickstart need.

Two stand-in packages (`cpu_stand_ins/`) satisfy imports of `sgl_kernel` and `torchvision` where the real ones
are absent; anything called in them raises. `prepare_cpu_engine` fixes what the torch-native attention backend
lacks. Speed on a CPU is not a goal; the numbers are exact.
"""

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

STAND_INS = Path(__file__).parent / "cpu_stand_ins"


def cpu_environment(environment: MutableMapping[str, str]) -> None:
    """Set what SGLang needs to take its CPU engine, in this process and in those it starts."""
    environment.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Otherwise small operators are compiled one by one: seconds of stalls in the middle of a run.
    environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    missing = [name for name in ("sgl_kernel", "torchvision") if importlib.util.find_spec(name) is None]
    if missing:
        folders = [str(STAND_INS / name) for name in missing]
        existing = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(STAND_INS), *folders, *([existing] if existing else [])])
        sys.path[:0] = [str(STAND_INS), *folders]


def prepare_cpu_engine() -> None:
    """Make MLA models and data-parallel padding work on the torch-native attention backend."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    # This backend reads the latent cache as it is, so only the absorbed form of MLA is right on it.
    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
    for name in ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value"):
        if name not in TorchNativeAttnBackend.__dict__:
            setattr(TorchNativeAttnBackend, name, lambda self: 1)
