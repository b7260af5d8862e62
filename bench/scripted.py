"""Scripted workers: a prefill and a decode worker that compute nothing, so that only the router is measured.

They speak the wire of real workers. A prefill job is answered at once, and each step of the decode worker
gives one token to every running request. The model's own vocabulary supplies the tokens: whole words with a
space in front, so a reader can count tokens in text. When each token left is noted in a table of monotonic
clock readings that the reading process maps too: ``table[sampling.seed, index]``, in ns.

Run by :mod:`pagerelay.bench.router` as a process of its own; lines on stdin set the step in ms, its end ends
it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zmq
from numpy.typing import NDArray

from pagerelay.common.hashing import model_digest
from pagerelay.common.wire import messages as wire
from pagerelay.common.wire.account import BlockCounts, Counters, Load
from pagerelay.common.wire.codec import Decoder, encode
from pagerelay.common.wire.pools import PoolAddress

BLOCK_SIZE = 16
NUM_BLOCKS = 1_000_000
HELLO_EVERY_S = 0.3


@dataclass(frozen=True, slots=True)
class Model:
    """What a router may ask of a model: its identity, its vocabulary size, its longest sequence, its end
    tokens, some words.
    """

    digest: str
    vocab_size: int
    max_model_len: int
    words: tuple[int, ...]


def read_model(folder: Path) -> Model:
    """Reads config.json and tokenizer.json. Raises ``ValueError`` where they hold no words that start with a
    space.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary: Any = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    if isinstance(vocabulary, list):  # unigram models list (piece, score)
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    words = [
        number
        for piece, number in vocabulary.items()
        if piece[:1] in "Ġ▁" and len(piece) > 3 and piece[1:].isascii() and piece[1:].isalpha()
    ]
    if not words:
        raise ValueError(f"{folder}: the tokenizer has no words that start with a space")
    return Model(
        digest=model_digest(folder),
        vocab_size=int(config["vocab_size"]),
        max_model_len=int(config.get("max_position_embeddings", 4096)),
        words=tuple(sorted(words)[:1024]),
    )


@dataclass(slots=True)
class Running:
    attempt: int
    index: int
    last: int
    marker: int


class Worker:
    """One role's end of the wire."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        role: Literal["prefill", "decode"],
        model: Model,
        times: NDArray[np.int64],
    ) -> None:
        self.role = role
        self.welcomed = False
        self.running: dict[str, Running] = {}
        self._model = model
        self._times = times
        self._heartbeat_s = HELLO_EVERY_S
        self._next_beat = 0.0
        self._decode: Decoder[Any] = Decoder(wire.ToWorker)
        self._leases = 0
        self._id = f"scripted-{role}"
        self._incarnation = f"{os.getpid()}-{time.time_ns()}"
        self._layout = wire.Layout(
            protocol=wire.PROTOCOL, model_digest=model.digest, dtype="float32", block_size=BLOCK_SIZE,
            num_layers=1, num_kv_heads=1, head_dim=1, vocab_size=model.vocab_size,
        )  # fmt: skip
        self._pool = PoolAddress(kind="tcp", num_blocks=NUM_BLOCKS, block_bytes=self._layout.block_bytes)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.connect(endpoint)

    def _send(self, message: wire.Message) -> None:
        self.socket.send(encode(message))

    def beat(self, now: float) -> None:
        """Hello until welcomed, a heartbeat from then on."""
        if now < self._next_beat:
            return
        self._next_beat = now + self._heartbeat_s
        if self.welcomed:
            blocks = BlockCounts(total=NUM_BLOCKS, free=NUM_BLOCKS)
            load = Load(blocks=blocks, running=len(self.running))
            self._send(wire.Heartbeat(load=load, counters=Counters()))
            return
        hello = wire.Hello(
            worker_id=self._id, incarnation=self._incarnation, role=self.role, layout=self._layout,
            num_blocks=NUM_BLOCKS, max_model_len=self._model.max_model_len, transport="tcp", ops="scripted",
            pid=os.getpid(), host="127.0.0.1",
        )  # fmt: skip
        self._send(hello)

    def receive(self) -> None:
        """All that has come. Raises ``ValueError`` if the router refuses this worker for good."""
        while self.socket.poll(0):
            message = self._decode(self.socket.recv())
            match message:
                case wire.PrefillJob():
                    self._prefill(message)
                case wire.DecodeJob():
                    self._start(message)
                case wire.Abort():
                    self.running.pop(message.request_id, None)
                case wire.Welcome():
                    self.welcomed, self._heartbeat_s = True, message.heartbeat_s
                case wire.Refused():
                    if message.fatal:
                        raise ValueError(f"the router refuses the scripted workers: {message.reason}")
                    self.welcomed, self._next_beat = False, 0.0
                case _:  # Beat, Drain: nothing to do
                    pass

    def _delta(self, request_id: str, attempt: int, index: int, last: int, marker: int) -> wire.TokenDelta:
        return wire.TokenDelta(
            request_id=request_id,
            attempt=attempt,
            index=index,
            token=self._model.words[(marker + index) % len(self._model.words)],
            finish_reason="length" if index >= last else None,
        )

    def _note(self, marker: int, index: int, now_ns: int) -> None:
        if marker < self._times.shape[0] and index < self._times.shape[1]:
            self._times[marker, index] = now_ns

    def _prefill(self, job: wire.PrefillJob) -> None:
        self._leases += 1
        handle = wire.KvHandle(
            worker_id=self._id, incarnation=self._incarnation, lease=self._leases, data_endpoint="tcp://127.0.0.1:1",
            pool=self._pool, layout=self._layout, num_tokens=len(job.token_ids), lease_s=10.0,
        )  # fmt: skip
        started = wire.PrefillStarted(
            request_id=job.request_id, attempt=job.attempt, handle=handle, queued_s=0.0, num_cached_tokens=0
        )
        self._send(started)
        last, marker = job.sampling.max_tokens - 1, job.sampling.seed
        delta = self._delta(job.request_id, job.attempt, job.first_index, last, marker)
        self._note(marker, job.first_index, time.monotonic_ns())
        self._send(wire.FirstToken(delta=delta, prefill_s=0.0, num_computed_tokens=len(job.token_ids)))

    def _start(self, job: wire.DecodeJob) -> None:
        """Repeats the prefill worker's token, whose departure is noted already; without one, gives it
        itself.
        """
        last, marker = job.sampling.max_tokens - 1, job.sampling.seed
        first = self._delta(job.request_id, job.attempt, job.first_index, last, marker)
        if job.handle is None:
            self._note(marker, job.first_index, time.monotonic_ns())
        handed_over = wire.HandedOver(
            request_id=job.request_id,
            attempt=job.attempt,
            first=first,
            transport="tcp",
            handover_s=0.0,
            num_bytes=0,
        )
        self._send(handed_over)
        if first.finish_reason is None:
            self.running[job.request_id] = Running(job.attempt, job.first_index + 1, last, marker)

    def step(self) -> None:
        """One token to each running request, all in one message."""
        if not self.running:
            return
        now_ns = time.monotonic_ns()
        deltas = []
        for request_id, request in list(self.running.items()):
            index, marker = request.index, request.marker
            deltas.append(self._delta(request_id, request.attempt, index, request.last, marker))
            self._note(marker, index, now_ns)
            request.index += 1
            if request.index > request.last:
                del self.running[request_id]
        self._send(wire.Tokens(deltas=deltas))

    def leave(self) -> None:
        self._send(wire.Goodbye())
        self.socket.close()


def serve(endpoint: str, model: Model, times: NDArray[np.int64]) -> None:
    """Until stdin ends. Says ``ready`` on stdout once both workers are welcome."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    prefill = Worker(context, endpoint, "prefill", model, times)
    decode = Worker(context, endpoint, "decode", model, times)
    poller = zmq.Poller()
    for source in (prefill.socket, decode.socket, sys.stdin.fileno()):
        poller.register(source, zmq.POLLIN)
    announced, step_s, next_step = False, 0.0, 0.0
    while True:
        now = time.monotonic()
        prefill.beat(now)
        decode.beat(now)
        if decode.running and now >= next_step:
            decode.step()
            next_step = max(
                next_step + step_s, now - step_s
            )  # late steps are made up for, but not without end
        wait_s = max(0.0, next_step - time.monotonic()) if decode.running else 0.1
        ready = dict(poller.poll(math.ceil(wait_s * 1e3)))
        if sys.stdin.fileno() in ready:
            line = os.read(sys.stdin.fileno(), 64)
            if not line:
                break
            step_s = float(line.split()[-1]) / 1e3
        prefill.receive()
        idle = not decode.running
        decode.receive()
        if idle:
            next_step = time.monotonic() + step_s
        if not announced and prefill.welcomed and decode.welcomed:
            announced = True
            print("ready", flush=True)
    prefill.leave()
    decode.leave()
    context.term()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--model-path", required=True, type=Path)
    parser.add_argument("--times", required=True, type=Path, help="file of the table, mapped")
    parser.add_argument("--shape", required=True, type=int, nargs=2, help="rows and columns of the table")
    args = parser.parse_args()
    times = np.memmap(args.times, dtype=np.int64, mode="r+", shape=tuple(args.shape))
    try:
        serve(args.endpoint, read_model(args.model_path), times)
    except (ValueError, KeyError, OSError) as error:
        print(f"scripted workers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
