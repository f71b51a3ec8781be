import queue
import socket
import uuid

import pytest

from hsray.channel import (
    Captured,
    CaptureFailed,
    ChannelClient,
    ChannelServer,
    Hello,
    Message,
    RequestId,
    decode,
    encode,
)

MESSAGES: list[Message] = [
    Hello(
        1, 0, 0, "0.5.21", "M", ("resid_pre_2",), ("resid_pre_2", "final_prenorm"), 64, "float32", "bfloat16", 8, True
    ),
    Captured("hsray-x-1-0-5.", 5, 123, 0, (1.5, 2.5), None),
    Captured("hsray-x-1-0-5.", 5, 123, 2, (1.5,), ("resid_pre_2", 3)),
    CaptureFailed("no"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_an_unknown_message_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown message"):
        decode(b'{"kind": "gossip"}')


def test_request_ids_carry_their_slot() -> None:
    request = RequestId(serial=300, offset=1 << 40, num_tokens=131072, layout="t")

    assert RequestId.parse(str(request)) == request


@pytest.mark.parametrize("rid", ["HEALTH_CHECK_1", "hsray-x-1-2", "hsray-1.", "", "abc-x-1-2-3."])
def test_other_peoples_requests_are_not_ours(rid: str) -> None:
    assert RequestId.parse(rid) is None


def test_no_request_id_is_a_prefix_of_another() -> None:
    # SGLang aborts by prefix: aborting request 1 must not abort request 16.
    ids = [str(RequestId(serial, 0, 1)) for serial in range(300)]

    assert not any(a != b and b.startswith(a) for a in ids for b in ids)


def test_a_server_hears_every_client_and_notices_their_end() -> None:
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = f"hsray-test-{uuid.uuid4().hex}"
    server = ChannelServer(address, heard.put, lambda: heard.put("closed"))
    clients = [ChannelClient(address) for _ in range(3)]

    for client in clients:
        client.send(MESSAGES[1])
    for client in clients:
        client.close()

    got = [heard.get(timeout=10) for _ in range(6)]
    assert got.count(MESSAGES[1]) == 3
    assert got.count("closed") == 3
    server.close()


def test_garbage_on_the_channel_is_reported_not_ignored() -> None:
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = f"hsray-test-{uuid.uuid4().hex}"
    server = ChannelServer(address, heard.put, lambda: None)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect("\0" + address)

    raw.sendall(b"not json\n")

    message = heard.get(timeout=10)
    assert isinstance(message, CaptureFailed)
    raw.close()
    server.close()


def test_a_closing_server_reports_nothing() -> None:
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = f"hsray-test-{uuid.uuid4().hex}"
    server = ChannelServer(address, heard.put, lambda: heard.put("closed"))
    client = ChannelClient(address)
    client.send(MESSAGES[3])
    assert heard.get(timeout=10) == MESSAGES[3]

    server.close()
    client.close()

    with pytest.raises(queue.Empty):
        heard.get(timeout=0.3)
