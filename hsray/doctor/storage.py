"""Try the store as a run would: put if absent, read back, delete; and see what time it is there."""

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from hsray.config import Config
from hsray.doctor.facts import Disk, StoredRun, StoreFacts
from hsray.doctor.machine import disk
from hsray.errors import ConfigError, HsrayError
from hsray.ledger import Ledger
from hsray.store import Store, open_store

log = logging.getLogger(__name__)

# A run waits half an hour for a store; who asks a doctor does not.
_SECONDS = 30.0
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
)


def examine_store(config: Config) -> StoreFacts:
    """Write and delete two scratch objects under `output.url`. A local folder that was not there is not there after."""
    url = config.output.url
    credentials = tuple(name for name in _CREDENTIALS if os.environ.get(name))
    try:
        store = open_store(
            url,
            config.output.storage_options,
            commit=config.output.commit,
            retry_seconds=min(_SECONDS, config.output.retry_seconds),
        )
        if store.url.startswith("memory:"):
            raise ConfigError("output.url: memory:// lives in one process; replicas are others. Use a path or a bucket")
        local = None if not store.backend.is_local else disk(store.url)
        return _try(store, local, credentials)
    except HsrayError as err:
        return StoreFacts(url, error=str(err), is_config_error=isinstance(err, ConfigError), credentials=credentials)


def _try(store: Store, local: Disk | None, credentials: tuple[str, ...]) -> StoreFacts:
    with no_new_folders(store):
        started = time.monotonic()
        store.probe()
        seconds = time.monotonic() - started
        return StoreFacts(
            store.url,
            seconds=seconds,
            skew=None if local is not None else _skew(store),
            run=read_run(store),
            disk=local,
            credentials=credentials,
        )


@contextlib.contextmanager
def no_new_folders(store: Store, inside: str = "") -> Iterator[None]:
    """Writing to a local store makes folders, down to `inside`; afterwards remove those that are empty."""
    if not store.backend.is_local:
        yield
        return
    path = Path(store.url, inside)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in made:
            try:
                folder.rmdir()
            except OSError:  # a run began there meanwhile, or it could not be made
                break


def _skew(store: Store) -> float:
    """The store's clock minus ours, from the time it gives a new object; it may round that down to a second."""
    key = f".hsray-probe-{uuid.uuid4().hex}"
    before = time.time()
    store.put(key, b"time")
    after = time.time()
    try:
        there = store.head(key).modified.timestamp()
    finally:
        try:
            store.delete([key])
        except HsrayError as err:
            log.warning("scratch object not deleted key=%s: %s", key, err)
    if before - 1 <= there <= after:
        return 0.0
    return there - (after if there > after else before)


def read_run(store: Store) -> StoredRun | None:
    """What `hsray.json` says, if a run is there."""
    record = Ledger(store).read_run()
    if record is None:
        return None
    plan = record.get("plan", {})
    return StoredRun(
        run_id=str(record.get("run_id", "")),
        created=str(record.get("created", "")),
        format_version=str(record.get("format_version", "")),
        num_tokens=int(plan.get("num_tokens", 0)),
        largest_prompt_tokens=int(plan.get("largest_prompt_tokens", 0)),
        parts=dict(record.get("fingerprint", {}).get("parts", {})),
    )
