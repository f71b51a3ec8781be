"""The run that is examined: its configuration, its model, and what it will need on one node.

The arithmetic is that of the replica (`spool.auto_arena_bytes`, `resolve.replicas_per_node`), not an estimate of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from hsray.checkpoint import ModelFacts, read_facts
from hsray.config import Config
from hsray.doctor.finding import Finding, fail, ok
from hsray.engine import check_arguments
from hsray.errors import HsrayError
from hsray.estimate import codec_bytes
from hsray.resolve import longest_prompt, replicas_per_node, resolve_names
from hsray.schema import bytes_per_token
from hsray.site_storage import Storage, describe_storage, resolve_storage, storage_of
from hsray.sites import Site, resolve_sites
from hsray.spool import arena_bytes_of
from hsray.units import format_bytes

T = TypeVar("T")
# Codecs have sizes per row, and frames of many: a thousand rows are enough to be exact.
_ROWS = 1000
# Bytes of one element once the engine has loaded it on a CPU.
_CPU_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclass(frozen=True, slots=True)
class Subject:
    """A configuration with absolute names, and what could be derived from it. What could not is None, empty or 0.

    Attributes:
        per_token: bytes of hidden states in the arena.
        longest: most tokens that a prompt may have.
        storage: how each site is stored.
        known_longest: the longest prompt that is known to be there, in tokens.
    """

    config: Config
    model: ModelFacts | None
    sites: tuple[Site, ...]
    per_token: int
    longest: int
    storage: Storage = field(default_factory=dict)
    known_longest: int = 0

    def replicas_on(self, gpus: int) -> int:
        """Replicas that a node with so many GPUs gets."""
        engine, wanted = self.config.engine, self.config.cluster.replicas
        if engine.is_cpu:
            return wanted if isinstance(wanted, int) else 1
        fitting = gpus // engine.tp_size
        return min(fitting, wanted) if isinstance(wanted, int) else fitting

    def arena_bytes(self, free: int) -> int:
        """Arena of one replica on a node whose spool has `free` bytes."""
        wanted = self.config.spool.bytes
        if wanted != "auto":
            return int(wanted)
        return arena_bytes_of(
            free,
            self.config.output.shard_bytes,
            self.known_longest * self.per_token,
            replicas_per_node(self.config),
        )

    def wanted_arena_bytes(self) -> int:
        """The arena that `auto` would take if room were no matter."""
        return self.arena_bytes(1 << 62)

    def stored_per_token(self, shares: Mapping[str, float]) -> float:
        """Bytes of a token in the store, by the codec of each site; `shares`: of tokens that a selection keeps."""
        if self.model is None:
            return 0.0
        total = 0
        for site in self.sites:
            entry = storage_of(self.storage, site.name)
            rows = round(_ROWS * shares.get(entry.tokens, 1.0))
            total += codec_bytes(rows, self.model.hidden_size, self.config.capture.dtype)[entry.codec]
        return total / _ROWS

    def cpu_weight_bytes(self, elements: int) -> int:
        dtype = str(self.config.engine.args.get("dtype", "float32"))
        return elements * _CPU_ITEMSIZE.get(dtype, 4)


def make_subject(config: Config) -> tuple[Subject, list[Finding]]:
    """The subject, and what is wrong with the configuration itself."""
    findings: list[Finding] = []

    def attempt(check: str, function: Callable[[], T]) -> T | None:
        try:
            return function()
        except HsrayError as err:
            findings.append(fail(check, str(err), "correct the key that is named; nothing starts before that"))
            return None

    attempt("engine arguments", lambda: check_arguments(config.engine.args))
    config = attempt("names", lambda: resolve_names(config)) or config
    model = attempt("model", lambda: read_facts(config.model.path))
    if model is None:
        return Subject(config, None, (), 0, 0), findings
    sites = attempt("sites", lambda: resolve_sites(config.capture.sites, model.num_layers, config.capture.final)) or ()
    per_token = bytes_per_token(len(sites), model.hidden_size, config.capture.dtype) if sites else 0
    capture = config.capture
    layers = model.num_layers
    storage = attempt("storage", lambda: resolve_storage(capture.codec, capture.tokens, sites, layers)) or {}
    longest = attempt("prompt length", lambda: longest_prompt(config, model)) or 0
    if sites:
        names = ", ".join(site.name for site in sites[:4]) + (", ..." if len(sites) > 4 else "")
        findings.append(ok("sites", f"{len(sites)} ({names}), {format_bytes(per_token)} per token"))
        findings += [ok("storage", line) for line in describe_storage(storage)]
    return Subject(config, model, tuple(sites), per_token, longest, storage), findings
