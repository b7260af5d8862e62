"""How large a worker's KV pool on a GPU is: what its share of the memory leaves, after the weights and the
largest step.

The share is a part of the whole device, as vLLM's setting of the same name is, and everything that the worker
takes counts towards it: so two workers with 0.45 each fit on one GPU in whatever order they start. What a
worker takes is what its own torch says, not what the device has less of, since the other one may be starting
at the same moment.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace

from pagerelay.common.engine.scheduler import MAX_SCORED_ROWS
from pagerelay.common.engine.sequence import Sequence
from pagerelay.common.engine.wishes import Wish, answer
from pagerelay.common.errors import StartupError
from pagerelay.common.kv.pool import DTYPES
from pagerelay.common.model.batch import Row, build_batch
from pagerelay.common.model.device_sampler import sampler_for
from pagerelay.common.model.runner import ModelRunner
from pagerelay.common.model.sampler import SampleRequest
from pagerelay.common.states import DECODE, Machine
from pagerelay.common.transport.cuda_runtime import CudaRuntime
from pagerelay.common.wire.messages import Layout
from pagerelay.common.wire.sampling import MAX_LOGPROBS, SamplingParams

CONTEXT_BYTES = 768 << 20
"""Taken beside torch's allocations, by CUDA's context, libraries and kernels: an assumption, on the high
side."""
GRAPH_BYTES = 256 << 20
"""For what lies between a recorded step's kernels, beside its logits."""


def run_largest_step(
    runner: ModelRunner, layout: Layout, device: torch.device, max_num_seqs: int, max_batch_tokens: int
) -> None:
    """Computes a step of as many tokens and sequences as there may be, which want all that can be wanted of
    their logits, on a pool of one block, so that torch has held as much as it ever will. Its results mean
    nothing."""
    pool = torch.zeros(layout.block_bytes, dtype=torch.uint8, device=device).view(DTYPES[layout.dtype])
    pool = pool.view(1, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    # Prompts get a quarter of the budget also where those that decode have used it up: see Scheduler.
    tokens = max(max_batch_tokens, max_num_seqs - 1 + max_batch_tokens // 4)
    sequences = min(max_num_seqs, tokens)
    scored = min(MAX_SCORED_ROWS, tokens - sequences)
    each = (tokens - scored - 1) // max(sequences - 1, 1)
    wishes = [_wish(tokens - (sequences - 1) * each, scored)] + [_wish(each, 0)] * (sequences - 1)
    rows = [
        Row(wish.seq.token_ids, 0, [0] * -(-wish.count // layout.block_size), wish.num_logits)
        for wish in wishes
    ]
    logits = runner.run(build_batch(rows, layout.block_size, runner.ops.min_rows), pool)
    answer(logits, wishes, sampler_for(runner.ops))


def _wish(num_tokens: int, num_scored: int) -> Wish:
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=1, top_p=0.5, min_p=0.1)
    params = replace(params, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    seq = Sequence(
        owner="",
        request_id="",
        attempt=1,
        order=0.0,
        token_ids=[0] * num_tokens,
        sampling=params,
        first_index=0,
        machine=Machine(DECODE, "QUEUED"),
    )
    return Wish(seq, 0, num_tokens, [0] * num_scored, [SampleRequest(params, 0)])


def pool_bytes(cuda: CudaRuntime, utilization: float, graph_rows: int, vocab_size: int) -> int:
    """For the KV pool, after the weights are loaded and the largest step has run.

    graph_rows: of the largest decode step that is recorded, 0 for none. Raises :class:`StartupError` with
    need, have and remedy.
    """
    free, total = cuda.memory_info()
    graphs = GRAPH_BYTES + 2 * 4 * graph_rows * vocab_size if graph_rows else 0
    taken = cuda.torch_peak() + CONTEXT_BYTES + graphs
    share = int(total * utilization)
    if taken >= share:
        raise StartupError(
            f"engine.gpu_memory_utilization is {utilization:g}, {share >> 20} MiB of {cuda.device.name}'s "
            f"{total >> 20}, and weights and a step take {taken >> 20} MiB of it: raise it, or lower "
            "engine.max_batch_tokens or engine.max_num_seqs, or choose a smaller model"
        )
    left = share - taken
    if left + graphs > free:
        raise StartupError(
            f"engine.gpu_memory_utilization is {utilization:g}, which leaves {left >> 20} MiB for the KV "
            f"pool, and {cuda.device.name} has {free >> 20} MiB free: another process uses it; lower the "
            "setting, or set cache.kv_memory_mib"
        )
    return left
