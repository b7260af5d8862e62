"""``pagerelay.client`` against real clusters: a running one, and one of its own that ends with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest
import taps
from cluster import Cluster

from pagerelay.bench.client import Client, Target, open_session
from pagerelay.bench.handover import one_stream
from pagerelay.client import LLM, InvalidRequest, SamplingParams, StartupError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


async def test_texts_ids_and_streams_of_a_running_cluster(split: Cluster) -> None:
    prompts = ["The licence says that", "Alphabet:"]
    expected = [await split.ids(prompt, 6) for prompt in prompts]
    with LLM(base_url=split.url) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 2
        assert outputs[0].usage["completion_tokens"] == 6
        pieces = list(llm.stream(prompts[0], GREEDY))
        assert [i for piece in pieces for i in piece.token_ids] == expected[0]
        assert "".join(piece.text for piece in pieces) == outputs[0].outputs[0].text
        assert len(llm.generate([[5, 6, 7]], SamplingParams(n=2, max_tokens=3))[0].outputs) == 2
    await split.idle()


async def test_logprobs_of_answer_and_prompt(split: Cluster) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with LLM(base_url=split.url) as llm:
        [output] = llm.generate([[5, 6, 7]], params)
        [chat] = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3, logprobs=2))
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) == 3
    assert len(output.prompt_logprobs) == 3
    assert [len(token["top_logprobs"]) for token in chat.outputs[0].logprobs["content"]] == [2, 2, 2]


async def test_chats_of_a_running_cluster(split: Cluster) -> None:
    turns = [{"role": "user", "content": "hi"}]
    with LLM(base_url=split.url) as llm:
        [whole] = llm.chat(turns, GREEDY)
        assert whole.outputs[0].text == "".join(piece.text for piece in llm.stream_chat(turns, GREEDY))
        with pytest.raises(InvalidRequest) as caught:
            llm.chat(turns, SamplingParams(temperature=-1))
        assert (caught.value.status, caught.value.param) == (400, "temperature")


async def test_streams_that_our_readers_read_are_strict(split: Cluster) -> None:
    """Those of the client and of the bench: their bytes go through the checker of all streams."""
    model = (await split.get("/cluster"))["model"]
    with LLM(base_url=split.url) as llm:
        assert list(llm.stream("The licence says that", SamplingParams(n=2, max_tokens=5)))
        assert list(llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY))
    async with open_session() as session:
        for api in ("chat", "completions"):
            record = await Client(Target(split.url + "/v1", model, api), session, 30).send(
                "be brief", "hi", 5
            )
            assert (record.outcome, record.tokens) == ("ok", 5)
        await one_stream(session, split.url, [5] * 40)
    assert taps.check_all() == 5


async def test_a_stream_that_is_not_strict_is_found(unused_tcp_port: int) -> None:
    async def answer(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        response = aiohttp.web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Request-Id": "x"}
        )
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
        return response

    app = aiohttp.web.Application()
    app.router.add_post("/generate", answer)
    runner = aiohttp.web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    try:
        with LLM(base_url=f"http://127.0.0.1:{unused_tcp_port}") as llm:
            read = await asyncio.to_thread(lambda: list(llm.stream("hi")))
        assert read == []
        with pytest.raises(ValueError, match="required"):
            taps.check_all()
    finally:
        await runner.cleanup()


async def test_a_stream_that_is_left_frees_the_cluster(split: Cluster) -> None:
    with LLM(base_url=split.url) as llm:
        for _ in llm.stream("The licence says that", SamplingParams(max_tokens=2000, ignore_eos=True)):
            break
        await split.idle()


# ---------------------------------------------------------------- a cluster of its own

OWN = """
import json, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
from pagerelay.bench.client import Client, Target, open_session
from pagerelay.bench.handover import one_stream
from pagerelay.client import LLM, SamplingParams
llm = LLM(sys.argv[1], settings={"engine.threads": 1, "cache.num_blocks": 128, "cluster.colocated": 1})
ids = llm.generate("hi", SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids
print(json.dumps({"ids": ids, "pid": llm._local._process.pid}), flush=True)
"""
ENDINGS = {
    "forgotten at exit": ("", None),
    "interrupted": ("llm.generate('hi', SamplingParams(max_tokens=8000, ignore_eos=True))", signal.SIGINT),
    "killed": ("time.sleep(60)", signal.SIGKILL),
}


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in descendants(int(child)))]


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, marks=[pytest.mark.slow] if ending != "interrupted" else [])  # a cluster each
        for ending in ENDINGS
    ],
)
def test_nothing_outlives_the_client(tiny_dir: Path, ending: str) -> None:
    code, number = ENDINGS[ending]
    process = subprocess.Popen(
        [sys.executable, "-c", OWN + code, str(tiny_dir)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert len(said["ids"]) == 3
        left = descendants(said["pid"]) if number is not None else [said["pid"]]
        if number is not None:
            assert len(left) == 3  # launcher, router, worker
            process.send_signal(number)
        assert process.wait(60) == {None: 0, signal.SIGINT: -signal.SIGINT}.get(number, -signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in left):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_cluster_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no-such-folder"):
        LLM(str(tmp_path / "no-such-folder"))
    with pytest.raises(StartupError, match=r"engine\.thread: no such setting"):
        LLM(settings={"engine.thread": 1})
