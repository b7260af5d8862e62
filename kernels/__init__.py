"""Tensors in, tensors out: the model's inner operations over a paged KV pool.

* `torch_ops`: the operations in plain torch, which are their specification and run anywhere.
* `cpu_ops`: the same in C for x86-64, where a row's bits depend on nothing but the row.
* `triton`: the same as Triton kernels, for GPUs, and what only a GPU needs.
* `cpu_build`: compiles the C sources in `cpu/` on first use.

Imports torch, in `triton` also Triton, and the standard library only, and nothing from the other rooms.
"""

__all__ = ["cpu_build", "cpu_ops", "torch_ops", "triton"]
