"""Measurements on one node: prefill, copies off the GPU, shared memory, store. Runs here or in a Ray task.

Each is short, and cleans up what it wrote. What needs torch runs in a process of its own.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hsray.config import Config
from hsray.doctor.child import ask
from hsray.doctor.storage import no_new_folders
from hsray.engine import EngineSpec
from hsray.errors import HsrayError
from hsray.resolve import replicas_per_node
from hsray.spool import Arena
from hsray.store import Store, open_store

_MIB = 1 << 20
_SPOOL_BYTES = 512 * _MIB
_FIRST_OBJECT = 8 * _MIB
_LARGEST_OBJECT = 256 * _MIB
_STORE_SECONDS = 10.0
# As many shards as one replica writes at once.
_WRITERS = 4
_COPY_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates (tokens/s and bytes/s), None where not measured, and why not (`errors`, by name of the rate).

    `load_seconds` is the engine's start; `tokens`, `seconds` are what `prefill` was measured with.
    """

    prefill: float | None
    device_copy: float | None
    spool: float | None
    store: float | None
    load_seconds: float
    tokens: int
    seconds: float
    errors: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(config: Config, lengths: Sequence[int], *, with_engine: bool) -> Measured:
    """All of it.

    Args:
        config: with absolute names.
        lengths: of prompts, in tokens; prefill is measured with such a mixture.
        with_engine: also load the model, and copy from the GPU.
    """
    errors: dict[str, str] = {}
    spool = _tried(errors, "spool", lambda: measure_spool(config.spool.path))
    store = _tried(errors, "store", lambda: measure_store(_open(config), config.output.shard_bytes))
    device_copy: float | None = None
    prefill: dict[str, Any] = {}
    if with_engine:
        if not config.engine.is_cpu:
            answer = _tried(
                errors,
                "device_copy",
                lambda: ask("device_copy", {"spool": config.spool.path}, _COPY_SECONDS, os.environ),
            )
            device_copy = answer["rate"] if answer else None
        options = {"engine": asdict(_spec(config)), "lengths": list(lengths)}
        seconds = config.engine.start_timeout_seconds + 120
        prefill = _tried(errors, "prefill", lambda: ask("prefill", options, seconds, os.environ)) or {}
    return Measured(
        prefill=prefill["tokens"] / prefill["seconds"] if prefill else None,
        device_copy=device_copy,
        spool=spool,
        store=store,
        load_seconds=prefill.get("load_seconds", 0.0),
        tokens=prefill.get("tokens", 0),
        seconds=prefill.get("seconds", 0.0),
        errors=errors,
    )


def _tried(errors: dict[str, str], name: str, function: Any) -> Any:
    try:
        return function()
    except (HsrayError, OSError) as err:
        errors[name] = str(err)
        return None


def measure_spool(path: str, nbytes: int = _SPOOL_BYTES) -> float:
    """Bytes/s of one thread into a new arena. Raises SpoolFull or ConfigError."""
    arena = Arena(path, nbytes)
    try:
        source = np.random.default_rng(0).integers(0, 256, min(nbytes, 64 * _MIB), dtype=np.uint8)
        started = time.perf_counter()
        for offset in range(0, nbytes - source.nbytes + 1, source.nbytes):
            with arena.view(offset, source.nbytes) as view:
                view[:] = source.data
        return (nbytes // source.nbytes) * source.nbytes / (time.perf_counter() - started)
    finally:
        arena.remove()


def measure_store(store: Store, shard_bytes: int, seconds: float = _STORE_SECONDS) -> float:
    """Bytes/s into the store, several objects of shard size at once. At most as many are there at a time."""
    prefix = f".hsray-probe-{uuid.uuid4().hex}"
    keys = [f"{prefix}/{number}" for number in range(_WRITERS)]
    with no_new_folders(store, prefix), _deleting(store, keys):
        first = np.random.default_rng(0).bytes(min(_FIRST_OBJECT, shard_bytes))
        started = time.perf_counter()
        store.put(keys[0], first)
        rate = len(first) / (time.perf_counter() - started)
        # An object should take a few seconds: long enough to count, and short enough to end in time.
        nbytes = min(max(len(first), int(rate * seconds / 5)), shard_bytes, _LARGEST_OBJECT)
        data = np.random.default_rng(1).bytes(nbytes)
        started = time.perf_counter()

        def write(key: str) -> int:
            count = 0
            while time.perf_counter() - started < seconds:
                store.put(key, data)
                count += 1
            return count

        with ThreadPoolExecutor(_WRITERS) as pool:
            written = sum(pool.map(write, keys)) * nbytes
        return written / (time.perf_counter() - started)


@contextlib.contextmanager
def _deleting(store: Store, keys: Sequence[str]) -> Iterator[None]:
    try:
        yield
    finally:
        store.delete(keys)


def _open(config: Config) -> Store:
    output = config.output
    return open_store(output.url, output.storage_options, commit=output.commit, retry_seconds=30.0)


def _spec(config: Config) -> EngineSpec:
    """As the driver makes it for replicas."""
    env = dict(config.engine.env)
    if config.engine.is_cpu:
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // replicas_per_node(config))))
    return EngineSpec(
        model_path=config.model.path,
        trust_remote_code=config.model.trust_remote_code,
        args=config.engine.args,
        env=env,
        is_cpu=config.engine.is_cpu,
    )
