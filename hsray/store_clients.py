"""From a URL and options to where the objects are: obstore's clients, and which request uses which.

Promises: opening sends nothing and makes no directory; a URL or option that cannot work is a `ConfigError` that names
output.url or output.storage_options. Requests are the business of `store.py`, their failures of `store_errors.py`.
"""

import os
import re
import threading
import urllib.parse
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from hsray.errors import ConfigError
from hsray.store_errors import first_line

Client = AzureStore | GCSStore | LocalStore | MemoryStore | S3Store
Purpose = Literal["small", "bulk", "upload"]

_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_KNOWN_SCHEMES = "a path, file://, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, memory://name"


class Backend(Protocol):
    """Where the objects are. `prefix` is empty or ends with a slash, and is not part of any key."""

    prefix: str

    @property
    def is_local(self) -> bool: ...

    def client(self, purpose: Purpose = "small", *, writing: bool = False) -> Client:
        """The obstore client for small requests, for whole large bodies, or for streaming uploads.

        Raises FileNotFoundError if a local root does not exist and nothing is being written.
        """
        ...


class RemoteBackend:
    """A bucket, or a named piece of this process's memory."""

    is_local = False

    def __init__(self, clients: Mapping[Purpose, Client], prefix: str) -> None:
        self.prefix = prefix
        self._clients = clients

    def client(self, purpose: Purpose = "small", *, writing: bool = False) -> Client:
        return self._clients[purpose]


class LocalBackend:
    """A directory, made when the first object is written."""

    is_local = True
    prefix = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._client: LocalStore | None = None

    def client(self, purpose: Purpose = "small", *, writing: bool = False) -> Client:
        if self._client is None or (writing and not self.root.is_dir()):
            if not writing and not self.root.is_dir():
                raise FileNotFoundError(str(self.root))
            self._client = LocalStore(self.root, mkdir=True)
        return self._client


def open_backend(url: str, options: dict[str, Any]) -> tuple[str, Backend]:
    """The URL in its normal form, and where its objects are. May add to `options`; raises ConfigError."""
    if not url.strip():
        raise ConfigError(f"output.url is empty: give {_KNOWN_SCHEMES}")
    match = _SCHEME.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", url)
    if scheme == "file":
        _refuse_options(options, url)
        return _open_local(url, rest, is_path=match is None)
    container, _, prefix = rest.partition("/")
    if scheme not in ("memory", "s3", "gs", "az"):
        near = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az"}.get(scheme)
        hint = f"write {near}://{rest}" if near else f"use {_KNOWN_SCHEMES}"
        raise ConfigError(f"output.url: unknown scheme {scheme!r} in {url!r}; {hint}")
    if not container:
        raise ConfigError(f"output.url: {url!r} names no {'name' if scheme == 'memory' else 'bucket'}")
    prefix = _clean_prefix(prefix, url)
    normal_url = f"{scheme}://{container}/{prefix}".rstrip("/")
    if scheme == "memory":
        _refuse_options(options, url)
        with _memory_lock:
            memory = _memory_stores.setdefault(container, MemoryStore())
        return normal_url, RemoteBackend(dict.fromkeys(get_args(Purpose), memory), prefix)
    if scheme == "s3":
        _complete_s3_options(options)
    purposes: tuple[Purpose, ...] = get_args(Purpose)
    clients = {purpose: _open_client(scheme, container, options, purpose) for purpose in purposes}
    return normal_url, RemoteBackend(clients, prefix)


def _open_local(url: str, rest: str, *, is_path: bool) -> tuple[str, Backend]:
    if not is_path:
        if not rest.startswith("/"):
            raise ConfigError(f"output.url: {url!r} must have three slashes: file:///absolute/path")
        rest = urllib.parse.unquote(rest)
    root = Path(rest).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise ConfigError(f"output.url: {root} is a file; give a directory, which may be new")
    return str(root), LocalBackend(root)


def _clean_prefix(prefix: str, url: str) -> str:
    prefix = prefix.rstrip("/")
    if not prefix:
        return ""
    if any(part in ("", ".", "..") for part in prefix.split("/")):
        raise ConfigError(f"output.url: {url!r} has an empty, '.' or '..' segment")
    if "?" in prefix or "#" in prefix:
        raise ConfigError(f"output.url: {url!r} has a '?' or '#'; options belong in output.storage_options")
    return prefix + "/"


def _refuse_options(options: Mapping[str, Any], url: str) -> None:
    if options:
        raise ConfigError(f"output.storage_options: {url!r} takes none, got {', '.join(options)}")


_ENDPOINT_OPTIONS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _complete_s3_options(options: dict[str, Any]) -> None:
    """Fill in what follows from the endpoint, and refuse one on which obstore would panic."""
    given = {name.lower() for name in options} | {
        name.removeprefix("AWS_").lower() for name in os.environ if name.startswith("AWS_")
    }
    endpoint, origin = None, ""
    for name, value in options.items():
        if name.lower() in _ENDPOINT_OPTIONS:
            endpoint, origin = str(value), f"output.storage_options.{name}"
    if endpoint is None:
        for variable in _ENDPOINT_VARIABLES:
            if os.environ.get(variable):
                endpoint, origin = os.environ[variable], variable
                break
    if endpoint is not None:
        parts = urllib.parse.urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in endpoint):
            raise ConfigError(f"{origin}: {endpoint!r} is not a URL such as https://s3.example.com")
    is_plain = endpoint is not None and endpoint.startswith("http://")
    if is_plain and not given & {"allow_http", "aws_allow_http"}:
        options["allow_http"] = True
    # TLS already protects the payload; hashing it again costs more CPU than everything else in a put.
    if not is_plain and not given & {"unsigned_payload", "aws_unsigned_payload"}:
        options["unsigned_payload"] = True


def _open_client(scheme: str, container: str, options: Mapping[str, Any], purpose: Purpose) -> Client:
    """obstore's own retry stays short, so that `retry_seconds` and full jitter rule.

    Only the parts of a streaming upload cannot be retried from outside: that client tries for longer, but less than
    the five minutes after which a repeated request carries an outdated signature.
    """
    kwargs = dict(options)
    nested = kwargs.pop("client_options", {})
    if "retry_config" in kwargs:
        raise ConfigError("output.storage_options.retry_config is hsray's own; set output.retry_seconds instead")
    client_options: Any = dict(nested)
    if "timeout" not in kwargs:
        client_options.setdefault("timeout", "60s" if purpose == "small" else "600s")
    is_patient = purpose == "upload"
    retry_config: Any = {
        "max_retries": 1000 if is_patient else 2,
        "retry_timeout": timedelta(seconds=240 if is_patient else 10),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=10 if is_patient else 1),
            "base": 2,
        },
    }
    maker: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    try:
        client: Client = maker(container, client_options=client_options, retry_config=retry_config, **kwargs)
    except (BaseError, TypeError, ValueError) as err:
        raise ConfigError(f"output.storage_options for {scheme}://{container}: {first_line(err)}") from err
    return client
