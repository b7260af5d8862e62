"""What a worker is made of, and what is said when shared memory cannot be had."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import FACTS, FakeOps, assert_idle, decode_engine, decode_job, greedy, run_dry
from fake_cuda import FakeCuda, Machine
from msgspec import structs
from torch.profiler import ProfilerActivity, profile

from pagerelay.cli.serve import choose_ops
from pagerelay.common import segments
from pagerelay.common.config import Config, load_config
from pagerelay.common.engine.scheduler import MAX_SCORED_ROWS
from pagerelay.common.errors import StartupError
from pagerelay.common.kv.memory import DeviceBlocks
from pagerelay.common.model.batch import Batch
from pagerelay.common.model.runner import read_facts
from pagerelay.common.service.build import Parts, build_parts, direct_backend
from pagerelay.common.service.gpu_memory import CONTEXT_BYTES, run_largest_step
from pagerelay.common.transport import shm
from pagerelay.common.transport.base import TransferBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.sampling import SamplingParams
from pagerelay.kernels.torch_ops import TorchOps
from pagerelay.kernels.triton import missing


def config(**flags: str) -> Config:
    return load_config(None, {name.replace("__", "."): value for name, value in flags.items()}, {})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev/shm, where other processes come and go."""
    made = tmp_path / "shm"
    made.mkdir()
    for module in (segments, shm):
        monkeypatch.setattr(module, "FOLDER", made)
    return made


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


@pytest.mark.parametrize(
    ("transport", "kind"), [("auto", ShmBackend), ("shm", ShmBackend), ("tcp", TcpBackend)]
)
def test_parts(tiny_dir: Path, transport: str, kind: type) -> None:
    wanted = config(worker__transport=transport, cache__num_blocks="7", engine__max_num_seqs="3")
    parts = build_parts(wanted, tiny_dir, TorchOps())
    try:
        assert type(parts.backend) is kind
        assert parts.pool.num_blocks == 7
        assert parts.layout == parts.facts.layout(16)
        assert parts.backend.address().block_bytes == parts.layout.block_bytes == 2 * 2 * 2 * 16 * 16 * 4
        assert (parts.limits.max_num_seqs, parts.limits.block_size) == (3, 16)
        assert parts.facts.eos_token_ids == (0, 2)
    finally:
        parts.backend.close()


def test_the_pool_is_as_large_as_the_memory_given(tiny_dir: Path) -> None:
    parts = build_parts(config(worker__transport="tcp", cache__kv_memory_mib="1"), tiny_dir, TorchOps())
    assert parts.pool.num_blocks == (1 << 20) // parts.layout.block_bytes


@pytest.mark.usefixtures("no_shared_memory")
def test_without_shared_memory_tcp_is_used_and_that_is_said(
    tiny_dir: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = build_parts(config(cache__num_blocks="7"), tiny_dir, TorchOps())
    assert type(parts.backend) is TcpBackend
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "MiB of shared memory" in record.getMessage()
    assert record.getMessage().endswith("using tcp instead")
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("no_shared_memory")
def test_forced_shared_memory_that_cannot_be_had_fails(tiny_dir: Path) -> None:
    with pytest.raises(StartupError, match="MiB of shared memory"):
        build_parts(config(worker__transport="shm", cache__num_blocks="7"), tiny_dir, TorchOps())


def test_a_pool_too_small_is_refused_before_anything_is_allocated(tiny_dir: Path, folder: Path) -> None:
    wanted = config(cache__num_blocks="2")
    wanted = structs.replace(wanted, cache=structs.replace(wanted.cache, num_blocks=1))
    with pytest.raises(StartupError, match="the KV pool has 1 blocks"):
        build_parts(wanted, tiny_dir, TorchOps())
    assert list(folder.iterdir()) == []


def test_a_model_that_cannot_be_loaded_leaves_no_segment(
    tiny_dir: Path, tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    with pytest.raises(StartupError, match="cannot be loaded"):
        build_parts(config(cache__num_blocks="7"), tmp_path, TorchOps())
    assert list(folder.iterdir()) == []


# ------------------------------------------------------------------ on a GPU


def gpu_parts(folder: Path, cuda: FakeCuda, transport: str) -> Parts:
    """What is built for the second GPU of those visible."""
    asked: list[int] = []

    def open_gpu(index: int) -> FakeCuda:
        asked.append(index)
        return cuda

    wanted = config(engine__device="cuda:1", worker__transport=transport, cache__num_blocks="7")
    parts = build_parts(wanted, folder, TorchOps(), open_gpu, lambda: lambda function: function)
    assert asked == [1]
    return parts


@pytest.mark.parametrize(
    ("transport", "kind"), [("auto", CudaIpcBackend), ("cuda_ipc", CudaIpcBackend), ("tcp", TcpBackend)]
)
def test_a_pool_on_a_gpu(tiny_dir: Path, folder: Path, transport: str, kind: type) -> None:
    machine = Machine()
    cuda = machine.process()
    parts = gpu_parts(tiny_dir, cuda, transport)
    assert type(parts.backend) is kind
    assert type(direct_backend(parts)) is CudaIpcBackend
    assert parts.cuda is cuda
    assert isinstance(parts.pool.blocks, DeviceBlocks)
    size = parts.layout.block_bytes
    assert (parts.pool.blocks.num_blocks, parts.pool.blocks.block_bytes) == (7, size)
    assert not parts.pool.tensor.any()
    parts.pool.tensor[3] = 1.0
    assert cuda.view(parts.pool.blocks.at(3), size).any()
    assert not cuda.view(parts.pool.blocks.at(4), size).any()
    assert [parts.pool.mark_written() for _ in range(5)] == [0, 1, 2, 3, 0]
    assert parts.limits.step_ahead
    parts.backend.close()
    machine.check()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("why", ["slice", "export"])
def test_where_a_pool_cannot_be_exported_tcp_is_used_and_that_is_said(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    machine = Machine()
    machine.refuse_export = "invalid argument" if why == "export" else None
    cuda = machine.process(no_ipc="it is a MIG slice" if why == "slice" else None)
    parts = gpu_parts(tiny_dir, cuda, "auto")
    assert type(parts.backend) is TcpBackend
    assert isinstance(parts.pool.blocks, DeviceBlocks)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert ("MIG slice" if why == "slice" else "refuses to export") in record.getMessage()
    assert record.getMessage().endswith("using tcp instead")
    parts.backend.close()
    machine.check()


def test_a_forced_export_that_cannot_be_had_fails(tiny_dir: Path) -> None:
    machine = Machine()
    with pytest.raises(StartupError, match=r"worker\.transport is cuda_ipc: no CUDA IPC on .*MIG slice"):
        gpu_parts(tiny_dir, machine.process(no_ipc="it is a MIG slice"), "cuda_ipc")
    machine.check()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_too_little_gpu_memory(tiny_dir: Path, transport: str) -> None:
    machine = Machine(gpu_bytes=1000)
    with pytest.raises(StartupError, match=r"needs \d+ MiB of GPU memory and .* has 0 of 0 MiB free"):
        gpu_parts(tiny_dir, machine.process(), transport)
    machine.check()


def test_a_gpu_that_fails_is_a_reason_not_to_start(tiny_dir: Path) -> None:
    machine = Machine()
    cuda = machine.process()
    cuda.fail["event_create"] = "cudaErrorUnknown"
    with pytest.raises(StartupError, match="no pool in GPU memory: event_create: cudaErrorUnknown"):
        gpu_parts(tiny_dir, cuda, "tcp")
    machine.check()


@pytest.mark.skipif(bool(missing()), reason=missing() or "")
def test_a_gpu_gets_tritons_kernels() -> None:
    ops = choose_ops(config(engine__device="cuda:1", engine__deterministic="true"), 1)
    assert (ops.name, ops.deterministic) == ("triton", True)


def test_without_triton_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagerelay.kernels.triton.missing", lambda: "Triton is not installed")
    with pytest.raises(StartupError, match=r"engine\.device is cuda: Triton is not installed"):
        choose_ops(config(engine__device="cuda"), 1)


def sized_by_memory(folder: Path, cuda: FakeCuda, **flags: str) -> Parts:
    wanted = config(engine__device="cuda", engine__max_batch_tokens="16", engine__max_num_seqs="3", **flags)
    return build_parts(wanted, folder, TorchOps(), lambda _: cuda, lambda: lambda function: function)


def test_the_pool_gets_what_weights_and_a_step_leave(tiny_dir: Path) -> None:
    machine = Machine(gpu_bytes=2 << 30)
    cuda = machine.process()
    cuda.torch_bytes = 100 << 20
    eager = sized_by_memory(
        tiny_dir, cuda, engine__gpu_memory_utilization="0.45", engine__enforce_eager="true"
    )
    size = eager.layout.block_bytes
    left = int(0.45 * (2 << 30)) - (100 << 20) - CONTEXT_BYTES
    assert eager.pool.num_blocks == left // size
    assert eager.limits.max_batch_tokens == 16
    # A second worker's share is there as well, whatever the first one has taken.
    other = machine.process()
    other.torch_bytes = 90 << 20
    second = sized_by_memory(
        tiny_dir, other, engine__gpu_memory_utilization="0.45", engine__enforce_eager="true"
    )
    assert second.pool.num_blocks > eager.pool.num_blocks
    for parts in (eager, second):
        parts.backend.close()
    machine.check()


def peak(work: Callable[[], None]) -> int:
    """Bytes that torch has held at most, beside what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(nbytes for _, nbytes in sorted(changes)))


class Wide:
    """A model that is nothing but its logits, of a vocabulary that outweighs all else."""

    ops = FakeOps()

    def run(self, batch: Batch, _: torch.Tensor) -> torch.Tensor:
        return torch.randn(batch.num_logits, 20_000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("limits", [(40, 1), (60, 8), (16, 20), (300, 30)])
def test_no_step_takes_more_than_the_one_that_was_tried(limits: tuple[int, int]) -> None:
    """Whatever is wanted of it: scored prompts, log-probabilities of each token, beams."""
    tokens, sequences = limits
    runner: Any = Wide()
    facts = replace(FACTS, vocab_size=20_000)
    layout = facts.layout(4)
    tried = peak(lambda: run_largest_step(runner, layout, torch.device("cpu"), sequences, tokens))
    engine = decode_engine(512, runner=runner, facts=facts, max_batch_tokens=tokens, max_num_seqs=sequences)
    wanted = [
        greedy(3, prompt_logprobs=20, logprobs=20),
        greedy(9, logprobs=20, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, top_k=50, min_p=0.1, logprobs=20),
        greedy(9, beam_width=3) if sequences > 2 else greedy(9),
        greedy(2, prompt_logprobs=20),
    ]
    for number in range(2 * sequences + 4):
        prompt = [3 + (number + at) % 200 for at in range(1 + 12 * (number % 4))]
        job = decode_job(f"r{number}", prompt, wanted[number % len(wanted)], order=number)
        engine.submit("router", job, 0.0)
    drained: list[object] = []
    took = peak(lambda: drained.append(run_dry(engine)))
    assert_idle(engine)
    assert took <= tried
    assert took > tried / 4, "a step that asked for much was there"
    scored = min(MAX_SCORED_ROWS, tokens - sequences)
    assert tried > (4 * (sequences + scored) + 8 * scored) * facts.vocab_size


def test_a_share_that_cannot_be_had_is_explained(tiny_dir: Path) -> None:
    machine = Machine(gpu_bytes=2 << 30)
    cuda, other = machine.process(), machine.process()
    cuda.torch_bytes = 1 << 30
    with pytest.raises(StartupError, match=r"0\.5, 1024 MiB of Fake GPU's 2048, and weights and a step take"):
        sized_by_memory(tiny_dir, cuda, engine__gpu_memory_utilization="0.5")
    cuda.torch_bytes = 0
    taken = other.malloc(3 << 29)
    with pytest.raises(StartupError, match=r"MiB for the KV pool, and Fake GPU has 512 MiB free: another"):
        sized_by_memory(tiny_dir, cuda, engine__gpu_memory_utilization="0.9")
    other.free(taken)
    machine.check()


@pytest.mark.parametrize(
    ("wanted", "own", "got"),
    [
        ("auto", "float16", "float16"),
        ("auto", "float32", "bfloat16"),
        ("auto", None, "bfloat16"),
        ("float32", "bfloat16", "float32"),
    ],
)
def test_dtype(tiny_dir: Path, tmp_path: Path, wanted: str, own: str | None, got: str) -> None:
    settings = json.loads((tiny_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"dtype": own}))
    (tmp_path / "model.safetensors").write_bytes((tiny_dir / "model.safetensors").read_bytes())
    facts = read_facts(tmp_path, None, dtype=wanted)
    assert facts.dtype == facts.layout(16).dtype == got
    assert facts.layout(16).block_bytes == 2 * 2 * 2 * 16 * 16 * (4 if got == "float32" else 2)


def test_a_host_pool_is_read_by_shared_memory(tiny_dir: Path) -> None:
    parts = build_parts(config(worker__transport="tcp", cache__num_blocks="7"), tiny_dir, TorchOps())
    direct: TransferBackend = direct_backend(parts)
    assert type(direct) is ShmBackend
    assert parts.pool.mark_written() is None
    assert not parts.limits.step_ahead
    direct.close()
    parts.backend.close()
