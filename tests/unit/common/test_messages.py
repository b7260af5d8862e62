"""Messages and their codec: what is sent arrives, what does not fit is refused by name."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from engines import handle_for, make_pool

from pagerelay.common.errors import WireError
from pagerelay.common.wire import messages as m
from pagerelay.common.wire.account import BlockCounts, Counters, Load
from pagerelay.common.wire.codec import CRC_BYTES, MAX_CONTROL_BYTES, Decoder, encode, sealed
from pagerelay.common.wire.pools import CudaExport, PoolAddress
from pagerelay.common.wire.roles import MAY_GET, MAY_SEND

LAYOUT = make_pool(1).layout
HANDLE = handle_for(3, 5, make_pool(1))
ON_GPU = PoolAddress(
    kind="cuda_ipc",
    num_blocks=4,
    block_bytes=64,
    host_id="h",
    nonce="n",
    cuda=CudaExport(
        memory=bytes(range(64)),
        memory_bytes=4352,
        events=(b"\0" * 64, b"\xff" * 64),
        device_uuid="GPU-1",
        pid=2,
        pid_namespace=2**32,
    ),
)
DELTA = m.TokenDelta(request_id="r", attempt=1, index=4, token=7, finish_reason="stop")
SAMPLING = m.SamplingParams(
    max_tokens=5,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    seed=2**64 - 1,
    choice=2,
    min_tokens=1,
    ignore_eos=True,
    stop_token_ids=(1, 2),
)
JOB: dict[str, Any] = {
    "request_id": "r",
    "attempt": 2,
    "age_s": 0.5,
    "token_ids": [0, 1, 2**31],
    "sampling": SAMPLING,
    "first_index": 1,
}
COUNTERS = Counters(tokens_generated=3, step_seconds=0.5, fetched_blocks={"shm": 2}, fetched_bytes={"tcp": 9})
LOAD = Load(blocks=BlockCounts(total=4, free=1, held=1, leased=1, cached=1), waiting=2, draining=True)

LINKS: list[tuple[str, Any, list[m.Message]]] = [
    (
        "to the router",
        m.ToRouter,
        [
            m.Hello(
                worker_id="w",
                incarnation="i",
                role="colocated",
                layout=LAYOUT,
                num_blocks=1,
                max_model_len=3,
                pid=1,
            ),
            m.Heartbeat(load=LOAD, counters=COUNTERS),
            m.PrefillStarted(request_id="r", attempt=1, handle=HANDLE, queued_s=0.5, num_cached_tokens=4),
            m.FirstToken(delta=DELTA, prefill_s=0.25, num_computed_tokens=6),
            m.Tokens(deltas=[DELTA, DELTA]),
            m.Beams(
                request_id="r",
                attempt=1,
                num_tokens=2,
                hypotheses=[m.Hypothesis(token_ids=[3, 4], score=-0.5, finish_reason="stop")],
            ),
            m.PromptScores(request_id="r", attempt=1, first=1, scores=[m.TokenLogprobs(-0.5, ((3, -0.5),))]),
            m.HandedOver(
                request_id="r", attempt=1, first=DELTA, transport="shm", handover_s=0.1, num_bytes=2**40
            ),
            m.Preempted(request_id="r", attempt=1),
            m.Suspended(request_id="r", attempt=1, handle=HANDLE),
            m.Failed(request_id="r", attempt=1, code="c", message="é", retryable=True),
            m.Goodbye(),
        ],
    ),
    (
        "to a worker",
        m.ToWorker,
        [
            m.Welcome(router_id="x", heartbeat_s=0.5, dead_after_s=3),
            m.Refused(reason="no", fatal=False),
            m.Beat(),
            m.Drain(),
            m.PrefillJob(**JOB),
            m.DecodeJob(**JOB, handle=msgspec.structs.replace(HANDLE, pool=ON_GPU)),
            m.Suspend(request_id="r", attempt=1),
            m.Probe(request_id="r", attempt=1, next_index=3),
            m.Abort(request_id="r", attempt=1),
        ],
    ),
    (
        "to a prefill worker",
        m.ToPrefill,
        [
            m.Fetch(lease=1, incarnation="i", from_block=2, layout=LAYOUT),
            m.Read(lease=1, block_ids=[1, 2]),
            m.Renew(tickets={1: "a", 2: "b"}),
            m.Release(lease=1, received=False, corrupt=[3]),
            m.Attach(),
            m.Detached(),
        ],
    ),
    (
        "to a decode worker",
        m.ToDecode,
        [
            m.Ready(lease=1, first=0, block_ids=[3], written=2, sums=[2**64 - 1]),
            m.Blocks(lease=1, block_ids=[3]),
            m.Commit(lease=1, num_tokens=5, first_token=6),
            m.Released(lease=1, ok=False),
            m.LeaseLost(lease=1, reason="gone", ended=True),
            m.Detach(),
        ],
    ),
]


def unpacked(message: m.Message) -> Any:
    """The fields of a message's frame."""
    return msgspec.msgpack.decode(encode(message)[:-CRC_BYTES])


EVERY = [
    pytest.param(union, message, id=type(message).__name__) for _, union, sent in LINKS for message in sent
]


@pytest.mark.parametrize(("link", "union", "sent"), LINKS, ids=[name for name, _, _ in LINKS])
def test_every_message_of_a_link_is_tried_here(link: str, union: Any, sent: list[m.Message]) -> None:
    assert [type(message) for message in sent] == list(get_args(union))


@pytest.mark.parametrize(("union", "message"), EVERY)
def test_what_is_sent_arrives(union: Any, message: m.Message) -> None:
    frame = encode(message)
    decode: Decoder[Any] = Decoder(union)
    for form in (frame, memoryview(frame)):
        arrived = decode(form)
        assert type(arrived) is type(message)
        assert arrived == message


@pytest.mark.parametrize(("union", "message"), EVERY)
def test_a_newer_versions_optional_field_is_tolerated(union: Any, message: m.Message) -> None:
    fields = unpacked(message) | {"invented_later": {"a": [1]}}
    assert Decoder[Any](union)(sealed(msgspec.msgpack.encode(fields))) == message


@pytest.mark.parametrize(("union", "message"), EVERY)
def test_a_missing_or_mistyped_field_is_refused_by_name(union: Any, message: m.Message) -> None:
    fields = unpacked(message)
    decode: Decoder[Any] = Decoder(union)
    optional = {field.encode_name for field in msgspec.structs.fields(type(message)) if not field.required}
    for name in set(fields) - {"type"}:
        if name not in optional:
            missing = {key: value for key, value in fields.items() if key != name}
            with pytest.raises(WireError, match=rf"missing required field `{name}`"):
                decode(sealed(msgspec.msgpack.encode(missing)))
        with pytest.raises(WireError, match=rf"`\$\.{name}[\[`]"):
            decode(sealed(msgspec.msgpack.encode(fields | {name: {1: None}})))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"token_ids": [1, "2"]}, r"\$\.token_ids\[1\]"),
        ({"token_ids": [1.5]}, r"\$\.token_ids\[0\]"),
        ({"sampling": {"max_tokens": "5"}}, r"\$\.sampling\.max_tokens"),
        ({"attempt": True}, r"\$\.attempt"),
        ({"request_id": 5}, r"\$\.request_id"),
        ({"first_index": -1}, r"\$\.first_index"),
        ({"sampling": {"max_tokens": -1}}, r"\$\.sampling\.max_tokens"),
        ({"sampling": {"max_tokens": 1, "temperature": float("nan")}}, r"\$\.sampling\.temperature"),
        ({"sampling": {"max_tokens": 1, "top_p": 0.0}}, r"\$\.sampling\.top_p"),
    ],
)
def test_a_wrong_type_or_a_number_out_of_bounds_names_its_path(change: dict[str, Any], path: str) -> None:
    fields = unpacked(m.PrefillJob(**JOB)) | change
    with pytest.raises(WireError, match=path):
        Decoder[Any](m.ToWorker)(sealed(msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_a_welcome_names_sensible_times_or_is_refused(interval: float) -> None:
    welcome = m.Welcome(router_id="r", heartbeat_s=interval, dead_after_s=3.0)
    with pytest.raises(WireError, match=r"\$\.heartbeat_s"):
        Decoder[Any](m.ToWorker)(encode(welcome))


def test_a_link_takes_only_its_own_messages() -> None:
    with pytest.raises(WireError, match="Invalid value 'Abort'"):
        Decoder[Any](m.ToRouter)(encode(m.Abort(request_id="r", attempt=1)))


def test_an_enum_is_closed() -> None:
    fields = unpacked(m.Tokens(deltas=[DELTA]))
    fields["deltas"][0]["finish_reason"] = "bored"
    with pytest.raises(WireError, match=r"\$\.deltas\[0\]\.finish_reason"):
        Decoder[Any](m.ToRouter)(sealed(msgspec.msgpack.encode(fields)))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x00",
        b"\x90",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 50_000,
        encode(m.PrefillJob(**JOB))[: -1 - CRC_BYTES],
        encode(m.Beat())[:-CRC_BYTES] + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
    ids=lambda frame: frame[:6].hex() or "empty",
)
def test_rubbish_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError, match="undecodable frame"):
        Decoder[Any](m.ToWorker)(sealed(frame))
    with pytest.raises(WireError, match="a damaged frame"):
        Decoder[Any](m.ToWorker)(frame)


def test_a_frame_with_one_bit_flipped_or_cut_anywhere_is_refused() -> None:
    frame, decode = encode(m.Tokens(deltas=[DELTA])), Decoder[Any](m.ToRouter)
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="a damaged frame"):
            decode(bytes(flipped))
    for length in range(len(frame)):
        with pytest.raises(WireError, match="a damaged frame"):
            decode(frame[:length])


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match=f"a frame of {MAX_CONTROL_BYTES + 1} bytes is over the limit"):
        Decoder[Any](m.ToWorker)(bytes(MAX_CONTROL_BYTES + 1))
    with pytest.raises(WireError, match="a frame of 11 bytes is over the limit of 10"):
        Decoder[Any](m.ToPrefill, 10)(bytes(11))


@pytest.mark.parametrize("role", get_args(m.Role))
def test_every_message_of_the_control_link_has_its_roles(role: m.Role) -> None:
    """What a role may send or get is of the right link, and nothing is left that nobody may."""
    assert MAY_SEND[role] < set(get_args(m.ToRouter))
    assert MAY_GET[role] < set(get_args(m.ToWorker))
    assert set().union(*MAY_SEND.values()) == set(get_args(m.ToRouter))
    # The router's own answers to a Hello are the link's business, whatever the role.
    assert set().union(*MAY_GET.values()) | {m.Welcome, m.Refused, m.Beat} == set(get_args(m.ToWorker))


def test_a_job_of_the_longest_context_stays_below_the_limit() -> None:
    job = m.PrefillJob(**(JOB | {"token_ids": [200_000] * 1_000_000}))
    assert len(encode(job)) < MAX_CONTROL_BYTES


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        DELTA.index = 5  # type: ignore[misc]


def test_the_layout_difference_names_the_field_and_both_values() -> None:
    assert LAYOUT.difference(LAYOUT) is None
    other = msgspec.structs.replace(LAYOUT, block_size=64, dtype="bfloat16")
    assert LAYOUT.difference(other) == "dtype: 'float32' here, 'bfloat16' there"
    assert LAYOUT.block_bytes == 1 * 2 * 1 * 4 * 1 * 4
    assert other.block_bytes == 1 * 2 * 1 * 64 * 1 * 2
