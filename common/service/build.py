"""From configuration to a loaded model, a KV pool and a transport: what every worker does first."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagerelay.common.config import DEFAULT_GPU_MEMORY_UTILIZATION, Config
from pagerelay.common.engine.drafting import Speculation
from pagerelay.common.engine.parts import EngineLimits
from pagerelay.common.errors import CudaError, StartupError
from pagerelay.common.kv.memory import DeviceMemory
from pagerelay.common.kv.pool import KvPool, check_fits
from pagerelay.common.model.feed import Feed
from pagerelay.common.model.graphs import Capture, CudaCapture, graph_sizes
from pagerelay.common.model.ops import PagedOps
from pagerelay.common.model.runner import Load, ModelFacts, ModelRunner, load_model, read_facts
from pagerelay.common.service.gpu_memory import pool_bytes, run_largest_step
from pagerelay.common.transport.base import Bytes, DirectBackend, TransferBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.cuda_runtime import CudaRuntime
from pagerelay.common.transport.cupy_runtime import open_runtime
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.messages import Layout

log = logging.getLogger(__name__)

MakeCapture = Callable[[], Capture]
CPU_KV_MEMORY_MIB = 768
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 256, 2048


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    facts: ModelFacts
    layout: Layout
    runner: ModelRunner
    pool: KvPool
    backend: TransferBackend
    limits: EngineLimits
    cuda: CudaRuntime | None = None
    """Of the GPU that the pool lies on; ``None``: it lies in the host's memory."""


def set_threads(config: Config) -> int:
    """CPU threads of this worker's model; a worker started alone takes half the cores, at least one."""
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // 2)
    torch.set_num_threads(threads)
    return threads


def build_parts(
    config: Config,
    folder: Path,
    ops: PagedOps,
    cuda: Callable[[int], CudaRuntime] = open_runtime,
    capture: MakeCapture = CudaCapture,
    load: Load = load_model,
) -> Parts:
    """On CPU the pool is allocated before the weights are read, so that what cannot work fails within a
    second; on a GPU it gets what they leave.

    ``cuda`` opens the runtime of a GPU by its number, where ``engine.device`` names one; ``capture`` makes
    what records graphs there; ``load`` the model.
    """
    if config.engine.device != "cpu":
        return _build_on_gpu(config, folder, ops, cuda(_gpu_index(config.engine.device)), capture, load)
    facts = read_facts(folder, config.model.max_model_len, config.engine.cpu_weights)
    if (reason := ops.unsupported(facts.head_dim)) is not None:
        raise StartupError(f"model {folder}: {reason}; start the workers with --cpu-ops torch")
    layout = facts.layout(config.cache.block_size)
    memory_mib = config.cache.kv_memory_mib or CPU_KV_MEMORY_MIB
    num_blocks = config.cache.num_blocks or (memory_mib << 20) // layout.block_bytes
    check_fits(num_blocks, layout.block_size)
    backend, memory = _allocate(config, num_blocks, layout, None)
    try:
        runner = ModelRunner(folder, ops, load=load)
    except BaseException:
        backend.close()
        raise
    limits = _limits(config, CPU_BATCH_TOKENS)
    return Parts(facts, layout, runner, KvPool(memory, layout), backend, limits)


def _build_on_gpu(
    config: Config, folder: Path, ops: PagedOps, cuda: CudaRuntime, capture: MakeCapture, load: Load
) -> Parts:
    settings = config.engine
    facts = read_facts(folder, config.model.max_model_len, dtype=settings.dtype)
    if (reason := ops.unsupported(facts.head_dim)) is not None:
        raise StartupError(f"model {folder}: {reason}")
    layout = facts.layout(config.cache.block_size)
    limits = replace(_limits(config, GPU_BATCH_TOKENS), step_ahead=settings.step_ahead)
    runner = ModelRunner(folder, ops, dtype=facts.dtype, feed=Feed(cuda.torch_device), load=load)
    sizes = [] if settings.enforce_eager else graph_sizes(limits.max_num_seqs)
    num_blocks = config.cache.num_blocks
    if num_blocks is None:
        if config.cache.kv_memory_mib is not None:
            num_bytes = config.cache.kv_memory_mib << 20
        else:
            largest = limits.max_num_seqs, limits.max_batch_tokens
            run_largest_step(runner, layout, cuda.torch_device, *largest)
            utilization = settings.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
            num_bytes = pool_bytes(cuda, utilization, max(sizes, default=0), facts.vocab_size)
        num_blocks = num_bytes // layout.block_bytes
    check_fits(num_blocks, layout.block_size)
    backend, memory = _allocate(config, num_blocks, layout, cuda)
    try:
        pool = KvPool(memory, layout)
        if sizes:
            longest = min(facts.max_model_len, num_blocks * layout.block_size)
            runner.record_decode_steps(pool.tensor, sizes, longest, capture())
    except BaseException:
        backend.close()
        raise
    log.info(
        "%d blocks of %d tokens in %s on %s", num_blocks, layout.block_size, facts.dtype, cuda.device.name
    )
    return Parts(facts, layout, runner, pool, backend, limits, cuda)


def _limits(config: Config, batch_tokens: int) -> EngineLimits:
    settings = config.engine
    speculation = Speculation(
        settings.num_speculative_tokens, settings.prompt_lookup_min, settings.prompt_lookup_max
    )
    return EngineLimits(
        block_size=config.cache.block_size,
        max_num_seqs=config.engine.max_num_seqs,
        max_batch_tokens=config.engine.max_batch_tokens or batch_tokens,
        prefix_cache=config.cache.prefix_cache,
        speculation=speculation if settings.speculative == "ngram" else None,
    )


def _gpu_index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def direct_backend(parts: Parts) -> DirectBackend:
    """What reads a peer's memory itself, of the kind that this worker's own pool lies in."""
    if isinstance(parts.backend, DirectBackend):
        return parts.backend
    return ShmBackend() if parts.cuda is None else CudaIpcBackend(parts.cuda)


def _allocate(
    config: Config, num_blocks: int, layout: Layout, cuda: CudaRuntime | None
) -> tuple[TransferBackend, Bytes | DeviceMemory]:
    """Memory that others on this host can read where it can be had, unless told otherwise; what is chosen
    instead is said once."""
    wanted = config.worker.transport
    if wanted != "tcp":
        direct: DirectBackend = ShmBackend() if cuda is None else CudaIpcBackend(cuda)
        try:
            return direct, direct.allocate(num_blocks, layout.block_bytes)
        except (StartupError, CudaError) as error:
            direct.close()
            if wanted == direct.name:
                raise StartupError(f"worker.transport is {wanted}: {error}") from error
            log.warning("%s; using tcp instead", error)
    backend = TcpBackend(config.worker.tcp_window_blocks, cuda)
    try:
        return backend, backend.allocate(num_blocks, layout.block_bytes)
    except CudaError as error:
        backend.close()
        raise StartupError(f"no pool in GPU memory: {error}") from error
