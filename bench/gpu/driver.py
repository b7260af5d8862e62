"""The least that can stand in for a router, for machines that have not what the real one needs: it welcomes
workers, sends each prompt to the prefill worker and its handle to the decode worker, and times the tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from pagerelay.common.errors import WireError
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.messages import (
    Beat,
    DecodeJob,
    Failed,
    FirstToken,
    HandedOver,
    Heartbeat,
    Hello,
    Preempted,
    PrefillJob,
    PrefillStarted,
    SamplingParams,
    TokenDelta,
    Tokens,
    ToRouter,
    Welcome,
)
from pagerelay.common.wire.sockets import ServerSocket

_decode: Decoder[Any] = Decoder(ToRouter)


@dataclass
class Asked:
    job: dict[str, Any]
    began: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    handover_s: float | None = None
    transport: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    trouble: str = ""


class Driver:
    def __init__(self) -> None:
        self._socket = ServerSocket(None)
        self.port = self._socket.bind("127.0.0.1", 0, "the driver's port")
        self.workers: dict[str, bytes] = {}
        """Role → link."""
        self._asked: dict[str, Asked] = {}
        self._reading = asyncio.create_task(self._read())

    async def until_joined(self, *roles: str) -> None:
        while not set(roles) <= set(self.workers):
            await asyncio.sleep(0.02)

    async def ask(self, prompt: list[int], num_tokens: int) -> Asked:
        """Greedy, to exactly ``num_tokens``. RuntimeError where a worker fails it."""
        name = f"r{len(self._asked)}"
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        common = {
            "request_id": name,
            "attempt": 1,
            "age_s": 0.0,
            "token_ids": prompt,
            "sampling": sampling,
            "first_index": 0,
        }
        asked = self._asked[name] = Asked(common)
        if "prefill" in self.workers:
            await self._send("prefill", PrefillJob(**common))  # type: ignore[arg-type]
        else:
            await self._send("colocated", DecodeJob(**common, handle=None))  # type: ignore[arg-type]
        await asked.done.wait()
        if asked.trouble:
            raise RuntimeError(f"{name}: {asked.trouble}")
        return asked

    async def _send(self, role: str, message: Any) -> None:
        await self._socket.send(self.workers[role], encode(message))

    async def _read(self) -> None:
        while True:
            peer, frames = await self._socket.receive()
            try:
                message = _decode(frames[0])
            except WireError:
                continue
            match message:
                case Hello():
                    self.workers[message.role] = peer
                    welcome = Welcome(router_id="driver", heartbeat_s=0.5, dead_after_s=60.0)
                    await self._socket.send(peer, encode(welcome))
                case Heartbeat():
                    await self._socket.send(peer, encode(Beat()))
                case PrefillStarted():
                    job = self._asked[message.request_id].job
                    await self._send("decode", DecodeJob(**job, handle=message.handle))
                case FirstToken():
                    self._take(message.delta)
                case HandedOver():
                    asked = self._asked[message.request_id]
                    asked.handover_s, asked.transport = message.handover_s, message.transport
                    self._take(message.first)
                case Tokens():
                    for delta in message.deltas:
                        self._take(delta)
                case Failed() | Preempted():
                    asked = self._asked[message.request_id]
                    asked.trouble = message.message if isinstance(message, Failed) else "preempted"
                    asked.done.set()
                case _:
                    pass

    def _take(self, delta: TokenDelta) -> None:
        asked = self._asked[delta.request_id]
        if delta.index == len(asked.tokens):  # the first one comes twice
            asked.tokens.append(delta.token)
            asked.times.append(time.monotonic())
            if delta.finish_reason is not None:
                asked.done.set()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()
