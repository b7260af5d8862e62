"""The two ZeroMQ sockets: who gets in, what is told apart, and what the operator hears."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from pagerelay.common.errors import ConfigError, StartupError
from pagerelay.common.wire import address, sockets
from pagerelay.common.wire.auth import CurveKeys, new_cluster_key
from pagerelay.common.wire.sockets import ClientSocket, PeerUnreachable, ServerSocket

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what must not be bound without a key
KEYS = CurveKeys("a cluster key of at least 32 characters")
OTHER = CurveKeys("another cluster key of 32 characters or so")

Serve = Callable[[CurveKeys | None], tuple[ServerSocket, int]]
Dial = Callable[..., ClientSocket]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    opened: list[ServerSocket] = []

    def make(keys: CurveKeys | None) -> tuple[ServerSocket, int]:
        server = ServerSocket(keys)
        opened.append(server)
        return server, server.bind("127.0.0.1", 0, "router.workers_endpoint")

    yield make
    for server in opened:
        server.close()


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    opened: list[ClientSocket] = []

    def make(port: int, keys: CurveKeys | None, identity: bytes = b"client-1") -> ClientSocket:
        client = ClientSocket(f"tcp://127.0.0.1:{port}", identity, keys, "worker.routers")
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()


async def receive(server: ServerSocket, seconds: float = 5.0) -> tuple[bytes, list[bytes]]:
    async with asyncio.timeout(seconds):
        peer, frames = await server.receive()
    return peer, [bytes(frame) for frame in frames]


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "curve"])
async def test_frames_go_both_ways(serve: Serve, dial: Dial, keys: CurveKeys | None) -> None:
    server, port = serve(keys)
    one, two = dial(port, keys, b"one"), dial(port, keys, b"two")
    await one.send(b"hello", b"", b"x" * 100_000)
    assert await receive(server) == (b"one", [b"hello", b"", b"x" * 100_000])
    await two.send(b"hi")
    assert await receive(server) == (b"two", [b"hi"])
    await server.send(b"two", b"for two", bytes(70_000), copy=False)
    await server.send(b"one", b"for one")
    assert [bytes(frame) for frame in await one.receive()] == [b"for one"]
    assert [bytes(frame) for frame in await two.receive()] == [b"for two", bytes(70_000)]


async def test_who_lacks_the_key_gets_nothing_through(serve: Serve, dial: Dial) -> None:
    server, port = serve(KEYS)
    for number, keys in enumerate((None, OTHER)):
        await dial(port, keys, b"stranger%d" % number).send(b"let me in")
    # The right server key, but a client's key pair of its own.
    half = CurveKeys("a third cluster key, of a curious neighbour")
    half.server = KEYS.server
    await dial(port, half, b"neighbour").send(b"let me in")
    with pytest.raises(TimeoutError):
        await receive(server, 0.3)
    await dial(port, KEYS, b"friend").send(b"it is me")
    assert await receive(server) == (b"friend", [b"it is me"])
    for stranger in (b"stranger0", b"stranger1", b"neighbour"):
        with pytest.raises(PeerUnreachable):
            await server.send(stranger, b"secret")


async def test_a_client_does_not_talk_to_a_server_without_the_key(serve: Serve, dial: Dial) -> None:
    open_server, open_port = serve(None)
    other_server, other_port = serve(OTHER)
    await dial(open_port, KEYS).send(b"secret")
    await dial(other_port, KEYS).send(b"secret")
    for server in (open_server, other_server):
        with pytest.raises(TimeoutError):
            await receive(server, 0.15)


async def test_sending_to_nobody_is_told(serve: Serve) -> None:
    server, _ = serve(None)
    with pytest.raises(PeerUnreachable, match="gone"):
        await server.send(b"nobody", b"x")


async def test_a_peer_that_does_not_read_is_told_apart(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HIGH_WATER", 4)
    server, port = serve(None)
    client = dial(port, None)
    await client.send(b"hello")
    peer, _ = await receive(server)
    big = bytes(4 << 20)

    async def send_on() -> None:
        for _ in range(50):
            await server.send(peer, big)

    with pytest.raises(PeerUnreachable, match="does not read"):
        await send_on()


async def test_a_client_whose_server_is_not_there_runs_full(
    dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HIGH_WATER", 4)
    client = dial(free_port(), None)

    async def send_on() -> None:
        for _ in range(10):
            await client.send(b"x")

    with pytest.raises(PeerUnreachable):
        await send_on()
    client.close(0)


async def test_who_comes_back_under_its_identity_replaces_its_old_connection(
    serve: Serve, dial: Dial
) -> None:
    server, port = serve(None)
    await dial(port, None, b"same").send(b"first")
    await receive(server)
    second = dial(port, None, b"same")
    await second.send(b"second")
    assert await receive(server) == (b"same", [b"second"])
    await server.send(b"same", b"answer")
    async with asyncio.timeout(5):
        assert [bytes(frame) for frame in await second.receive()] == [b"answer"]


# ------------------------------------------------------------------ what the operator hears


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_port_in_use_names_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=rf"worker\.data_host: cannot bind 127\.0\.0\.1:{port}.*in use"
        ):
            ServerSocket(None).bind("127.0.0.1", port, "worker.data_host")


async def test_a_given_port_is_taken() -> None:
    port = free_port()
    server = ServerSocket(None)
    assert server.bind("127.0.0.1", port, "worker.data_host") == port
    server.close()


@pytest.mark.parametrize("host", [EVERYWHERE, "::", "[::]", "10.1.2.3", "example.invalid"])
async def test_off_loopback_a_key_is_needed(host: str) -> None:
    server = ServerSocket(None)
    with pytest.raises(ConfigError, match=r"worker\.data_host: .* cluster key is needed: `pagerelay keygen"):
        server.bind(host, 0, "worker.data_host")
    server.close()
    with pytest.raises(ConfigError, match=r"worker\.routers: .* cluster key is needed"):
        ClientSocket(address.join(host, 5555), b"me", None, "worker.routers")


async def test_with_a_key_every_address_may_be_bound() -> None:
    server = ServerSocket(KEYS)
    assert server.bind(EVERYWHERE, 0, "worker.data_host") > 0
    server.close()


async def test_a_host_that_does_not_exist_is_said() -> None:
    server = ServerSocket(KEYS)
    with pytest.raises(
        ConfigError, match=r"worker\.data_host: the host 'nowhere\.invalid' cannot be resolved"
    ):
        server.bind("nowhere.invalid", 0, "worker.data_host")
    server.close()


def test_closing_what_was_never_bound() -> None:
    ServerSocket(KEYS).close()


# ------------------------------------------------------------------ keys and addresses


def test_whoever_has_the_key_has_both_pairs() -> None:
    again = CurveKeys("a cluster key of at least 32 characters")
    assert (again.server, again.client) == (KEYS.server, KEYS.client)
    assert len({*KEYS.server, *KEYS.client, *OTHER.server, *OTHER.client}) == 8
    assert KEYS.callback("*", KEYS.client[0])
    assert not KEYS.callback("*", KEYS.server[0])
    assert not KEYS.callback("*", OTHER.client[0])


def test_new_keys_are_long_and_never_the_same() -> None:
    made = {new_cluster_key() for _ in range(20)}
    assert len(made) == 20
    assert min(len(key) for key in made) >= 32


@pytest.mark.parametrize(
    ("endpoint", "parsed"),
    [
        ("tcp://127.0.0.1:5555", ("127.0.0.1", 5555)),
        ("tcp://router:1", ("router", 1)),
        ("tcp://[::1]:65535", ("::1", 65535)),
        ("tcp://0.0.0.0:0", (EVERYWHERE, 0)),
    ],
)
def test_endpoints(endpoint: str, parsed: tuple[str, int]) -> None:
    assert address.parse(endpoint, "s") == parsed
    assert address.join(*parsed) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:5555",
        "tcp://",
        "tcp://host",
        "tcp://:5",
        "tcp://h:65536",
        "tcp://h:-1",
        "tcp://h:x",
        "ipc://h:1",
    ],
)
def test_what_is_no_endpoint_names_its_setting(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"worker\.routers: .* is not of the form tcp://HOST:PORT"):
        address.parse(endpoint, "worker.routers")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        (EVERYWHERE, False),
        ("::", False),
        ("192.168.0.1", False),
        ("router", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_what_no_other_machine_can_reach(host: str, loopback: bool) -> None:
    assert address.is_loopback(host) is loopback


def test_our_own_address_towards_somebody() -> None:
    assert address.address_towards("tcp://127.0.0.1:5555") == "127.0.0.1"
    assert address.address_towards("tcp://nowhere.invalid:1") is None


async def test_a_frame_over_the_limit_costs_its_sender_the_connection(dial: Dial) -> None:
    """And nobody else anything: it is not even read."""
    server = ServerSocket(None, max_frame_bytes=1000)
    try:
        port = server.bind("127.0.0.1", 0, "worker.data_host")
        greedy, modest = dial(port, None, b"greedy"), dial(port, None, b"modest")
        await greedy.send(bytes(100_000))
        await modest.send(bytes(1000))
        assert await receive(server) == (b"modest", [bytes(1000)])
        with pytest.raises(TimeoutError):
            await receive(server, 0.1)
    finally:
        server.close()
