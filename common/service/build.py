"""From configuration to a loaded model, a KV pool and a transport: what every worker does first."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagerelay.common.config import Config
from pagerelay.common.engine.core import EngineLimits, check_fits
from pagerelay.common.errors import CudaError, StartupError
from pagerelay.common.kv.memory import DeviceMemory
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.ops import PagedOps
from pagerelay.common.model.runner import ModelFacts, ModelRunner, read_facts
from pagerelay.common.transport.base import Bytes, DirectBackend, TransferBackend
from pagerelay.common.transport.cuda_ipc import CudaIpcBackend
from pagerelay.common.transport.cuda_runtime import CudaRuntime
from pagerelay.common.transport.cupy_runtime import open_runtime
from pagerelay.common.transport.shm import ShmBackend
from pagerelay.common.transport.tcp import TcpBackend
from pagerelay.common.wire.messages import Layout

log = logging.getLogger(__name__)


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
    config: Config, folder: Path, ops: PagedOps, cuda: Callable[[int], CudaRuntime] = open_runtime
) -> Parts:
    """Allocates the pool before the weights are read, so that what cannot work fails within a second.

    ``cuda`` opens the runtime of a GPU by its number, where ``engine.device`` names one.
    """
    facts = read_facts(folder, config.model.max_model_len, config.engine.cpu_weights)
    if (reason := ops.unsupported(facts.head_dim)) is not None:
        raise StartupError(f"model {folder}: {reason}; start the workers with --cpu-ops torch")
    layout = facts.layout(config.cache.block_size)
    num_blocks = config.cache.num_blocks or (config.cache.kv_memory_mib << 20) // layout.block_bytes
    check_fits(num_blocks, layout.block_size)
    runtime = cuda(_gpu_index(config.engine.device)) if config.engine.device != "cpu" else None
    backend, memory = _allocate(config, num_blocks, layout, runtime)
    try:
        runner = ModelRunner(folder, ops)
    except BaseException:
        backend.close()
        raise
    limits = EngineLimits(
        block_size=layout.block_size,
        max_num_seqs=config.engine.max_num_seqs,
        max_batch_tokens=config.engine.max_batch_tokens,
        prefix_cache=config.cache.prefix_cache,
    )
    return Parts(facts, layout, runner, KvPool(memory, layout), backend, limits, runtime)


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
