"""Checks of environment variables that make runs slow, or stop them. Pure."""

import urllib.parse
from collections.abc import Iterator, Mapping

from hsray.doctor.facts import NodeFacts
from hsray.doctor.finding import Finding, fail, ok, warn
from hsray.doctor.subject import Subject

_CHECK = "environment"
_ON = ("1", "true", "yes")
_ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3")
_CLOUD_HOSTS = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "az": "blob.core.windows.net"}


def check_environment(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    found = [*_proxies(subject, node), *_gpus(subject, node), *_ray(subject, node)]
    if node.environment.get("HSRAY_CRASH_AT"):
        found.append(
            warn(_CHECK, "HSRAY_CRASH_AT is set: the run will kill itself on purpose", "unset it, unless you test that")
        )
    yield from found
    if not found:
        yield ok(_CHECK, "nothing in it that slows or stops a run")


def _proxies(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    variables = {name.upper(): value for name, value in node.environment.items()}
    host, is_plain = store_host(subject.config.output.url, subject.config.output.storage_options, node.environment)
    names = ("HTTP_PROXY", "ALL_PROXY") if is_plain else ("HTTPS_PROXY", "ALL_PROXY")
    proxy = next((name for name in names if variables.get(name)), None)
    if host and proxy and not _bypasses(host, variables.get("NO_PROXY", "")):
        yield warn(
            _CHECK,
            f"{proxy}={variables[proxy]}: every byte of states goes to {host} through it",
            f"add {host} to NO_PROXY on every node, if the store can be reached directly",
        )


def store_host(url: str, options: Mapping[str, object], environment: Mapping[str, str]) -> tuple[str, bool]:
    """Host that the store's requests go to, and whether in plain http; an empty host for local stores."""
    scheme = url.partition("://")[0].lower()
    if scheme not in _CLOUD_HOSTS:
        return "", False
    endpoint = next((str(value) for name, value in options.items() if name.lower() in _ENDPOINTS), "")
    if not endpoint and scheme == "s3":
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL", "")
    if not endpoint:
        return _CLOUD_HOSTS[scheme], False
    parts = urllib.parse.urlsplit(endpoint)
    return parts.hostname or "", parts.scheme == "http"


def _bypasses(host: str, no_proxy: str) -> bool:
    entries = [entry.strip().lstrip("*").lstrip(".") for entry in no_proxy.split(",") if entry.strip()]
    return "*" in no_proxy.split(",") or any(host == entry or host.endswith(f".{entry}") for entry in entries if entry)


def _gpus(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    if subject.config.engine.is_cpu:
        return
    variables = node.environment
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not node.in_ray:
        if visible.strip() in ("", "-1"):
            yield fail(_CHECK, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset it")
        elif len(visible.split(",")) < subject.config.engine.tp_size:
            yield fail(
                _CHECK,
                f"CUDA_VISIBLE_DEVICES={visible} shows fewer GPUs than tp_size {subject.config.engine.tp_size}",
                "unset it, or lower engine.args.tp_size",
            )
    if variables.get("CUDA_LAUNCH_BLOCKING", "").lower() in _ON:
        yield warn(_CHECK, "CUDA_LAUNCH_BLOCKING is set: every kernel waits for the one before", "unset it")
    if subject.config.engine.tp_size == 1:
        return
    for name, what in (("NCCL_P2P_DISABLE", "GPUs do not use each other's memory"), ("NCCL_SHM_DISABLE", "nor shared")):
        if variables.get(name, "").lower() in _ON:
            yield warn(_CHECK, f"{name} is set: {what}; all-reduces of tp_size > 1 become slow", "unset it if it works")
    wanted = variables.get("NCCL_SOCKET_IFNAME", "")
    if wanted and not wanted.startswith("^") and not _matches(wanted, node.interfaces):
        yield fail(
            _CHECK,
            f"NCCL_SOCKET_IFNAME={wanted} fits no interface of this node ({', '.join(node.interfaces)})",
            "unset it in the environment or in engine.env: the processes of one replica are on one node",
        )


def _matches(wanted: str, interfaces: tuple[str, ...]) -> bool:
    """NCCL's rule: names are prefixes, after `=` whole names."""
    if wanted.startswith("="):
        return any(name in interfaces for name in wanted[1:].split(","))
    return any(name.startswith(prefix) for prefix in wanted.split(",") for name in interfaces)


def _ray(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    variables, address = node.environment, subject.config.cluster.address
    elsewhere = variables.get("RAY_ADDRESS")
    if address and elsewhere and elsewhere != address and not node.in_ray:
        yield warn(
            _CHECK,
            f"RAY_ADDRESS={elsewhere} is not cluster.address ({address}), which counts",
            "remove one of them",
        )
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in variables and "RAY_JOB_STOP_WAIT_TIME_S" not in variables and not node.in_ray:
        yield warn(
            _CHECK,
            "RAY_JOB_STOP_WAIT_TIME_S is not set in this job: `ray job stop` kills it after 3 s",
            "set it to 60 in the job's runtime_env env_vars, so that what is complete is committed",
        )
