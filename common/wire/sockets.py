"""The ZeroMQ sockets of the control and data links: a serving side (ROUTER) and a dialling side (DEALER).

Both are bounded: a peer that does not read fills its own queue and is then told apart by ``PeerUnreachable``,
never by silent loss. Closing never lingers longer than ``LINGER_MS``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from pagerelay.common.errors import StartupError, WireError
from pagerelay.common.wire import address
from pagerelay.common.wire.auth import CurveKeys, Gatekeeper, require_key_off_loopback
from pagerelay.common.wire.codec import MAX_CONTROL_BYTES

HIGH_WATER = 20_000
LINGER_MS = 200
MAX_BLOCK_BYTES = 1 << 30
"""Largest raw frame that a data link takes: one KV block."""

Frames = list[memoryview]


class PeerUnreachable(WireError):
    """The peer has gone, or does not read what it is sent."""


def _common(socket: Any, max_frame_bytes: int) -> None:
    socket.linger = LINGER_MS
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.maxmsgsize = max_frame_bytes
    socket.ipv6 = True
    # A connection that is half open (a host that vanished) is found and closed.
    socket.heartbeat_ivl, socket.heartbeat_timeout = 2000, 6000


async def _send(socket: Any, frames: Sequence[Any], copy: bool) -> None:
    try:
        await socket.send_multipart(frames, copy=copy, flags=zmq.DONTWAIT)
    except zmq.Again as error:
        raise PeerUnreachable("the peer does not read: its queue is full") from error
    except zmq.ZMQError as error:
        raise PeerUnreachable(f"the peer is gone ({error.strerror})") from error


class ServerSocket:
    """Binds; knows its peers by the identity frame that each chose at random when it dialled."""

    def __init__(self, keys: CurveKeys | None, max_frame_bytes: int = MAX_CONTROL_BYTES) -> None:
        """A peer that sends a larger frame loses its connection before the frame is read."""
        self._context = zmq.asyncio.Context()
        self._keys = keys
        self._max_frame_bytes = max_frame_bytes
        self._gate = Gatekeeper(self._context, keys) if keys is not None else None
        self._socket: Any = None

    def bind(self, host: str, port: int, setting: str) -> int:
        """Binds and returns the real port. Raises ConfigError (no key) or StartupError (taken), naming the
        setting."""
        require_key_off_loopback(host, self._keys, setting)
        if self._gate is not None:
            self._gate.start()
        self._socket = self._context.socket(zmq.ROUTER)
        _common(self._socket, self._max_frame_bytes)
        self._socket.router_mandatory = True
        # A peer that comes back under its identity replaces its old connection.
        self._socket.router_handover = True
        if self._keys is not None:
            self._keys.serve(self._socket)
        try:
            self._socket.bind(address.join(address.numeric(host, setting), port or "*"))
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(
                f"{setting}: cannot bind {host}:{port}: {error.strerror}; is it in use?"
            ) from error
        return int(self._socket.last_endpoint.decode().rpartition(":")[2])

    async def receive(self) -> tuple[bytes, Frames]:
        parts = await self._socket.recv_multipart(copy=False)
        return parts[0].bytes, [part.buffer for part in parts[1:]]

    async def send(self, peer: bytes, *frames: Any, copy: bool = True) -> None:
        """Raises :class:`PeerUnreachable`. With ``copy=False`` the frames' memory must outlive the
        sending."""
        await _send(self._socket, [peer, *frames], copy)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._gate is not None and self._socket is not None:
            self._gate.stop()
        self._context.destroy(linger=LINGER_MS)


class ClientSocket:
    """Dials; reconnects by itself for as long as it is open."""

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        keys: CurveKeys | None,
        setting: str,
        max_frame_bytes: int = MAX_CONTROL_BYTES,
    ) -> None:
        host, port = address.parse(endpoint, setting)
        require_key_off_loopback(host, keys, setting)
        self._context = zmq.asyncio.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        _common(self._socket, max_frame_bytes)
        self._socket.identity = identity
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = 100, 1000
        if keys is not None:
            keys.dial(self._socket)
        self._socket.connect(address.join(host, port))

    async def receive(self) -> Frames:
        return [part.buffer for part in await self._socket.recv_multipart(copy=False)]

    async def send(self, *frames: Any) -> None:
        await _send(self._socket, frames, copy=True)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._socket.close(linger=linger_ms)
        self._context.destroy(linger=linger_ms)


def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
