"""The client against a scripted router: order, bounds, errors, retries, and how it ends."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from fake_router import FakeRouter, events, generated, piece, refusal

from pagerelay.client import (
    LLM,
    ApiError,
    ClientClosed,
    ConnectionLost,
    ContextLengthExceeded,
    DeadlineExceeded,
    IncompleteAnswer,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    SamplingParams,
    Unauthorized,
    Unavailable,
    WorkerLost,
)


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- what is asked, what comes back


def test_a_text_is_one_prompt(router: FakeRouter, llm: LLM) -> None:
    router.answers = [generated]
    [output] = llm.generate("hi", SamplingParams(temperature=0, max_tokens=4))
    assert router.seen == [{"path": "/generate", "prompt": "hi", "temperature": 0, "max_tokens": 4}]
    assert (output.prompt, output.prompt_token_ids, output.request_id) == ("hi", None, "gen-1")
    assert output.usage == {"prompt_tokens": 3}
    [choice] = output.outputs
    assert (choice.index, choice.text, choice.token_ids, choice.finish_reason) == (0, "<hi>", [0], "stop")


def test_token_ids_are_one_prompt_and_lists_of_them_several(router: FakeRouter, llm: LLM) -> None:
    router.answers = [generated]
    [one] = llm.generate([1, 2, 3])
    assert (one.prompt, one.prompt_token_ids) == (None, [1, 2, 3])
    assert [output.prompt_token_ids for output in llm.generate([[4, 5], (6,)])] == [[4, 5], [6]]
    assert [seen["prompt"] for seen in router.seen] == [[1, 2, 3], [4, 5], [6]]
    assert llm.generate([]) == []


def test_answers_keep_the_order_of_prompts_and_choices_within_the_bound(router: FakeRouter) -> None:
    router.answers, router.delay_s = [generated], 0.01
    prompts = [f"p{index}" for index in range(40)]
    with LLM(base_url=router.url, max_concurrency=4) as llm:
        outputs = llm.generate(prompts, SamplingParams(n=3))
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [f"<{prompt}>" for prompt in prompts]
    assert all([choice.index for choice in output.outputs] == [0, 1, 2] for output in outputs)
    assert router.most_running == 4


def test_each_prompt_may_have_its_own_params(router: FakeRouter, llm: LLM) -> None:
    router.answers = [generated]
    llm.generate(["a", "b"], [SamplingParams(seed=1), SamplingParams(seed=2)])
    assert {seen["prompt"]: seen["seed"] for seen in router.seen} == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_only_what_was_set_is_sent_and_nothing_is_judged() -> None:
    assert SamplingParams().body() == {}
    odd = SamplingParams(temperature=-1, max_tokens=0, logprobs=3, logit_bias={5: 1.0}, extra_args={"x": 1})
    assert odd.body() == {
        "temperature": -1,
        "max_tokens": 0,
        "logprobs": 3,
        "logit_bias": {5: 1.0},
        "x": 1,
    }
    assert odd.chat_body() == odd.body() | {"logprobs": True, "top_logprobs": 3}


def test_chats_name_the_model_and_pass_fields_on(router: FakeRouter, llm: LLM) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    router.answers = [
        {
            "id": "c",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": None,
        }
    ]
    turns = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(turns, SamplingParams(max_tokens=2), tools=[{"type": "function"}])
    assert output.outputs[0].text == ""
    assert output.outputs[0].message == message
    assert router.seen == [
        {
            "path": "/v1/chat/completions",
            "model": "fake",
            "messages": turns,
            "max_tokens": 2,
            "tools": [{"type": "function"}],
        }
    ]
    assert len(llm.chat([turns, turns])) == 2


def test_the_key_is_shown_and_v1_may_stand_in_the_url(router: FakeRouter) -> None:
    router.answers = [generated]
    with LLM("named", base_url=f"{router.url}/v1/", api_key="secret-key") as llm:
        llm.generate("hi")
    assert router.keys == ["Bearer secret-key"]
    assert router.seen[0]["model"] == "named"


def test_logprobs_and_prompt_ids_are_taken_where_the_api_tells_them(router: FakeRouter, llm: LLM) -> None:
    choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": {"tokens": ["x"]}}
    router.answers = [{"id": "g", "choices": [choice], "prompt_token_ids": [7, 8], "prompt_logprobs": [None]}]
    [output] = llm.generate("hi", SamplingParams(logprobs=1, prompt_logprobs=1))
    assert output.outputs[0].logprobs == {"tokens": ["x"]}
    assert (output.prompt_token_ids, output.prompt_logprobs) == ([7, 8], [None])


# ---------------------------------------------------------------- streams


def test_a_stream_comes_in_pieces_whatever_the_packets(router: FakeRouter, llm: LLM) -> None:
    router.answers = [events(piece("日本"), piece("語", "stop"), {"choices": [], "usage": {}})]
    pieces = list(llm.stream("hi", SamplingParams(max_tokens=2)))
    assert [(p.text, p.finish_reason) for p in pieces] == [("日本", None), ("語", "stop")]
    assert router.seen == [{"path": "/generate", "prompt": "hi", "max_tokens": 2, "stream": True}]


def test_a_chat_streams_its_deltas(router: FakeRouter, llm: LLM) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    router.answers = [events(*chunks)]
    assert [p.text for p in llm.stream_chat([{"role": "user", "content": "hi"}])] == ["", "a", ""]


def test_a_stream_without_its_end_is_an_error(router: FakeRouter, llm: LLM) -> None:
    router.answers = [events(piece("a"), done=False)]
    stream = llm.stream("hi")
    assert next(stream).text == "a"
    with pytest.raises(IncompleteAnswer, match=r"without \[DONE\]"):
        next(stream)


def test_an_error_within_a_stream_is_raised_with_its_class(router: FakeRouter, llm: LLM) -> None:
    error = {"error": {"message": "gone", "type": "server_error", "param": None, "code": "worker_lost"}}
    router.answers = [events(piece("a"), error, done=False)]
    stream = llm.stream("hi")
    next(stream)
    with pytest.raises(WorkerLost, match="gone") as caught:
        next(stream)
    assert (caught.value.status, caught.value.code, caught.value.type) == (502, "worker_lost", "server_error")


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 5\n\n", b'data: {"choices": [{}]}\n\n'])
def test_rubbish_in_a_stream_is_an_error(router: FakeRouter, llm: LLM, data: bytes) -> None:
    router.answers = [data + b"data: [DONE]\n\n"]
    with pytest.raises(IncompleteAnswer):
        list(llm.stream("hi"))


def test_a_stream_that_is_left_is_cancelled_on_the_server(router: FakeRouter, llm: LLM) -> None:
    router.answers, router.hold = [events(piece("a"), piece("b"), done=False)], True
    for _ in llm.stream("hi"):
        break
    until(lambda: router.left == 1)
    assert router.running == 0


# ---------------------------------------------------------------- errors and retries


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_value", InvalidRequest),
        (400, "context_length_exceeded", ContextLengthExceeded),
        (401, "invalid_api_key", Unauthorized),
        (404, "model_not_found", NotFound),
        (413, "payload_too_large", PayloadTooLarge),
        (429, "queue_full", Overloaded),
        (500, "internal_error", ApiError),
        (502, "worker_lost", WorkerLost),
        (503, "no_worker", Unavailable),
        (504, "deadline_exceeded", DeadlineExceeded),
    ],
)
def test_each_status_has_its_class(
    router: FakeRouter, llm: LLM, status: int, code: str, kind: type[ApiError]
) -> None:
    router.answers = [refusal(status, code, param="prompt")]
    with pytest.raises(ApiError) as caught:
        llm.generate("hi")
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.code, error.param, str(error)) == (status, code, "prompt", "no")
    assert len(router.seen) == 1  # none of these says when to come again


def test_a_page_of_a_proxy_is_quoted(router: FakeRouter, llm: LLM) -> None:
    router.answers = [web.Response(status=502, text="<html>bad gateway</html>")]
    with pytest.raises(ApiError, match="bad gateway") as caught:
        llm.generate("hi")
    assert (caught.value.status, caught.value.code) == (502, None)


@pytest.mark.parametrize("status", [429, 503])
def test_what_may_come_again_comes_again(router: FakeRouter, llm: LLM, status: int) -> None:
    router.answers = [refusal(status, "x", "0"), refusal(status, "x", "0"), generated]
    assert llm.generate("hi")[0].outputs[0].text == "<hi>"
    assert len(router.seen) == 3


def test_retries_are_bounded(router: FakeRouter, llm: LLM) -> None:
    router.answers = [lambda _: refusal(429, "queue_full", "0")]
    with pytest.raises(Overloaded):
        llm.generate("hi")
    assert len(router.seen) == 3  # the request and max_retries=2


def test_a_server_that_is_restarted_is_asked_again(router: FakeRouter) -> None:
    router.answers = [generated]
    with LLM(base_url=router.url, max_retries=7) as llm:
        llm.generate("hi")
        router.stop()
        starting = threading.Timer(0.25, router.start_again)
        starting.start()
        assert llm.generate("hi")[0].outputs[0].text == "<hi>"
        starting.join()
    assert len(router.seen) == 2


def test_a_server_that_stays_away_is_asked_so_often(router: FakeRouter, llm: LLM) -> None:
    router.answers = [generated]
    llm.generate("hi")
    router.stop()
    with pytest.raises(ConnectionLost, match="no server answers"):
        llm.generate("hi")
    router.start_again()
    assert len(router.seen) == 1


@pytest.mark.parametrize(
    "cut",
    [
        events(piece("a"), done=False),
        events(piece("a"), {"error": {"message": "no", "type": "service_unavailable", "code": "no_worker"}}),
    ],
    ids=["cut", "error"],
)
def test_an_answer_that_has_begun_is_not_asked_for_again(router: FakeRouter, llm: LLM, cut: bytes) -> None:
    router.answers = [cut]
    got = []
    with pytest.raises((IncompleteAnswer, Unavailable)):
        got.extend(one.text for one in llm.stream("hi"))
    router.answers = [web.Response(body=b'{"id": "x", "choi', content_type="application/json")]
    with pytest.raises(IncompleteAnswer):
        llm.generate("hi")
    assert len(router.seen) == 2


def test_a_server_that_goes_while_it_answers_is_not_asked_again(router: FakeRouter, llm: LLM) -> None:
    router.answers, router.hold = [events(piece("a"), done=False)], True
    pieces = llm.stream("hi")
    assert next(pieces).text == "a"
    router.stop()
    router.hold = False
    with pytest.raises(ConnectionLost):
        list(pieces)
    router.start_again()
    assert len(router.seen) == 1


def test_a_long_pause_is_the_callers_to_wait(router: FakeRouter, llm: LLM) -> None:
    router.answers = [refusal(503, "draining", "3600")]
    with pytest.raises(Unavailable) as caught:
        llm.generate("hi")
    assert caught.value.retry_after_s == 3600


def test_one_error_ends_the_call_and_cancels_the_rest(router: FakeRouter, llm: LLM) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return refusal(400, "invalid_value") if body["prompt"] == "bad" else events(piece("a"), done=False)

    router.answers, router.hold = [answer], True
    with pytest.raises(InvalidRequest):
        llm.generate(["good", "good", "bad"])
    until(lambda: router.running == 0)


def test_no_server_is_said_in_one_line() -> None:
    with LLM(base_url="http://127.0.0.1:9") as llm:
        with pytest.raises(ConnectionLost, match=r"^no server answers at http://127.0.0.1:9: .+") as caught:
            llm.generate("hi")
        assert "\n" not in str(caught.value)
    with LLM(base_url="nonsense") as llm, pytest.raises(ConnectionLost):
        llm.generate("hi")


def test_a_body_that_is_no_answer_is_an_error(router: FakeRouter, llm: LLM) -> None:
    for answer in (web.Response(text="hi"), {"choices": [{}], "id": "x"}, {"id": "x"}):
        router.answers = [answer]
        with pytest.raises(IncompleteAnswer):
            llm.generate("hi")


def test_a_request_may_not_take_for_ever(router: FakeRouter) -> None:
    router.answers, router.delay_s = [generated], 30
    with (
        LLM(base_url=router.url, timeout_s=0.1) as llm,
        pytest.raises(ConnectionLost, match=r"within 0\.1 s"),
    ):
        llm.generate("hi")


# ---------------------------------------------------------------- ending


def test_a_closed_client_says_so_and_closes_twice(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(ClientClosed):
        llm.generate("hi")


def test_closing_ends_a_call_of_another_thread(router: FakeRouter, llm: LLM) -> None:
    router.answers, router.delay_s = [generated], 30
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate("hi")
        except ClientClosed as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: router.running == 1)
    llm.close()
    asking.join(10)
    assert len(raised) == 1
    until(lambda: router.running == 0)


def test_a_client_that_is_forgotten_ends_its_thread(router: FakeRouter) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    before = names().count("pagerelay-client")
    llm = LLM(base_url=router.url)
    assert names().count("pagerelay-client") == before + 1
    del llm
    gc.collect()
    until(lambda: names().count("pagerelay-client") == before)


def test_ctrl_c_cancels_the_request_and_leaves_the_client_usable(router: FakeRouter, llm: LLM) -> None:
    router.answers, router.hold = [events(piece("a"), done=False)], True
    stream = llm.stream("hi")
    assert next(stream).text == "a"
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests have left
    try:
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    finally:
        signal.signal(signal.SIGINT, before)
    until(lambda: router.left == 1)
    router.answers, router.hold = [generated], False
    assert llm.generate("hi")[0].outputs[0].text == "<hi>"


def test_settings_are_for_a_cluster_of_ones_own() -> None:
    with pytest.raises(ValueError, match="local cluster"):
        LLM(base_url="http://127.0.0.1:9", settings={"cluster.decode": 2})
