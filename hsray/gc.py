"""Remove what interrupted attempts left behind: `python -m hsray.gc URL [--delete]`.

Shards that no resolution names, or of which every row was stored anew by `repair`; plans and rejects that lost the
race to be the run's, probes, and uploads that were begun and neither completed nor aborted; all of them only when
they are older than a day. Without `--delete` it says what it would remove. Never needed for correctness: no reader
sees any of it.
"""

import argparse
import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from hsray.errors import ConfigError, HsrayError, StoreUnusable
from hsray.ledger import Ledger
from hsray.log import configure_logging
from hsray.plan import load_plan
from hsray.records import JsonDict
from hsray.schema import DATA_PREFIX, KEYS, PLAN_PREFIX, PREFIXES, REJECTS_PREFIX, RUN_KEY
from hsray.store import ObjectInfo, Store, open_store
from hsray.store_clients import LocalBackend
from hsray.verify.__main__ import parse_options

log = logging.getLogger(__name__)

DEFAULT_HOURS = 24.0
"""A driver may commit a shard long after it was uploaded, while its store is away; this is far beyond its patience."""
RETRY_SECONDS = 300.0
_PROBE = re.compile(r"\.hsray-probe-[0-9a-f]+")
# obstore and `upload` write local files under the key's name and this; listings leave them out.
_UNFINISHED_FILES = "*#[0-9]*"
# What hsray itself writes: somebody's own `notes#1` in the folder is none of our business.
_OUR_FILE = re.compile(
    rf"(?:{'|'.join(map(re.escape, PREFIXES))})|(?:{'|'.join(map(re.escape, KEYS))}|{_PROBE.pattern})#"
)
_DELETE_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was begun, by the store's id, or a local file that was never renamed."""

    key: str
    upload_id: str
    begun: datetime


@dataclass(slots=True)
class Garbage:
    """What may go. `young` counts what looks the same but is too new to tell."""

    objects: list[ObjectInfo] = field(default_factory=list)
    uploads: list[UnfinishedUpload] = field(default_factory=list)
    young: int = 0

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.objects)

    def to_json(self) -> JsonDict:
        return {
            "objects": len(self.objects),
            "bytes": self.nbytes,
            "uploads": len(self.uploads),
            "young": self.young,
        }


def find_garbage(
    store: Store, storage_options: Mapping[str, Any] | None = None, *, hours: float = DEFAULT_HOURS
) -> Garbage:
    """What may be removed from a run, without removing it.

    Raises:
        HsrayError: there is no run, or a resolution cannot be read: then nothing is known to be garbage.
        StoreError: the store refuses or does not answer.
    """
    run = Ledger(store).read_run()
    if run is None:
        raise HsrayError(f"there is no run at {store.url}: it has no {RUN_KEY}. Give the output.url of an extraction")
    # Listed before the records are read: what is committed meanwhile is then seen as named.
    ours = (DATA_PREFIX, PLAN_PREFIX, REJECTS_PREFIX)
    candidates = [info for info in store.list() if info.key.startswith(ours) or _PROBE.fullmatch(info.key)]
    found, accounting = Ledger(store, run["run_id"]).account(load_plan(store, run["plan"]).leases)
    named = {key for summary in found.values() for key in summary.shards if key not in accounting.emptied}
    named.update(run["plan"]["rejects"])
    own_plan = f"{PLAN_PREFIX}{run['plan']['plan_id']}/"
    before = datetime.now(UTC) - timedelta(hours=hours)
    garbage = Garbage()
    for info in candidates:
        if info.key in named or info.key.startswith(own_plan):
            continue
        if info.modified < before:
            garbage.objects.append(info)
        else:
            garbage.young += 1
    for upload in unfinished_uploads(store, storage_options or {}):
        if upload.begun < before:
            garbage.uploads.append(upload)
        else:
            garbage.young += 1
    return garbage


def remove(store: Store, garbage: Garbage, storage_options: Mapping[str, Any] | None = None) -> None:
    """Delete the objects and abort the uploads."""
    keys = [info.key for info in garbage.objects]
    for start in range(0, len(keys), _DELETE_AT_ONCE):
        store.delete(keys[start : start + _DELETE_AT_ONCE])
    abort_uploads(store, garbage.uploads, storage_options or {})


def unfinished_uploads(store: Store, storage_options: Mapping[str, Any]) -> list[UnfinishedUpload]:
    """Uploads below the run that nobody completed. GCS and Azure forget theirs after a week by themselves."""
    if isinstance(store.backend, LocalBackend):
        root = store.backend.root
        return [
            UnfinishedUpload(str(path.relative_to(root)), "", datetime.fromtimestamp(path.stat().st_mtime, UTC))
            for path in root.rglob(_UNFINISHED_FILES)
            if path.is_file() and _OUR_FILE.match(path.relative_to(root).as_posix())
        ]
    if not store.url.startswith("s3://"):
        return []
    bucket = urlsplit(store.url).netloc
    with _s3_api(store, storage_options) as api:
        pages = api.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=store.backend.prefix)
        return [
            UnfinishedUpload(found["Key"], found["UploadId"], found["Initiated"])
            for page in pages
            for found in page.get("Uploads", [])
        ]


def abort_uploads(store: Store, uploads: Sequence[UnfinishedUpload], storage_options: Mapping[str, Any]) -> None:
    """Give back what unfinished uploads hold."""
    if isinstance(store.backend, LocalBackend):
        for upload in uploads:
            (store.backend.root / upload.key).unlink(missing_ok=True)
    elif uploads:
        bucket = urlsplit(store.url).netloc
        with _s3_api(store, storage_options) as api:
            for upload in uploads:
                with contextlib.suppress(api.exceptions.NoSuchUpload):  # somebody was faster
                    api.abort_multipart_upload(Bucket=bucket, Key=upload.key, UploadId=upload.upload_id)


@contextlib.contextmanager
def _s3_api(store: Store, storage_options: Mapping[str, Any]) -> Iterator[Any]:
    """obstore has no call for unfinished uploads; botocore comes with s3fs and reads the same environment."""
    import botocore.session
    from botocore.exceptions import BotoCoreError, ClientError

    given = {name.lower().removeprefix("aws_"): value for name, value in storage_options.items()}
    named = {
        "endpoint_url": given.get("endpoint") or given.get("endpoint_url"),
        "region_name": given.get("region"),
        "aws_access_key_id": given.get("access_key_id"),
        "aws_secret_access_key": given.get("secret_access_key"),
        "aws_session_token": given.get("session_token") or given.get("token"),
    }
    try:
        yield botocore.session.get_session().create_client("s3", **{k: v for k, v in named.items() if v is not None})
    except (BotoCoreError, ClientError) as err:
        raise StoreUnusable(f"cannot look for unfinished uploads at {store.url}: {err}") from err


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hsray.gc", description=__doc__)
    parser.add_argument("url", help="the output.url of the run")
    parser.add_argument("--delete", action="store_true", help="remove it; without this, only say what would go")
    parser.add_argument("--hours", type=float, default=DEFAULT_HOURS, help="how old it must be (default: 24)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--storage-option", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    configure_logging("info")
    try:
        if args.hours < 1:
            raise ConfigError("--hours: under an hour, a shard may belong to a lease that is being committed")
        options = parse_options(args.storage_option)
        store = open_store(args.url, options, retry_seconds=RETRY_SECONDS)
        garbage = find_garbage(store, options, hours=args.hours)
        if args.delete:
            remove(store, garbage, options)
    except HsrayError as err:
        log.error("%s", err)
        return int(err.exit_code)
    if args.json:
        print(json.dumps({**garbage.to_json(), "deleted": args.delete}))  # noqa: T201
        return 0
    for info in garbage.objects[:20]:
        print(f"  {info.modified:%Y-%m-%d %H:%M}  {info.nbytes:>14,}  {info.key}")  # noqa: T201
    what = f"{len(garbage.objects):,} objects ({garbage.nbytes:,} bytes), {len(garbage.uploads):,} unfinished uploads"
    hint = "removed" if args.delete else "would be removed; --delete does it"
    print(f"{what} {hint}; {garbage.young:,} are younger than {args.hours:g} h")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
