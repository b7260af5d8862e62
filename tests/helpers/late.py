"""A device that is late: what a step queues on it is done when somebody waits for it, and not before.

So an engine that looks at a token, or gives a block to somebody else, too early gets wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import VOCAB, FakeOps, FakeRunner
from fake_cuda import FakeCuda

from pagerelay.common.model.batch import Batch, fill_late
from pagerelay.common.model.device_sampler import Chosen
from pagerelay.common.model.logits import unsound
from pagerelay.common.model.sampler import BAD


class LateDevice:
    """``log``: what was launched (``step``, with its number of rows) and waited for (``read``), in order."""

    def __init__(self, eager: bool = False) -> None:
        self.eager = eager
        """Does what is queued at once, and says nothing else than a late one."""
        self.log: list[str] = []
        self.logits = torch.empty(0)
        """Of the step that was queued last: what is asked of them now, they cannot say yet."""
        self._ops: list[Callable[[], Any]] = []
        self._done = 0

    def queue(self, op: Callable[[], Any]) -> None:
        self._ops.append(op)
        if self.eager:
            self.wait(len(self._ops))

    @torch.inference_mode()
    def wait(self, upto: int) -> None:
        while self._done < upto:
            self._ops[self._done]()
            self._done += 1

    def chosen(self, ids: torch.Tensor, _: torch.Tensor) -> Chosen:
        host, logits = torch.full_like(ids, -7), self.logits
        self.queue(lambda: host.copy_(ids.masked_fill(unsound(logits), BAD)))
        return Chosen(ids, host, _Event(self, self.num_queued))

    @property
    def num_queued(self) -> int:
        return len(self._ops)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
        """From now on tokens are copied from late devices, this one or others."""
        monkeypatch.setattr(Chosen, "of", lambda ids, bad: ids.late.chosen(ids, bad))
        return self


class LateStream(LateDevice):
    """The late device that a fake GPU's compute stream is."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._stream = cuda.streams[cuda.compute]

    def queue(self, op: Callable[[], Any]) -> None:
        self._cuda.launch(torch.inference_mode()(op))

    @property
    def num_queued(self) -> int:
        return len(self._stream.ops)

    def wait(self, upto: int) -> None:
        with self._cuda.machine.lock:
            assert self._cuda.machine.finish(self._stream, upto)


class _Event:
    def __init__(self, device: LateDevice, upto: int) -> None:
        self._device, self._upto = device, upto

    def synchronize(self) -> None:
        self._device.log.append("read")
        self._device.wait(self._upto)


class LateOps(FakeOps):
    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def choose(self, logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ids = torch.full((len(logits),), -8, dtype=torch.int64)
        self._device.queue(lambda: ids.copy_(logits.argmax(-1)))
        ids.late = self._device  # type: ignore[attr-defined]
        return ids


class LateRunner(FakeRunner):
    """The fake model on a late device; always greedy."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device
        self.ops = LateOps(device)
        self.failures = 0
        """Launches that raise from now on."""

    def run(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        during, self.during = self.during, None
        if during is not None:
            during()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("broken")
        self.device.log.append(f"step {batch.token_ids.numel()}")
        logits = torch.zeros(batch.num_logits, VOCAB)
        compute = super().run

        def late() -> None:
            fill_late(batch.token_ids, batch.late_ids)
            assert (batch.token_ids >= 0).all(), "a token that nobody has chosen yet"
            logits.copy_(compute(batch, pool))

        self.device.queue(late)
        self.device.logits = logits
        return logits
