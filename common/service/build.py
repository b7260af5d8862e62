"""From configuration to a loaded model, a KV pool and a transport: what every worker does first."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from pagerelay.common.config import Config
from pagerelay.common.engine.core import EngineLimits, check_fits
from pagerelay.common.errors import StartupError
from pagerelay.common.kv.pool import KvPool
from pagerelay.common.model.ops import PagedOps
from pagerelay.common.model.runner import ModelFacts, ModelRunner, read_facts
from pagerelay.common.transport.base import Bytes, TransferBackend
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


def set_threads(config: Config) -> int:
    """CPU threads of this worker's model; a worker started alone takes half the cores, at least one."""
    threads = config.engine.threads or max(1, (os.cpu_count() or 2) // 2)
    torch.set_num_threads(threads)
    return threads


def build_parts(config: Config, folder: Path, ops: PagedOps) -> Parts:
    """Allocates the pool before the weights are read, so that what cannot work fails within a second."""
    facts = read_facts(folder, config.model.max_model_len, config.engine.cpu_weights)
    layout = facts.layout(config.cache.block_size)
    num_blocks = config.cache.num_blocks or (config.cache.kv_memory_mib << 20) // layout.block_bytes
    check_fits(num_blocks, layout.block_size)
    backend, memory = _allocate(config, num_blocks, layout)
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
    return Parts(facts, layout, runner, KvPool(memory, layout), backend, limits)


def _allocate(config: Config, num_blocks: int, layout: Layout) -> tuple[TransferBackend, Bytes]:
    """Shared memory where it can be had, unless told otherwise; what is chosen instead is said once."""
    if config.worker.transport != "tcp":
        backend: TransferBackend = ShmBackend()
        try:
            return backend, backend.allocate(num_blocks, layout.block_bytes)
        except StartupError as error:
            backend.close()
            if config.worker.transport == "shm":
                raise
            log.warning("%s; using tcp instead", error)
    backend = TcpBackend(config.worker.tcp_window_blocks)
    return backend, backend.allocate(num_blocks, layout.block_bytes)
