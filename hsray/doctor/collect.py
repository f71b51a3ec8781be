"""Everything about the machine that this runs on, as `NodeFacts`. Ray's nodes call `collect_node` too."""

import importlib.metadata
import os
import platform
import resource
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from hsray.config import Config
from hsray.doctor import machine
from hsray.doctor.facts import Arena, NodeFacts
from hsray.doctor.gpus import examine_gpus
from hsray.doctor.model_files import examine_model
from hsray.doctor.probe import IN_RAY, examine_software
from hsray.doctor.storage import examine_store
from hsray.spool import find_arenas

PACKAGES = (
    "hsray",
    "ray",
    "sglang",
    "torch",
    "transformers",
    "tokenizers",
    "flashinfer-python",
    "sglang-kernel",
    "sgl-kernel",
    "obstore",
    "pyarrow",
    "numpy",
    "pydantic",
)


def collect_node(config: Config) -> NodeFacts:
    """Look at this machine; some ten seconds, most of them for importing SGLang in another process.

    Args:
        config: with absolute names (`resolve_names`).
    """
    began = time.time()
    gpus = examine_gpus()
    with ThreadPoolExecutor(3, thread_name_prefix="hsray-doctor") as pool:
        probe = pool.submit(
            examine_software, is_cpu=config.engine.is_cpu, has_gpus=bool(gpus.gpus), environment=config.engine.env
        )
        store = pool.submit(examine_store, config)
        model = pool.submit(examine_model, config.model.path)
        torch, sglang = probe.result()
        store_facts, model_facts = store.result(), model.result()
    total, free = machine.memory()
    limit, used = machine.memory_limit()
    packages, unmet = installed()
    return NodeFacts(
        host=socket.gethostname(),
        python=platform.python_version(),
        packages=packages,
        unmet=unmet,
        cpus=len(os.sched_getaffinity(0)),
        memory_total=total,
        memory_free=free,
        memory_limit=limit,
        memory_used=used,
        open_files=machine.limit(resource.RLIMIT_NOFILE),
        locked_memory=machine.limit(resource.RLIMIT_MEMLOCK),
        spool=machine.disk(config.spool.path),
        shm=machine.disk("/dev/shm"),
        ray_temp=machine.disk(_ray_temp()),
        logs=machine.disk(config.log.dir or str(Path(tempfile.gettempdir()) / "hsray-logs")),
        arenas=tuple(Arena(str(a.directory), a.nbytes, a.is_dead) for a in find_arenas(config.spool.path)),
        ephemeral_ports=machine.ephemeral_ports(),
        listening=machine.listening(),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        environment=machine.environment({**os.environ, **config.engine.env}),
        raylets=machine.raylets(),
        orphans=machine.orphans(),
        has_nvidia_smi=gpus.has_nvidia_smi,
        gpu_error=gpus.error,
        gpus=gpus.gpus,
        gpu_processes=gpus.processes,
        torch=torch,
        sglang=sglang,
        model=model_facts,
        store=store_facts,
        in_ray=IN_RAY in os.environ,
        auth_token=_has_auth_token(),
        began=began,
        ended=time.time(),
    )


def installed() -> tuple[dict[str, str], tuple[str, ...]]:
    """Versions of the packages that matter, and what hsray asks for and does not find."""
    versions = {}
    for name in PACKAGES:
        version = _version(name)
        if version is not None:
            versions[name] = version
    unmet = []
    for line in _requirements():
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _version(wanted.name)
        if found is None:
            unmet.append(f"{wanted.name}{wanted.specifier} (not installed)")
        elif not wanted.specifier.contains(found, prereleases=True):
            unmet.append(f"{wanted.name}{wanted.specifier} (installed: {found})")
    return versions, tuple(unmet)


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("hsray") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ray_temp() -> str:
    return os.environ.get("RAY_TMPDIR") or str(Path(tempfile.gettempdir()) / "ray")


def _has_auth_token() -> bool:
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path(path) if path else Path.home() / ".ray" / "auth_token").exists()
