"""Frames that no honest peer sends: random, damaged, and well formed with odd values."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from pagerelay.common.errors import WireError
from pagerelay.common.wire import messages as m
from pagerelay.common.wire.account import Counters, Load
from pagerelay.common.wire.codec import CRC_BYTES, Decoder, encode, sealed

PROMPT = [11] * 40
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, float("nan"), float("inf"), "", "x" * 5000,
    b"\xff", [], {}, [[]], {"type": "Abort"}, [2**40] * 3, [-1], ["a"], "r", 1,
]  # fmt: skip


def samples(hello: m.Hello, handle: m.KvHandle) -> dict[str, list[m.Message]]:
    """Valid messages of every type, by the union they belong to; the raw material."""
    delta = m.TokenDelta(request_id="r", attempt=1, index=0, token=5)
    sampling = m.SamplingParams(max_tokens=3, temperature=0.0)
    job: dict[str, Any] = {
        "request_id": "r", "attempt": 1, "age_s": 0.0, "token_ids": PROMPT, "sampling": sampling,
        "first_index": 0,
    }  # fmt: skip
    return {
        "ToRouter": [
            hello,
            m.Heartbeat(load=Load(), counters=Counters(dropped={"Fetch/late": 1}, fetched_bytes={"shm": 8})),
            m.PrefillStarted(request_id="r", attempt=1, handle=handle, queued_s=0.0, num_cached_tokens=0),
            m.FirstToken(delta=delta, prefill_s=0.0, num_computed_tokens=1),
            m.Tokens(deltas=[delta, delta]),
            m.HandedOver(
                request_id="r", attempt=1, first=delta, transport="shm", handover_s=0.1, num_bytes=1
            ),
            m.Preempted(request_id="r", attempt=1),
            m.Beams(request_id="r", attempt=1, num_tokens=3),
            m.Suspended(request_id="r", attempt=1, handle=handle),
            m.Failed(request_id="r", attempt=1, code="c", message="m", retryable=True),
            m.Goodbye(),
        ],
        "ToWorker": [
            m.Welcome(router_id="fuzz", heartbeat_s=0.5, dead_after_s=3.0),
            m.Refused(reason="no", fatal=False),
            m.Beat(),
            m.PrefillJob(**job),
            m.DecodeJob(**job, handle=handle),
            m.DecodeJob(**job, handle=None),
            m.Suspend(request_id="r", attempt=1),
            m.Probe(request_id="r", attempt=1, next_index=0),
            m.Abort(request_id="r", attempt=1),
        ],
        "ToPrefill": [
            m.Fetch(
                lease=handle.lease,
                incarnation=handle.incarnation,
                from_block=0,
                layout=hello.layout,
                ticket=handle.ticket,
            ),
            m.Read(lease=handle.lease, block_ids=[0, 1]),
            m.Renew(tickets={handle.lease: handle.ticket}),
            m.Release(lease=handle.lease, received=True, corrupt=[1]),
            m.Attach(),
            m.Detached(),
        ],
        "ToDecode": [
            m.Ready(lease=handle.lease, first=0, block_ids=[0, 1, 2], sums=[1, 2, 3]),
            m.Blocks(lease=handle.lease, block_ids=[0]),
            m.Commit(lease=handle.lease, num_tokens=len(PROMPT), first_token=5),
            m.Released(lease=handle.lease, ok=True),
            m.LeaseLost(lease=handle.lease, reason="gone"),
            m.Detach(),
        ],
    }


class Fuzz:
    """Frames of one union: random, damaged, and well formed with odd values."""

    def __init__(self, rng: random.Random, union: Any, valid: list[m.Message]) -> None:
        self.rng, self.valid = rng, valid
        self._decode: Decoder[Any] = Decoder(union)

    def frames(self) -> tuple[list[bytes], bool]:
        """One message, and whether it is one that must be refused and counted."""
        while True:
            frames = self._frames()
            try:
                message = self._decode(frames[0])
            except WireError:
                return frames, True
            # These two end a worker by design, whoever may send them has the cluster's key.
            if isinstance(message, m.Drain) or (isinstance(message, m.Refused) and message.fatal):
                continue
            return frames, False

    def _frames(self) -> list[bytes]:
        rng = self.rng
        body = encode(rng.choice(self.valid))[:-CRC_BYTES]
        kind = rng.randrange(5)
        if kind == 0:
            return [rng.randbytes(rng.randrange(300)), *(rng.randbytes(20) for _ in range(rng.randrange(3)))]
        if kind == 1:
            return [self._damaged(sealed(body))]
        if kind == 2:
            return [sealed(self._damaged(body))]
        fields = self._odd(msgspec.msgpack.decode(body))
        frame = sealed(msgspec.msgpack.encode(fields))
        return [frame] if kind == 3 else [frame, rng.randbytes(rng.randrange(5000))]

    def _damaged(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        for _ in range(self.rng.randint(1, 4)):
            at = self.rng.randrange(len(data) + 1)
            match self.rng.randrange(4):
                case 0 if at < len(data):
                    data[at] ^= 1 << self.rng.randrange(8)
                case 1:
                    data[at:at] = self.rng.randbytes(self.rng.randint(1, 4))
                case 2:
                    del data[at : at + self.rng.randint(1, 4)]
                case _:
                    del data[at:]
            if not data:
                break
        return bytes(data)

    def _odd(self, fields: Any) -> Any:
        """One value somewhere inside is replaced."""
        if isinstance(fields, dict) and fields and self.rng.random() < 0.9:
            name = self.rng.choice([key for key in fields if key != "type"] or list(fields))
            return fields | {name: self._odd(fields[name])}
        if isinstance(fields, list) and fields and self.rng.random() < 0.5:
            at = self.rng.randrange(len(fields))
            return [*fields[:at], self._odd(fields[at]), *fields[at + 1 :]]
        if isinstance(fields, int) and self.rng.random() < 0.3:
            return fields + self.rng.randint(-3, 3)
        return self.rng.choice(ODD)
