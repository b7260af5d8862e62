"""KV blocks from place to place, many in one launch: staging for a transfer, swap, copy-on-write.

A block is copied as words of four bytes whatever it holds, so every pool dtype takes the same kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagerelay.kernels.triton.launch import copy_constants


@triton.jit(do_not_specialize=["words", "source_stride", "target_stride"])
def copy_blocks_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    words,
    source_stride,
    target_stride,
    PICK: tl.constexpr,
    PLACE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Grid (blocks, cdiv(words, SPAN)). Without PICK (PLACE) the source (target) is dense, in order of the
    grid.

    ALIGNED: blocks are whole 16-byte units, and so are their distances.
    """
    if ALIGNED:  # for 16-byte accesses, which the compiler cannot know to be allowed
        words = words // 4 * 4
        source_stride = source_stride // 4 * 4
        target_stride = target_stride // 4 * 4
    block = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ids_ptr + block).to(tl.int64) if PICK else block
    target = tl.load(target_ids_ptr + block).to(tl.int64) if PLACE else block
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = at < words
    values = tl.load(source_ptr + source * source_stride + at, mask=mask)
    tl.store(target_ptr + target * target_stride + at, values, mask=mask)


def gather_blocks(pool: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = pool[ids[i]] for ids [n] int32 or int64; pool [blocks, ...], out [n, ...], of one dtype.

    Here and below: blocks are contiguous inside, ids are on the device and inside the pool (not checked, as
    that would wait for the device), a block that is read is not written in the same call. ValueError for
    shapes that do not fit.
    """
    _copy(pool, out, ids, None, ids.numel())


def scatter_blocks(source: Tensor, pool: Tensor, ids: Tensor) -> None:
    """pool[ids[i]] = source[i]."""
    _copy(source, pool, None, ids, ids.numel())


def copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """target[target_ids[i]] = source[source_ids[i]]; source and target may be one pool."""
    _copy(source, target, source_ids, target_ids, source_ids.numel())


def _copy(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, count: int
) -> None:
    if source.dtype is not target.dtype or source.shape[1:] != target.shape[1:]:
        raise ValueError(f"blocks {_form(source)} cannot become blocks {_form(target)}")
    if target_ids is not None and target_ids.numel() != count:
        raise ValueError(f"{count} blocks to read and {target_ids.numel()} to write")
    for tensor, its_ids in ((source, source_ids), (target, target_ids)):
        if its_ids is None and tensor.shape[0] != count:
            raise ValueError(f"{count} block ids do not fit {_form(tensor)}")
        if its_ids is not None and its_ids.stride(-1) != 1:
            raise ValueError("block ids must be contiguous")
    if count == 0:
        return
    source, target = _words(source), _words(target)
    words = source[0].numel()
    strides = source.stride(0), target.stride(0)
    aligned = not any(n % 4 for n in (words, *strides)) and not (source.data_ptr() | target.data_ptr()) % 16
    constants = copy_constants(source_ids is not None, target_ids is not None, aligned)
    copy_blocks_kernel[(count, triton.cdiv(words, constants["SPAN"]))](
        source, target, source_ids, target_ids, words, *strides, **constants
    )


def _words(blocks: Tensor) -> Tensor:
    """The same bytes as 32-bit words, blocks still apart as they were."""
    if blocks.dim() < 2 or not blocks[0].is_contiguous():
        raise ValueError(f"not blocks that are contiguous inside: {_form(blocks)} strides {blocks.stride()}")
    if blocks[0].numel() * blocks.element_size() % 4 or blocks.stride(0) * blocks.element_size() % 4:
        raise ValueError(f"blocks must be multiples of 4 bytes: {_form(blocks)} strides {blocks.stride()}")
    flat = torch.as_strided(
        blocks, (blocks.shape[0], blocks[0].numel()), (blocks.stride(0), 1), blocks.storage_offset()
    )
    return flat.view(torch.int32)


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
