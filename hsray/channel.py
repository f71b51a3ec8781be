"""What the capture side says to its replica: one line of JSON per message over an abstract unix socket.

Each leader rank connects once, says `Hello` (the handshake no replica works without), then one `Captured`
per prompt whose every position has been written to the arena. Abstract sockets leave no file behind and
have no path limit; the peer must be the same user. Only the standard library.
"""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

PROTOCOL = 1

# What a request is captured for, and with that which sites lie in its slot.
RUN_LAYOUT = "x"  # a prompt of the run: the run's sites
TEST_LAYOUT = "t"  # the self-test: those and both final sites
LAYER_LAYOUT = "l"  # the self-test of single layers: their inputs and outputs


@dataclass(frozen=True, slots=True)
class RequestId:
    """A request id that carries everything the capture side must know about a prompt's slot.

    SGLang aborts by prefix (`rid.startswith`), so ids are closed by a terminator and none is a prefix of
    another. `num_tokens` is the number of positions to be captured.
    """

    serial: int
    offset: int
    num_tokens: int
    layout: str = RUN_LAYOUT

    def __str__(self) -> str:
        return f"hsray-{self.layout}-{self.serial:x}-{self.offset:x}-{self.num_tokens:x}."

    @classmethod
    def parse(cls, rid: str) -> "RequestId | None":
        """The id in `rid`, or None if the request is not one of ours (health checks, warm-up)."""
        if not rid.startswith("hsray-") or not rid.endswith("."):
            return None
        parts = rid[:-1].split("-")
        if len(parts) != 5:
            return None
        return cls(int(parts[2], 16), int(parts[3], 16), int(parts[4], 16), parts[1])


@dataclass(frozen=True, slots=True)
class Hello:
    """The handshake of one leader rank: what it has hooked and what it will deliver."""

    pid: int
    rank: int
    dp_rank: int
    sglang_version: str
    model_class: str
    sites: tuple[str, ...]
    test_sites: tuple[str, ...]
    hidden_size: int
    engine_dtype: str
    stored_dtype: str
    num_layers: int
    tested: bool
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class Captured:
    """Every position of request `rid` is in the arena.

    Attributes:
        num_tokens: rows written per site.
        prompt_crc32: CRC-32 of the prompt's ids as the scheduler process holds them, little-endian int32.
        rewritten: rows written more than once (SGLang retracted the request and prefilled it again).
        mean_norm: mean L2 norm over rows, per site.
        bad: `[site name, position, what]` of the first row that cannot be a hidden state (`NaN or infinity`,
            `zeros`), or None.
    """

    rid: str
    num_tokens: int
    prompt_crc32: int
    rewritten: int
    mean_norm: tuple[float, ...]
    bad: tuple[str, int, str] | None


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """What one leader rank has done since it started; sent about once a second while it works.

    Attributes:
        steps, rows, nbytes: forward passes with our rows, those rows, and bytes of states that left the GPU.
        copy_seconds: time the copy stream took for them (0 on a CPU); bytes over it is the copy's bandwidth.
        enqueue_seconds: time the scheduler's thread spent handing over.
        waited_seconds: part of it in which the thread stood still because copies were far behind.
    """

    dp_rank: int
    steps: int
    rows: int
    nbytes: int
    copy_seconds: float
    enqueue_seconds: float
    waited_seconds: float


@dataclass(frozen=True, slots=True)
class CaptureFailed:
    """The capture side cannot go on; the replica must be replaced."""

    message: str


Message = Hello | Captured | CaptureStats | CaptureFailed
_KINDS: dict[str, type[Message]] = {
    "hello": Hello,
    "captured": Captured,
    "stats": CaptureStats,
    "failed": CaptureFailed,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    return json.dumps({"kind": _NAMES[type(message)], **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError on anything but a message of this protocol."""
    data: dict[str, Any] = json.loads(line)
    kind = _KINDS.get(data.pop("kind", ""))
    if kind is None:
        raise ValueError(f"unknown message on the capture channel: {line[:200]!r}")
    for key, value in data.items():
        if isinstance(value, list):
            data[key] = tuple(value)
    return kind(**data)


class ChannelServer:
    """The replica's end. `on_message` is called from one reader thread per leader rank."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[Message], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.address = address
        self._on_message = on_message
        self._on_closed = on_closed
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + address)
        self._socket.listen()
        threading.Thread(target=self._accept, name="hsray-channel", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            _pid, uid, _gid = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if uid != os.getuid():
                connection.close()
                continue
            threading.Thread(target=self._read, args=(connection,), name="hsray-channel-read", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                for line in lines:
                    self._on_message(decode(line))
            except (OSError, ValueError, TypeError) as err:
                if not self._closing:
                    self._on_message(CaptureFailed(f"the capture channel broke: {err}"))
        if not self._closing:
            self._on_closed()

    def close(self) -> None:
        self._closing = True
        self._socket.close()


class ChannelClient:
    """The capture side's end. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect("\0" + address)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError when the replica is gone."""
        with self._lock:
            self._socket.sendall(encode(message))

    def close(self) -> None:
        self._socket.close()
