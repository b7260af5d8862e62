"""The operations as Triton kernels, for CUDA tensors and, under TRITON_INTERPRET=1, for CPU tensors.

* `attend`, `attend_plan`: paged attention of decode and prefill rows, and the tiles it uses by shape.
* `rows`: norm, rotary embedding, gate, and KV writes, alone or fused with the rotary embedding.
* `blocks`: gathers, scatters and copies many KV blocks in one launch.
* `sampling`: chooses tokens as the CPU sampler does, without a host synchronisation.
* `ops`: `TritonOps`, the set of operations a model uses, over the kernels above.

This package and `attend_plan` import without Triton; the other modules do not. Ask `missing()` first.
"""

import importlib.util

__all__ = ["attend", "attend_plan", "blocks", "missing", "ops", "rows", "sampling"]


def missing() -> str | None:
    """Why the modules of this package cannot be imported here, with the remedy; None where they can."""
    try:
        found = importlib.util.find_spec("triton") is not None
    except ModuleNotFoundError:  # from a finder that hides it
        found = False
    return None if found else "Triton is not installed: pip install 'pagerelay[cuda]'"
