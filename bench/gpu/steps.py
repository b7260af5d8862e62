"""Whole steps of an 8B model with random weights, as a worker runs them: prefill, decode with and without
graphs, and the host's time for a step, of a model alone and of an engine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from pagerelay.bench.gpu.bench import Bench, copy_gb_s, matmul_tflop_s
from pagerelay.bench.gpu.models import make_folder, random_model
from pagerelay.bench.gpu.stepping import PlainMemory, steps_of_an_engine
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.batch import Batch, Row, build_batch
from pagerelay.common.model.feed import Feed
from pagerelay.common.model.graphs import CudaCapture
from pagerelay.common.model.runner import ModelRunner, read_facts
from pagerelay.kernels.triton.ops import TritonOps

BLOCK_SIZE = 16


def model_steps(bench: Bench) -> None:
    copy = copy_gb_s(bench, bench.sized(4 << 30, 1 << 20))
    dtype = bench.sized(torch.bfloat16, torch.float32)
    ceiling = matmul_tflop_s(bench, bench.sized(8192, 64), dtype)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch), bench.dry)
        facts = read_facts(folder, None, dtype=bench.sized("bfloat16", "float32"))
        began = time.perf_counter()
        runner = ModelRunner(
            folder, TritonOps(), dtype=facts.dtype, feed=Feed(bench.device), load=random_model
        )
        bench.wait()
        bench.figure("load, random weights", time.perf_counter() - began, "s")
    weights = sum(p.nbytes for p in _packed(runner)) or 1
    batches = bench.sized([(1, 1024), (1, 4096), (16, 1024), (16, 4096), (64, 1024), (64, 4096)], [(2, 20)])
    num_blocks = max(batch * (context // BLOCK_SIZE + 1) for batch, context in batches)
    layout = facts.layout(BLOCK_SIZE)
    memory = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8, device=bench.device)
    pool = KvPool(PlainMemory(memory), layout).tensor
    for rows, before in bench.sized(((4096, 0), (2048, 0), (512, 8192)), ((9, 0),)):
        bench.go_on()
        step = build_batch([_row(rows, before, 0)], BLOCK_SIZE, 1)
        spent = bench.milliseconds(lambda step=step: runner.run(step, pool), 5)  # type: ignore[misc]
        flops = 2 * rows * weights / dtype.itemsize
        flops += 4 * facts.num_layers * 4096 * rows * (before + rows / 2) if not bench.dry else 0
        reached = flops / spent / 1e9
        note = f"{reached:.0f} TFLOP/s, {reached / ceiling:.0%} of matmul"
        bench.figure(f"prefill {rows} after {before}", spent, "ms", note)
    eager: dict[tuple[int, int], torch.Tensor] = {}
    for recorded in (False, True):
        bench.go_on()
        if recorded:
            began = time.perf_counter()
            capture = (lambda function: function) if bench.dry else CudaCapture()
            sizes = sorted({batch for batch, _ in batches})
            longest = max(context for _, context in batches) + BLOCK_SIZE
            runner.record_decode_steps(pool, sizes, longest, capture)
            bench.figure("record graphs", time.perf_counter() - began, "s", f"of {len(sizes)} sizes")
        for batch, context in batches:
            bench.go_on()
            _decode(bench, runner, pool, batch, context, recorded, copy, weights, eager, layout.block_bytes)
    bench.go_on()
    steps_of_an_engine(bench, runner, facts, KvPool(PlainMemory(memory), layout))


def _packed(runner: ModelRunner) -> list[torch.Tensor]:
    """Weights that a step reads: all but the embedding table."""
    found: dict[int, torch.Tensor] = {}
    todo: list[object] = [m for m in runner.model.modules()]
    for module in todo:
        for value in vars(module).values():
            _collect(value, found)
    return [tensor for tensor in found.values() if tensor.dim() == 2]


def _collect(value: object, found: dict[int, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[value.data_ptr()] = value
    elif isinstance(value, tuple | list):
        for part in value:
            _collect(part, found)
    elif hasattr(value, "__slots__") and hasattr(value, "attention_norm"):
        for name in ("qkv", "out", "gate_up", "down"):
            _collect(getattr(value, name), found)


def _row(rows: int, before: int, first_block: int) -> Row:
    blocks = range(first_block, first_block + -(-(before + rows) // BLOCK_SIZE))
    return Row([(7 * i) % 250 + 3 for i in range(rows)], before, list(blocks), True)


def _decode(
    bench: Bench,
    runner: ModelRunner,
    pool: torch.Tensor,
    batch: int,
    context: int,
    recorded: bool,
    copy: float,
    weights: int,
    eager: dict[tuple[int, int], torch.Tensor],
    block_bytes: int,
) -> None:
    step: Batch = build_batch(
        [_row(1, context - 1, s * (context // BLOCK_SIZE + 1)) for s in range(batch)], BLOCK_SIZE, 1
    )
    name = f"decode {batch} x {context}, {'graph' if recorded else 'eager'}"
    spent = bench.milliseconds(lambda: runner.run(step, pool), 10)
    floor = (weights + batch * context * block_bytes / BLOCK_SIZE) / (copy * 1e6)
    host = bench.host_us(lambda: runner.run(step, pool), 20)
    bench.figure(name, spent, "ms", f"{floor / spent:.0%} of the floor {floor:.2f} ms, host {host:.0f} us")
    logits = runner.run(step, pool).clone()
    if not recorded:
        eager[batch, context] = logits
    else:
        same = (logits - eager[batch, context]).abs().max() / eager[batch, context].abs().max()
        bench.check(f"{name} computes what eager does", float(same) <= 1e-2, f"error {float(same):.1e}")
