"""A process with a pool that another one reads, for ``handover``: ``python -m pagerelay.bench.gpu.owner``.

Prints the pool's address, then answers each line of its input by one of its output: ``fill N`` writes N to
every byte, on a GPU some time after the answer, which names the mark to wait for; anything else ends it.
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import msgspec
import torch

from pagerelay.bench.gpu.pools import fill_by_seed, make_backend, seen

SLEEP_CYCLES = 400_000_000
"""Of the GPU, a fifth of a second or so: a reader that does not wait finds the old bytes."""


def main(argv: list[str]) -> int:
    device, num_blocks, block_bytes = torch.device(argv[0]), int(argv[1]), int(argv[2])
    backend = make_backend(device)
    memory: Any = backend.allocate(num_blocks, block_bytes)
    content = seen(memory)
    fill_by_seed(content)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _say(base64.b64encode(msgspec.msgpack.encode(backend.address())).decode())
    for line in sys.stdin:
        words = line.split()
        if words[:1] != ["fill"]:
            break
        written = None
        if device.type == "cuda":
            torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            content.fill_(int(words[1]))
            written = memory.mark_written()
        else:
            content.fill_(int(words[1]))
        _say("" if written is None else str(written))
    backend.close()
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
