"""Weights that lie in a mapped file: giving their pages back as soon as they have been packed.

safetensors maps a whole file and hands out views of it. Reading a weight makes its pages part of this process
until the mapping ends, so a loader that packs weights one by one would hold all of them twice at the end.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")


class MappedWeights:
    """The mappings of some files in this process, as they are when this is made."""

    def __init__(self, files: Iterable[Path]) -> None:
        inodes = {file.stat().st_ino for file in files}
        self._spans = sorted(_mapped_spans(_MAPS.read_text(encoding="utf-8", errors="replace"), inodes))
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def release(self, weight: Tensor) -> bool:
        """Drops the pages that lie wholly inside ``weight``; true if it lay in a mapped file.

        Nothing is lost: a page that is read again comes from the file again. Memory that is not a file's is
        left alone, as dropping it would clear it.
        """
        start = weight.data_ptr()
        end = start + weight.numel() * weight.element_size()
        at = bisect_right(self._spans, (start, 2**64)) - 1
        if at < 0 or end > self._spans[at][1] or not weight.is_contiguous():
            return False
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        return first >= last or self._madvise(first, last - first, mmap.MADV_DONTNEED) == 0


def _mapped_spans(maps: str, inodes: set[int]) -> list[tuple[int, int]]:
    """[start, end) of each mapping of one of those files, from the text of ``/proc/PID/maps``.

    By inode: a hub's cache links to files with other names.
    """
    spans = []
    for line in maps.splitlines():
        where, _, _, _, inode, *_ = line.split(maxsplit=5)
        if int(inode) in inodes:
            start, _, end = where.partition("-")
            spans.append((int(start, 16), int(end, 16)))
    return spans
