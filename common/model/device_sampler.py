"""Choosing tokens on the model's device, by the rule of :mod:`pagerelay.common.model.sampler`.

The uniform numbers are drawn on the host, by the same key, before the step is done; all rows' wishes go over
in one copy, and their tokens come back in one, which is the step's only wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagerelay.common.model.feed import Feed, current
from pagerelay.common.model.logits import edit, unsound
from pagerelay.common.model.ops import PagedOps, SamplingOps
from pagerelay.common.model.sampler import BAD, SampleRequest, sample, uniform

Sampler = Callable[[torch.Tensor, Sequence[SampleRequest]], list[int]]


def sampler_for(ops: PagedOps) -> Sampler:
    """The operations' own, where they have one, else the one on the CPU."""
    return DeviceSampler(ops) if isinstance(ops, SamplingOps) else sample


@dataclass(frozen=True, slots=True)
class Chosen:
    """Token ids ``[rows]`` on the device, where the next step may begin with them, and what the host is told:
    the same, or ``BAD``; that is there once ``copied`` has passed."""

    ids: torch.Tensor
    host: torch.Tensor
    copied: Any = None

    @classmethod
    def of(cls, ids: torch.Tensor, bad: torch.Tensor) -> Chosen:
        told = ids.masked_fill(bad, BAD)
        if ids.device.type != "cuda":
            return cls(ids, told)
        host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        host.copy_(told, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(ids, host, copied)

    def read(self) -> list[int]:
        """Waits for the device until they are chosen, and for nothing that was queued after that."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.host.tolist()
        return tokens


class DeviceSampler:
    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops
        self._feed: Feed | None = None

    def __call__(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int]:
        """As ``sampler.sample``: one token id or ``BAD`` per row of ``logits`` ``[len(requests), vocab]``,
        which it may write to."""
        return self.queue(logits, requests).read()

    @torch.inference_mode()
    def queue(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> Chosen:
        """The same, without waiting for the device."""
        if not requests:
            return Chosen(*[torch.empty(0, dtype=torch.int64)] * 2)
        if self._feed is None or self._feed.device != logits.device:
            self._feed = Feed(logits.device)
        params = [request.params for request in requests]
        numbers = [
            uniform(p.seed, p.choice, request.position) if p.temperature > 0.0 else 0.0
            for p, request in zip(params, requests, strict=True)
        ]
        with current(logits.device):
            bad = unsound(logits)
            edit(logits, requests, self._feed.send)
            wishes = self._feed.send(
                [
                    np.asarray([p.temperature for p in params], dtype=np.float64),
                    # Larger than any vocabulary means none, and has to fit.
                    np.asarray([min(p.top_k, 2**31 - 1) for p in params], dtype=np.int32),
                    np.asarray([p.top_p for p in params], dtype=np.float64),
                    np.asarray([p.min_p for p in params], dtype=np.float64),
                    np.asarray(numbers, dtype=np.float64),
                ]
            )
            return Chosen.of(self._ops.choose(logits, *wishes), bad)
