"""Tensors between guard pages: a kernel that touches one element too many faults instead of passing."""

import ctypes
import mmap
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

PAGE = mmap.PAGESIZE
Side = Literal["before", "after"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(tensor: Tensor, side: Side) -> Tensor:
    """A copy of `tensor` with its strides, whose memory touches a page that nobody may read or write.

    With "after" its last element is the last one before such a page, with "before" its first element is the
    first one behind one; the other end is at most a page from one. What no kernel takes comes back as it is:
    empty tensors, those of other devices, and the fp64 and bool ones of references and assertions.
    """
    if not tensor.numel() or tensor.device.type != "cpu" or tensor.dtype in (torch.float64, torch.bool):
        return tensor
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    used = span * tensor.element_size()
    inner = -(-used // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + PAGE + inner):
        if _libc.mprotect(guard, PAGE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE if side == "before" else PAGE + inner - used
    # The tensor keeps `memory` alive; the last reference to it unmaps everything, guards included.
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=span, offset=offset)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


class GuardPages(TorchDispatchMode):
    """While active, what this thread makes with torch (also inside an op under test) lies between guards.

    Every operator whose result has storage of its own is caught: factories, copies, arithmetic. Views stay
    views, so a slice's neighbours are those of the tensor that it was cut from.
    """

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        fresh = all(returned.alias_info is None for returned in func._schema.returns)
        if not fresh and func is not torch.ops.aten.lift_fresh.default:  # the end of torch.tensor(...)
            return result
        return tree_map_only(Tensor, partial(guarded, side=self.side), result)
