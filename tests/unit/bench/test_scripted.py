"""The scripted workers as the process they are, with the router's end of the wire played by the test."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from pagerelay.bench.scripted import read_model
from pagerelay.common.wire import messages as wire
from pagerelay.common.wire.codec import Decoder, encode

VOCABULARY = {"<|end|>": 0, "a": 1, "Ġthe": 2, "Ġtime": 3, "Ġ12": 4, "Ġway": 5}
ROWS, COLUMNS = 4, 8


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    config = {"vocab_size": 6, "max_position_embeddings": 512, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": VOCABULARY}}))
    return tmp_path


class RouterEnd:
    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._decode: Decoder[Any] = Decoder(wire.ToRouter)
        self.names: dict[str, bytes] = {}

    def receive(self, limit_s: float = 15.0) -> Any:
        """The next message that is no heartbeat."""
        end = time.monotonic() + limit_s
        while self._socket.poll(max(0, int((end - time.monotonic()) * 1e3))):
            name, frame = self._socket.recv_multipart()
            message = self._decode(frame)
            if isinstance(message, wire.Hello):
                self.names[message.role] = name
            if not isinstance(message, wire.Heartbeat):
                return message
        return None

    def send(self, role: str, message: wire.Message) -> None:
        self._socket.send_multipart([self.names[role], encode(message)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def router() -> Iterator[RouterEnd]:
    end = RouterEnd()
    yield end
    end.close()


@pytest.fixture
def times(tmp_path: Path) -> np.memmap[Any, np.dtype[np.int64]]:
    return np.memmap(tmp_path / "times", dtype=np.int64, mode="w+", shape=(ROWS, COLUMNS))


def command_line(router: RouterEnd, model_path: Path, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "pagerelay.bench.scripted", "--endpoint", router.endpoint,
        "--model-path", str(model_path), "--times", str(folder / "times"), "--shape", str(ROWS), str(COLUMNS),
    ]  # fmt: skip


@pytest.fixture
def workers(
    router: RouterEnd, model_path: Path, times: Any, tmp_path: Path
) -> Iterator[subprocess.Popen[str]]:
    command = command_line(router, model_path, tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            hellos = []
            while set(router.names) != {"prefill", "decode"}:
                hellos.append(router.receive())
            assert hellos[0].layout == hellos[-1].layout
            for role in ("prefill", "decode"):
                router.send(role, wire.Welcome(router_id="r", heartbeat_s=0.1, dead_after_s=1.0))
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def prefill_job(marker: int, max_tokens: int) -> wire.PrefillJob:
    sampling = wire.SamplingParams(max_tokens=max_tokens, seed=marker)
    return wire.PrefillJob(
        request_id=f"r{marker}",
        attempt=1,
        age_s=float(marker),
        token_ids=[1, 2, 3],
        sampling=sampling,
        first_index=0,
    )


def answer_of(router: RouterEnd, kind: type) -> Any:
    """The next message of that kind; late Hellos are skipped."""
    while (message := router.receive()) is not None:
        if isinstance(message, kind):
            return message
        assert isinstance(message, wire.Hello), message
    raise AssertionError(f"no {kind.__name__}")


def test_a_request_is_answered_word_by_word(workers: Any, router: RouterEnd, times: Any) -> None:
    job = prefill_job(marker=2, max_tokens=3)
    before = time.monotonic_ns()
    router.send("prefill", job)
    started = answer_of(router, wire.PrefillStarted)
    first = answer_of(router, wire.FirstToken).delta
    assert (first.request_id, first.attempt, first.index, first.finish_reason) == ("r2", 1, 0, None)
    decode = wire.DecodeJob(
        request_id="r2", attempt=1, age_s=2.0, token_ids=job.token_ids, sampling=job.sampling, first_index=0,
        handle=started.handle,
    )  # fmt: skip
    router.send("decode", decode)
    assert answer_of(router, wire.HandedOver).first == first
    deltas = [delta for _ in range(2) for delta in answer_of(router, wire.Tokens).deltas]
    assert [delta.index for delta in deltas] == [1, 2]
    assert [delta.finish_reason for delta in deltas] == [None, "length"]
    assert {first.token, *(delta.token for delta in deltas)} == {2, 3, 5}
    assert before < times[2, 0] < times[2, 1] <= times[2, 2] < time.monotonic_ns()
    assert not times[2, 3:].any()
    assert not times[[0, 1, 3]].any()


def test_all_running_requests_share_a_step_and_an_aborted_one_stops(workers: Any, router: RouterEnd) -> None:
    workers.stdin.write("200\n")
    workers.stdin.flush()
    time.sleep(0.2)
    for marker in (0, 1):
        job = prefill_job(marker, max_tokens=4)
        decode = wire.DecodeJob(
            request_id=job.request_id, attempt=1, age_s=0.0, token_ids=[1], sampling=job.sampling,
            first_index=0, handle=None,
        )  # fmt: skip
        router.send("decode", decode)
    seen: list[list[str]] = []
    while len(seen) < 3:
        message = router.receive()
        if isinstance(message, wire.Tokens):
            seen.append([delta.request_id for delta in message.deltas])
            if len(seen) == 2:
                router.send("decode", wire.Abort(request_id="r0", attempt=1))
    assert seen[1] == ["r0", "r1"]
    assert seen[2] == ["r1"]


def test_the_end_of_stdin_ends_them_with_a_goodbye(workers: Any, router: RouterEnd) -> None:
    workers.stdin.close()
    answer_of(router, wire.Goodbye)
    answer_of(router, wire.Goodbye)
    assert workers.wait(10) == 0


def test_a_refusal_for_good_ends_them(
    router: RouterEnd, model_path: Path, times: Any, tmp_path: Path
) -> None:
    command = command_line(router, model_path, tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        role = router.receive().role
        router.send(role, wire.Refused(reason="another protocol", fatal=True))
        assert process.wait(10) == 2
        assert process.stderr is not None
        assert "another protocol" in process.stderr.read()


def test_the_words_are_whole_ones_with_a_space_in_front(model_path: Path) -> None:
    model = read_model(model_path)
    assert (model.words, model.max_model_len) == ((2, 3, 5), 512)
    (model_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(ValueError, match="no words"):
        read_model(model_path)
