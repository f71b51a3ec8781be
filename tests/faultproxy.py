"""A loopback HTTP proxy that answers, drops, delays or cuts chosen requests between an S3 client and a server.

Requests are passed on byte for byte (a signed Host header stays valid), one upstream connection per client
connection. Bodies are read by Content-Length, which is what obstore sends.
"""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Literal, Self

Action = Literal["answer", "drop_request", "drop_response", "cut_response", "hang"]


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD /path?query` matches `pattern`.

    * `answer`: reply `status` with an S3 error `code`, without asking the server.
    * `drop_request`: close the connection without asking the server.
    * `drop_response`: let the server do it, then close the connection.
    * `cut_response`: let the server do it, pass on half of the answer's body, then close the connection.
    * `hang`: no answer; `FaultProxy.release` closes the connections that hang.
    """

    pattern: str
    action: Action
    times: int
    status: int = 503
    code: str = "SlowDown"


@dataclass
class FaultProxy:
    """A running proxy. `requests` lists every `METHOD /path?query` seen, with the action taken or None."""

    port: int
    requests: list[tuple[str, Action | None]] = field(default_factory=list)
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _released: threading.Event = field(default_factory=threading.Event)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def inject(
        self, pattern: str, action: Action, *, times: int = 1, status: int = 503, code: str = "SlowDown"
    ) -> Self:
        with self._lock:
            self._faults.append(Fault(pattern, action, times, status, code))
        return self

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()
            self.requests.clear()

    def release(self) -> None:
        """Close every connection that hangs, and let no other hang."""
        self._released.set()

    def count(self, pattern: str) -> int:
        """How many requests matching `pattern` have been seen."""
        with self._lock:
            return sum(1 for line, _ in self.requests if re.search(pattern, line))

    def _take(self, line: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.action == "hang" and self._released.is_set():
                    continue
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    self.requests.append((line, fault.action))
                    return fault
            self.requests.append((line, None))
            return None

    def _serve(self, client: socket.socket, upstream_port: int) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", upstream_port)) as upstream:
            from_client, from_server = client.makefile("rb"), upstream.makefile("rb")
            while head := _read_head(from_client):
                line = b" ".join(head.split(b"\r\n", 1)[0].split(b" ")[:2]).decode()
                body = from_client.read(_content_length(head))
                fault = self._take(line)
                action = fault.action if fault else None
                if fault is not None and action == "answer":
                    client.sendall(_error_answer(fault, line))
                    continue
                if action == "drop_request":
                    return
                if action == "hang":
                    self._released.wait()
                    return
                upstream.sendall(head + body)
                answer = _read_head(from_server)
                length = 0 if line.startswith("HEAD ") else _content_length(answer)
                content = from_server.read(length)
                if action == "drop_response":
                    return
                if action == "cut_response":
                    client.sendall(answer + content[: length // 2])
                    return
                client.sendall(answer + content)


@contextlib.contextmanager
def run_fault_proxy(upstream_port: int) -> Iterator[FaultProxy]:
    """A proxy on a free loopback port in front of 127.0.0.1:`upstream_port`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = FaultProxy(listener.getsockname()[1])

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=proxy._serve, args=(client, upstream_port), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.release()
            # close() alone does not wake a thread that is in accept().
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def _read_head(stream: BinaryIO) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline()
        if not line:
            return b""
        head += line
    return head


def _content_length(head: bytes) -> int:
    if re.search(rb"(?i)\r\ntransfer-encoding:", head):
        raise ValueError("chunked bodies are not supported by this proxy")
    match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(match[1]) if match else 0


def _error_answer(fault: Fault, line: str) -> bytes:
    body = b"" if line.startswith("HEAD ") else f"<Error><Code>{fault.code}</Code></Error>".encode()
    return (
        f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: application/xml\r\n"
        f'ETag: "injected"\r\nContent-Length: {len(body)}\r\n\r\n'
    ).encode() + body
