"""What the doctor knows: plain data, picklable (it crosses Ray) and JSON-able. Sizes are bytes, times seconds.

Nothing here judges. A field that could not be found out is None, empty or 0, and an `error` says why where somebody
can do something about it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that a path is on, or will be on once it is made (`exists` says which)."""

    path: str
    exists: bool
    writable: bool
    filesystem: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A resource limit of this process; None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """As nvidia-smi shows it. `total` 0: it does not say."""

    index: int
    name: str
    driver: str
    total: int
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    gpu: int
    pid: int
    name: str
    used: int


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch makes of the GPUs, asked in a process of its own.

    `architectures` are those it has kernels for (`sm_90`, `compute_120`); `apart` are pairs of GPUs that cannot
    reach each other's memory.
    """

    version: str = ""
    cuda: str = ""
    devices: int = 0
    architectures: tuple[str, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class SGLang:
    """Whether this SGLang can be imported, asked in a process of its own, and the arguments it knows."""

    version: str = ""
    arguments: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Arena:
    """An arena under `spool.path`; `is_dead` if nobody owns it any more."""

    path: str
    nbytes: int
    is_dead: bool


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model directory of one node.

    Attributes:
        weight_bytes: of all tensors.
        elements: tensor elements by dtype, as safetensors spells it.
        problems: what is missing, cut off or not a weight file at all.
        digest: differs where configuration or weights differ; empty if there are problems.
        quantized: config.json has a quantization_config.
    """

    path: str
    error: str = ""
    files: int = 0
    weight_bytes: int = 0
    elements: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    digest: str = ""
    quantized: bool = False


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The run that `output.url` holds already."""

    run_id: str
    created: str
    format_version: str
    num_tokens: int
    largest_prompt_tokens: int
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What happened when this node tried the store.

    Attributes:
        error: why it is of no use; the message says what to change. `is_config_error`: nothing was sent.
        seconds: one small conditional put and what belongs to it.
        skew: the store's clock minus this machine's; None for local stores.
        run: what is there already.
        disk: of a local store.
        credentials: names (not values) of variables that hold credentials here.
    """

    url: str
    error: str = ""
    is_config_error: bool = False
    seconds: float = 0.0
    skew: float | None = None
    run: StoredRun | None = None
    disk: Disk | None = None
    credentials: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine.

    Attributes:
        packages: installed version by name; only what is installed.
        unmet: requirements of hsray that the installed packages do not meet.
        memory_free: available without swapping.
        memory_limit, memory_used: of the tightest control group around this process; None without a limit.
        ephemeral_ports: range from which the kernel gives ports to whoever asks for any.
        listening: TCP ports in use.
        environment: variables that change how Ray, NCCL, CUDA or SGLang behave; secrets masked.
        raylets: session folders of Ray nodes running on this machine.
        orphans: SGLang's processes that lost their parent, as (pid, name).
        has_nvidia_smi: False on a machine without NVIDIA's driver.
        in_ray: these facts were collected by a Ray worker.
        began, ended: this machine's clock.
    """

    host: str
    python: str
    packages: Mapping[str, str]
    unmet: tuple[str, ...]
    cpus: int
    memory_total: int
    memory_free: int
    memory_limit: int | None
    memory_used: int
    open_files: Limit
    locked_memory: Limit
    spool: Disk
    shm: Disk
    ray_temp: Disk
    logs: Disk
    arenas: tuple[Arena, ...]
    ephemeral_ports: tuple[int, int]
    listening: frozenset[int]
    interfaces: tuple[str, ...]
    environment: Mapping[str, str]
    raylets: tuple[str, ...]
    orphans: tuple[tuple[int, str], ...]
    has_nvidia_smi: bool
    gpu_error: str
    gpus: tuple[Gpu, ...]
    gpu_processes: tuple[GpuProcess, ...]
    torch: Torch
    sglang: SGLang
    model: ModelFiles
    store: StoreFacts
    in_ray: bool
    auth_token: bool
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class InputFacts:
    """The first input rows, read as the run would read them.

    Attributes:
        error: why they cannot be read.
        lengths: tokens of each prompt.
        shares: of tokens that each selection keeps (`capture.tokens`).
        is_all: there are no further rows.
        rejects: rows refused, by reason, with the first one's place and detail.
    """

    error: str = ""
    files: int = 0
    nbytes: int = 0
    has_template: bool = False
    rows: int = 0
    lengths: tuple[int, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    is_all: bool = False
    rejects: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What only the driver's machine is asked.

    Attributes:
        tokenizer_error: why the tokenizer or the chat template cannot be loaded.
        ray_address: of the configuration or RAY_ADDRESS; empty for a local Ray.
        ray_error: why nothing listens there.
        fingerprint: as the run's, but for the input files.
    """

    tokenizer_error: str
    inputs: InputFacts
    ray_address: str
    ray_error: str
    fingerprint: Mapping[str, str]
