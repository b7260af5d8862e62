"""The bytes of the KV cache: one memory, seen as layers by attention and as blocks by transports."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import make_pool
from fake_cuda import Machine

from pagerelay.common.errors import StartupError
from pagerelay.common.kv.memory import DeviceBlocks
from pagerelay.common.kv.pool import KvPool, check_fits
from pagerelay.common.transport.cuda_pool import CudaPool
from pagerelay.common.wire.messages import Layout


def layout(dtype: str = "float32") -> Layout:
    return Layout(
        protocol=1,
        model_digest="m",
        dtype=dtype,
        block_size=16,
        num_layers=3,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=10,
    )


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_a_block_is_one_contiguous_span_of_every_layer(dtype: str, width: int) -> None:
    block_bytes = 3 * 2 * 2 * 16 * 4 * width
    memory = np.zeros(5 * block_bytes + 7, dtype=np.uint8)  # what is left over is no block
    pool = KvPool(memory, layout(dtype))
    assert pool.num_blocks == 5
    assert pool.tensor.shape == (5, 3, 2, 2, 16, 4)
    assert pool.blocks.shape == (5, block_bytes)
    assert pool.tensor.is_contiguous()
    pool.tensor[2] = 1.5
    assert (pool.blocks[2] != 0).any()
    assert not pool.blocks[[0, 1, 3, 4]].any()
    assert not memory[3 * block_bytes :].any()


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_a_pool_on_a_gpu_has_the_same_blocks(dtype: str, width: int) -> None:
    machine = Machine()
    cuda = machine.process()
    block_bytes = 3 * 2 * 2 * 16 * 4 * width
    memory = CudaPool(cuda, 5, block_bytes)
    pool = KvPool(memory, layout(dtype))
    assert pool.blocks == DeviceBlocks(memory.pointer, 5, block_bytes)
    assert pool.tensor.shape == (5, 3, 2, 2, 16, 4)
    assert not pool.tensor.any()
    pool.tensor[2] = 1.5
    assert cuda.view(pool.blocks.at(2), block_bytes).any()
    assert not cuda.view(pool.blocks.at(3), block_bytes).any()
    pool.tensor.fill_(float("nan"))
    nonce = cuda.view(memory.pointer + memory.num_bytes, 32)
    assert bytes(nonce).decode() == memory.nonce, "the blocks reach to the scratch area and not into it"
    memory.close()
    machine.check()


def test_copying_a_block_copies_its_keys_and_values() -> None:
    one, two = make_pool(4, 16), make_pool(4, 16)
    one.tensor[3] = torch.arange(one.tensor[3].numel(), dtype=torch.float32).view(one.tensor[3].shape)
    two.blocks[1] = one.blocks[3]
    assert torch.equal(two.tensor[1], one.tensor[3])
    assert two.tensor[[0, 2, 3]].isnan().all()


def test_a_pool_too_small_for_anything_is_refused() -> None:
    check_fits(2, 16)
    for num_blocks in (0, 1):
        with pytest.raises(StartupError, match=r"cache\.kv_memory_mib or cache\.num_blocks"):
            check_fits(num_blocks, 16)
