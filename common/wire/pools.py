"""Where a pool's bytes can be read, as a worker tells another within :class:`KvHandle`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class CudaExport(Struct, frozen=True, kw_only=True):
    """What another process needs to map a pool in GPU memory; its layout and dtype stand in ``KvHandle``.

    ``memory``: CUDA IPC handle of an allocation of ``memory_bytes``: the pool from its base on, then the
    nonce. ``events``: handles of those that ``Ready.written`` counts. ``pid_namespace``: its inode.
    """

    memory: bytes
    memory_bytes: int
    events: tuple[bytes, ...]
    device_uuid: str
    pid: int
    pid_namespace: int


class PoolAddress(Struct, frozen=True, kw_only=True):
    """Where a pool's bytes can be read. ``kind`` "shm": a segment name under /dev/shm; "cuda_ipc": memory of
    a GPU (``cuda``); "tcp": the data endpoint alone.

    ``host_id`` is the kernel's boot id and ``nonce`` stands in the segment's header or behind the blocks in
    GPU memory: a reader proves that it has opened the right memory before it trusts a byte of it.
    """

    kind: Literal["shm", "cuda_ipc", "tcp"]
    num_blocks: int
    block_bytes: int
    host_id: str = ""
    segment: str = ""
    nonce: str = ""
    cuda: CudaExport | None = None
