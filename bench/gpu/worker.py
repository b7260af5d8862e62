"""A prefill, decode or colocated worker with random weights: ``python -m pagerelay.bench.gpu.worker``.

The worker is the one that serves; only its weights come from nowhere.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from pagerelay.bench.gpu.models import random_model
from pagerelay.common.config import load_config
from pagerelay.common.service.build import build_parts, set_threads
from pagerelay.decode_svc.worker import DecodeWorker
from pagerelay.kernels.torch_ops import TorchOps
from pagerelay.kernels.triton.ops import TritonOps
from pagerelay.prefill_svc.worker import PrefillWorker


def main(argv: list[str]) -> int:
    """ROLE FOLDER, then settings as SECTION.FIELD=VALUE."""
    role, folder, *settings = argv
    config = load_config(None, dict(setting.split("=", 1) for setting in settings), {})
    set_threads(config)
    on_gpu = config.engine.device != "cpu"
    ops: Any = TritonOps(config.engine.deterministic) if on_gpu else TorchOps()
    parts = build_parts(config, Path(folder), ops, load=random_model)
    if role == "prefill":
        worker: Any = PrefillWorker(config, None, parts)
    else:
        worker = DecodeWorker(config, None, parts, colocated=role == "colocated")
    code: int = asyncio.run(worker.run(lambda _: None, lambda: False))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
