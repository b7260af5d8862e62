"""Public faults of other servers as black-box tests: what is told of tokens. See test_cases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from chat_templates import LLAMA
from cluster import Cluster, running
from rows import CHAT, PATHS, after, asked, both, ids_of, model_of, refused, smallest, streamed, text_of
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

STRANGE = "\ufffd"
BOS = "<|im_start|>"


async def test_c08_characters_of_several_tokens(row: Cluster) -> None:
    text = "ok 🦜🦜🦜 日本語 العربية 👩‍👩‍👧 🦜 end"
    common = {"temperature": 0, "return_token_ids": True, "max_tokens": 200}
    for path in PATHS[1:]:
        body = smallest(path, await model_of(row)) | common
        checked, events = await streamed(row, path, body | {"guided_choice": [text]})
        assert checked.texts[0] == text
        choices = [choice for event in events for choice in event["choices"]]
        assert not any(STRANGE in str(choice) for choice in choices)
        assert len(checked.token_ids[0]) > len(text)
        ids = checked.token_ids[0][: -1 if checked.finish[0] == "stop" else None]
        assert await text_of(row, ids) == text
    lone = (await ids_of(row, prompt="🦜"))[-1:]  # its last byte
    for path in PATHS[1:]:
        body = smallest(path, await model_of(row)) | common
        checked, events = await streamed(row, path, body | {"allowed_token_ids": lone, "ignore_eos": True})
        assert checked.token_ids[0] == lone * 200
        assert checked.texts[0] == await text_of(row, lone * 200)
        assert set(checked.texts[0]) == {STRANGE}
        given = 0
        for choice in (choice for event in events for choice in event["choices"]):
            shown = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            assert len(shown) == len(choice.get("token_ids") or ""), "text is withheld"
            given += len(shown)
        assert given == 200


async def test_c15_several_choices(row: Cluster) -> None:
    model = await model_of(row)
    sampled = {"model": model, "temperature": 1, "seed": 7, "max_tokens": 40, "ignore_eos": True}
    sampled |= {"return_token_ids": True}
    for path, length in ((PATHS[0], 19), *((PATHS[1], length) for length in (15, 16, 17, 19))):
        prompt = [1000 + 7 * at for at in range(length)]
        body = sampled | {"prompt": prompt, "n": 4}
        answer, _ = await both(row, path, body)  # twice the same
        assert answer["usage"] == {
            "prompt_tokens": length,
            "completion_tokens": 160,
            "total_tokens": length + 160,
        }
        choices = answer["choices"]
        assert [(one["index"], one["finish_reason"]) for one in choices] == [(k, "length") for k in range(4)]
        assert len({tuple(one["token_ids"]) for one in choices}) > 1
    # A choice's numbers come from the seed and its own index, whoever is beside it.
    for n in (1, 3):
        assert (await asked(row, path, body | {"n": n}))["choices"] == choices[:n]
    wanted = [[5, 6, 7], [900 + at for at in range(33)], [30] * 16]
    answer, events = await both(row, PATHS[1], sampled | {"prompt": wanted, "n": 2})
    assert answer["usage"]["prompt_tokens"] == 3 + 33 + 16
    assert {one["index"] for event in events for one in event["choices"]} == set(range(6))
    for at, prompt in enumerate(wanted):
        alone = (await asked(row, PATHS[1], sampled | {"prompt": prompt, "n": 2}))["choices"]
        both_of_it = answer["choices"][2 * at : 2 * at + 2]
        assert [one | {"index": one["index"] % 2} for one in both_of_it] == alone


def table_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of one undisturbed process at each of the ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        table: torch.Tensor = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return table


def bytes_named(token: str) -> bytes:
    """What a token of a completion stands for."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(two, 16) for two in token.removeprefix("bytes:\\x").split("\\x"))


async def test_c17_logprobs_of_completions(row: Cluster) -> None:
    prompt = "The lynx says 🦜"
    of_prompt = await ids_of(row, prompt=prompt)
    assert len(await ids_of(row, prompt="🦜")) > 1
    common = smallest(PATHS[1], await model_of(row), prompt)
    common |= {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    table = None
    for echo, count in product((False, True), (0, 5)):
        answer, events = await both(row, PATHS[1], common | {"logprobs": count, "echo": echo})
        (choice,) = answer["choices"]
        told, ids = choice["logprobs"], [*(of_prompt if echo else ()), *choice["token_ids"]]
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 12
        assert {len(told[name]) for name in told} == {len(ids)}
        parts = [one["logprobs"] for event in events for one in event["choices"] if one["logprobs"]]
        assert {name: [x for part in parts for x in part[name]] for name in told} == told
        raw_text = b"".join(map(bytes_named, told["tokens"]))
        assert raw_text.decode("utf-8", "replace") == choice["text"]
        assert choice["text"].startswith(prompt) is echo
        assert told["text_offset"][0] == 0
        assert told["text_offset"] == sorted(told["text_offset"])
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)
        table = table_of(row.folder, of_prompt + choice["token_ids"]) if table is None else table
        begin = 0 if echo else len(of_prompt)
        for at, (token, logprob, top) in enumerate(
            zip(ids, told["token_logprobs"], told["top_logprobs"], strict=True), begin
        ):
            if at == 0:
                assert logprob is top is None
                continue
            due = table[at - 1]
            assert logprob == pytest.approx(float(due[token]), abs=1e-3)
            among = token in due.topk(max(count, 1)).indices[:count]
            assert len(top) == count + (not among)
            assert list(top.values())[:count] == sorted(list(top.values())[:count], reverse=True)
            assert list(top.values())[:count] == pytest.approx(
                due.topk(max(count, 1)).values[:count].tolist(), abs=1e-3
            )
            assert logprob in top.values()
    for bad in (-1, 21, 1.5, "5", True):
        await refused(row, PATHS[1], common | {"logprobs": bad}, "logprobs")
    await refused(row, PATHS[1], common | {"logprobs": 1, "top_logprobs": 2}, "top_logprobs")


async def test_c17_logprobs_of_chats(row: Cluster) -> None:
    model = await model_of(row)
    common = smallest(CHAT, model, "🦜") | {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    of_prompt = await ids_of(row, messages=common["messages"])
    text = "ok 🦜 日本語"
    for more, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 5}, 5)):
        answer, events = await both(row, CHAT, common | {"logprobs": True, "ignore_eos": True} | more)
        (choice,) = answer["choices"]
        told, ids = choice["logprobs"]["content"], choice["token_ids"]
        assert set(choice["logprobs"]) == {"content", "refusal"}
        assert len(told) == len(ids) == answer["usage"]["completion_tokens"] == 12
        parts = [one["logprobs"] for event in events for one in event["choices"] if one["logprobs"]]
        assert [one for part in parts for one in part["content"]] == told
        table = table_of(row.folder, of_prompt + ids)[len(of_prompt) - 1 :]
        for one, token, due in zip(told, ids, table, strict=False):
            assert set(one) == {"token", "logprob", "bytes", "top_logprobs"}
            assert one["logprob"] == pytest.approx(float(due[token]), abs=1e-3)
            top = [entry["logprob"] for entry in one["top_logprobs"]]
            assert top == sorted(top, reverse=True)
            assert top == pytest.approx(due.topk(5).values[:count].tolist(), abs=1e-3)
        said = b"".join(bytes(one["bytes"]) for one in told).decode("utf-8", "replace")
        assert said == choice["message"]["content"]
        exact = common | {"logprobs": True, "guided_choice": [text], "max_tokens": 60} | more
        answer, _ = await both(row, CHAT, exact)
        told = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(one["bytes"] or b"") for one in told) == text.encode()
        assert any(one["token"].startswith("bytes:") for one in told)
    for more, param in (
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
    ):
        await refused(row, CHAT, common | more, param)


# ---------------------------------------------------------------- chats


@pytest.fixture(scope="module")
def llama(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same model with a tokenizer that begins each text with BOS, as Llama's does, and a template that
    writes BOS itself and knows tools."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(tiny_dir / name)
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(tiny_dir / "tokenizer_config.json", folder / "tokenizer_config.json")
    (folder / "chat_template.jinja").write_text(LLAMA, encoding="utf-8")
    with running(folder, cluster__prefill=0, cluster__decode=0, cluster__colocated=1) as cluster:
        yield cluster


async def test_c19_all_ids_that_end_an_answer(row: Cluster) -> None:
    of_config = json.loads((row.folder / "config.json").read_text())["eos_token_id"]
    eos = json.loads((row.folder / "generation_config.json").read_text())["eos_token_id"]
    assert isinstance(of_config, int)
    assert len({of_config, *eos}) == 2
    common = smallest(CHAT, await model_of(row), "Say hi.") | {"temperature": 0, "return_token_ids": True}
    for end in eos:
        body = common | {"logit_bias": {str(end): 12}, "max_tokens": 200}
        goes_on, _ = await both(row, CHAT, body | {"ignore_eos": True, "max_tokens": 64})
        (choice,) = goes_on["choices"]
        ids = choice["token_ids"]
        assert (len(ids), choice["finish_reason"], goes_on["usage"]["completion_tokens"]) == (
            64,
            "length",
            64,
        )
        first = ids.index(end)
        assert first > 0
        for asked_for, answered in ((body, ids[: first + 1]), (body | {"min_tokens": 20}, None)):
            answer, _ = await both(row, CHAT, asked_for)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == await text_of(row, choice["token_ids"][:-1])
            assert "<|" not in choice["message"]["content"]
            assert choice["token_ids"][-1] == end
            assert not set(eos) & set(choice["token_ids"][:-1])
            assert answered in (None, choice["token_ids"])
        assert len(choice["token_ids"]) >= 20
        for stop in ({}, {"stop_token_ids": [5]}):
            await refused(row, CHAT, body | {"min_tokens": 20, "max_tokens": 10} | stop, "min_tokens")


@pytest.mark.parametrize("with_bos", [False, True], ids=["no bos", "bos"])
async def test_c20_a_chat_is_tokenised_once(split: Cluster, llama: Cluster, with_bos: bool) -> None:
    cluster = llama if with_bos else split
    cluster.fresh_log()
    reference = AutoTokenizer.from_pretrained(cluster.folder)
    model, bos = await model_of(cluster), reference.bos_token_id
    assert (reference("hi")["input_ids"][0] == bos) is with_bos
    contents = ["hi", "one\r\ntwo\r\n", "trailing blanks   ", "\ttab and trailing lines \n\n", "=" * 50_000]
    for content in contents:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        due = reference.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert await ids_of(cluster, messages=turns) == due
        assert due.count(bos) == (1 if with_bos else 3)  # the other template's turns begin with it
        few = {"max_tokens": 8, "temperature": 0}
        answer, _ = await both(cluster, CHAT, {"model": model, "messages": turns} | few)
        as_ids = await asked(cluster, PATHS[0], {"prompt": due} | few)
        assert answer["usage"] == as_ids["usage"]
        assert answer["usage"]["prompt_tokens"] == len(due)
        assert answer["choices"][0]["message"]["content"] == as_ids["choices"][0]["text"]
        shown = content.strip() if with_bos else content  # that template trims
        assert shown in await text_of(cluster, due)
    await after(cluster)


async def test_c11_null_beside_calls(llama: Cluster) -> None:
    """And the turn that answers the call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    ids = await ids_of(llama, messages=turns)
    assert '{"name": "add", "parameters": {"a": 1}}' in await text_of(llama, ids)
    body = {"model": await model_of(llama), "messages": turns, "max_tokens": 4, "temperature": 0}
    answer, _ = await both(llama, CHAT, body)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    absent = [turns[0], {k: v for k, v in turns[1].items() if k != "content"}, turns[2]]
    assert (await asked(llama, CHAT, body | {"messages": absent}))["choices"] == answer["choices"]
    for role in ("user", "system", "tool", "assistant"):
        null = {"role": role, "content": None} | ({"tool_call_id": "call_1"} if role == "tool" else {})
        await refused(llama, CHAT, body | {"messages": [*turns[:2], null]}, "messages[2].content")
    await after(llama)
