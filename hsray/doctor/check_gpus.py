"""Checks of GPUs: how many, what their driver and torch can do with them, and whether the model fits. Pure."""

from collections.abc import Iterator
from typing import Any

from hsray.doctor.facts import Gpu, NodeFacts
from hsray.doctor.finding import Finding, fail, ok, warn
from hsray.doctor.subject import Subject
from hsray.units import format_bytes as size

# Older GPUs have no bfloat16; SGLang then turns to float16, which overflows.
_OLDEST_CAPABILITY = (8, 0)
# Major compute capabilities that a backend's kernels exist for. SGLang checks the first two itself, when it starts.
_ATTENTION: dict[str, tuple[int, ...]] = {"fa3": (8, 9), "trtllm_mha": (9, 10, 12), "trtllm_mla": (10,)}
_MOE_RUNNER: dict[str, tuple[int, ...]] = {"flashinfer_trtllm": (10,), "deep_gemm": (9, 10, 12)}
_BACKENDS = {
    "attention_backend": _ATTENTION,
    "prefill_attention_backend": _ATTENTION,
    "moe_runner_backend": _MOE_RUNNER,
}
_MIB = 1 << 20
# What SGLang keeps free of weights and cache unless mem_fraction_static is given: half a GiB, 1.5 MiB for each
# token of a step, an eighth of a GiB for each rank, and on large GPUs at least 10 GiB.
_LARGE_GPU = 60 << 30
_DEFAULT_STEP, _DEFAULT_UNCHUNKED_STEP = 8192, 16384
_MAX_STAGING_BYTES = 2 << 30
_LITTLE_CACHE = 0.05
_IN_USE = 0.1


def check_gpus(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    engine = subject.config.engine
    if engine.is_cpu:
        yield ok("gpus", f"none needed (engine.args.device: cpu); {len(node.gpus)} here")
        return
    tp = engine.tp_size
    if not node.gpus:
        seen = "nvidia-smi shows none" if node.has_nvidia_smi else "there is no nvidia-smi"
        yield fail(
            "gpus",
            f"no GPU here: {node.gpu_error or seen}",
            "install NVIDIA's driver (in a container: its container toolkit, --gpus all), or set "
            "engine.args.device: cpu for a small model",
        )
        return
    names = sorted({gpu.name for gpu in node.gpus})
    seen = f"{len(node.gpus)} x {', '.join(names)}, driver {node.gpus[0].driver}"
    if len(node.gpus) < tp:
        yield fail("gpus", f"{seen}; one replica needs {tp}", "lower engine.args.tp_size, or use larger nodes")
    elif len(node.gpus) % tp:
        yield warn(
            "gpus", f"{seen}; tp_size {tp} leaves {len(node.gpus) % tp} idle", "choose a tp_size that divides them"
        )
    else:
        yield ok("gpus", f"{seen}: {subject.replicas_on(len(node.gpus))} replicas")
    if len(names) > 1:
        yield warn("gpus", f"different GPUs on one node: {', '.join(names)}", "pin the run to one kind with labels")
    yield from _check_torch(node)
    yield from _check_capability(subject, node)
    yield from _check_peers(subject, node)


def _check_torch(node: NodeFacts) -> Iterator[Finding]:
    torch = node.torch
    seen = f"torch {torch.version or 'none'}, CUDA {torch.cuda or 'none'}"
    if not torch.cuda and not torch.error:
        yield fail("torch", f"{seen}: it was built without CUDA", "install the CUDA build (pip install 'hsray[gpu]')")
    elif torch.error:
        yield fail(
            "torch",
            f"{seen}: {torch.error}",
            "the driver is too old for this CUDA, or the container lacks its libraries: update it, or install a torch "
            "for an older CUDA",
        )
    elif torch.devices == 0:
        yield fail("torch", f"{seen} sees no GPU", "unset CUDA_VISIBLE_DEVICES, and check the driver with nvidia-smi")
    else:
        missing = sorted({gpu.capability for gpu in node.gpus if not has_kernels(gpu.capability, torch.architectures)})
        if missing:
            versions = ", ".join(f"sm_{major}{minor}" for major, minor in missing)
            yield fail(
                "torch",
                f"{seen} has no kernels for {versions} (has: {', '.join(torch.architectures)})",
                "install a torch built for this GPU (Blackwell, sm_100 and sm_120: CUDA 12.8 or newer)",
            )
        else:
            yield ok("torch", f"{seen}, {torch.devices} GPUs")


def has_kernels(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether code for one of `architectures` runs on the GPU: `sm_` within its major version and up to its minor,
    `compute_` (compiled when it is loaded) up to it."""
    for name in architectures:
        kind, _, digits = name.rstrip("abcdefghijklmnopqrstuvwxyz").partition("_")
        if not digits.isdigit():
            continue
        built = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
        if kind == "compute" and built <= capability:
            return True
    return False


def _check_capability(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    args: dict[str, Any] = subject.config.engine.args
    for capability in sorted({gpu.capability for gpu in node.gpus}):
        major, minor = capability
        shown = f"compute capability {major}.{minor}"
        if capability < _OLDEST_CAPABILITY:
            yield fail("capability", f"{shown} has no bfloat16", "use GPUs from Ampere (8.0) on")
            continue
        wrong = [
            (key, str(args[key]), majors[str(args[key])])
            for key, majors in _BACKENDS.items()
            if str(args.get(key)) in majors and major not in majors[str(args[key])]
        ]
        for key, value, majors in wrong:
            yield fail(
                "capability",
                f"engine.args.{key}: {value} has no kernels for {shown} (has: {', '.join(f'{m}.x' for m in majors)})",
                "leave it out, so that SGLang chooses, or take flashinfer or triton"
                if majors is not _MOE_RUNNER.get(value)
                else "leave it out, so that SGLang chooses",
            )
        if not wrong:
            yield ok("capability", shown)


def _check_peers(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    tp = subject.config.engine.tp_size
    if tp == 1 or not node.torch.devices:
        return
    # Replicas take the GPUs in order, tp at a time.
    apart = [pair for pair in node.torch.apart if pair[0] // tp == pair[1] // tp]
    if apart:
        shown = ", ".join(f"{a}-{b}" for a, b in apart[:6]) + (", ..." if len(apart) > 6 else "")
        yield warn(
            "peer access",
            f"{len(apart)} pairs of GPUs of one replica cannot reach each other's memory ({shown})",
            "all-reduces go through host memory: switch off ACS and IOMMU in the BIOS or the hypervisor, or use a "
            "smaller tp_size and more replicas",
        )
    else:
        yield ok("peer access", "all GPUs of a replica reach each other")


def check_gpu_memory(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    """Weights against memory, by SGLang's own rule of what it keeps free; and who else uses the GPUs."""
    if subject.config.engine.is_cpu:
        return
    known = [gpu for gpu in node.gpus if gpu.total]
    if not known:
        return
    yield from _check_in_use(node, known)
    weights = node.model.weight_bytes
    if not weights or node.model.problems:
        return
    args, tp = subject.config.engine.args, subject.config.engine.tp_size
    about = ""
    if args.get("quantization") and not node.model.quantized:
        weights, about = weights // 2, f" after quantization to {args['quantization']} (about)"
    smallest = min(known, key=lambda gpu: gpu.total)
    step = int(args.get("chunked_prefill_size") or _DEFAULT_STEP)
    if step < 0:  # no chunks: a step takes as many prompts as fit into this
        step = int(args.get("max_prefill_tokens") or _DEFAULT_UNCHUNKED_STEP)
    static = _static_bytes(smallest.total, args.get("mem_fraction_static"), step, tp)
    staging = 2 * min(step * subject.per_token, _MAX_STAGING_BYTES)
    left = static - weights // tp - staging
    seen = (
        f"weights {size(weights)}{about} / tp_size {tp} = {size(weights // tp)} of {size(smallest.total)}; "
        f"{size(staging)} for the capture, {size(max(0, left))} for SGLang's cache"
    )
    if left <= 0:
        yield fail(
            "gpu memory",
            seen,
            f"raise engine.args.tp_size to {_fitting_tp(weights, static - staging)} or more, raise "
            "mem_fraction_static, or use a quantized model",
        )
    elif left < _LITTLE_CACHE * smallest.total:
        yield warn("gpu memory", seen, "few prompts fit side by side: raise tp_size or mem_fraction_static")
    else:
        yield ok("gpu memory", seen)


def _check_in_use(node: NodeFacts, gpus: list[Gpu]) -> Iterator[Finding]:
    busy = [gpu for gpu in gpus if gpu.total - gpu.free > _IN_USE * gpu.total]
    if not busy:
        return
    users = [p for p in node.gpu_processes if p.gpu in {gpu.index for gpu in busy}]
    shown = ", ".join(f"pid {p.pid} {p.name} {size(p.used)}" for p in users[:5]) or "by processes that are not shown"
    yield warn(
        "gpu in use",
        f"GPUs {', '.join(str(gpu.index) for gpu in busy)} are in use, {size(max(g.total - g.free for g in busy))} "
        f"of one: {shown}",
        "SGLang sizes its cache by what is free, and may find too little: end what is left over from other runs",
    )


def _static_bytes(total: int, fraction: Any, step: int, tp: int) -> int:
    """Bytes of one GPU that SGLang gives to weights, our staging buffers and its cache."""
    if fraction is not None:
        return int(total * float(fraction))
    reserved = (512 + 1.5 * max(step, 2048) + tp * 128) * _MIB
    if total > _LARGE_GPU:
        reserved = max(reserved, 10 * 1024 * _MIB)
    return int(total - reserved)


def _fitting_tp(weights: int, room: int) -> int:
    tp = 1
    while room > 0 and weights / tp >= room and tp < 64:
        tp *= 2
    return tp
