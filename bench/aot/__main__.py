"""Compiles the kernels' variants for sm_80 and sm_90 without a GPU, and judges their machine code.

``python -m pagerelay.bench.aot [--only WORDS]`` prints one JSON object a line, one per variant and
architecture, in the order in which they are done. Its exit code tells whether the run went through; the
failed gates stand in the lines. ``python -m pagerelay.bench kernels`` makes a report of it.

The gates: no spills; registers and shared memory that let the kernel run on both architectures; 16-byte
loads of keys and values; the matrix instruction meant; and for decode rows room for two tiles of keys and
values in shared memory, so that one is on its way while the other is used.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagerelay.bench.aot.cubin import MAX_SHARED_BYTES, Code, read
from pagerelay.bench.aot.variants import Variant, variants
from pagerelay.kernels.triton.launch import INTERPRETED

ARCHITECTURES = (90, 80)
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compile_variant(variant: Variant, arch: int) -> Code:
    """Raises what Triton raises where it cannot compile."""
    kernel = variant.kernel
    names = list(kernel.arg_names)
    constants = {name: value for name, value in variant.constants.items() if name not in OPTIONS}
    signature = {name: "constexpr" if name in constants else variant.types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        # Without this the compiler may not assume what every launch gives it, and loads narrowly.
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {name: variant.constants[name] for name in OPTIONS if name in variant.constants}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return read(compiled.asm["cubin"], compiled.metadata.shared, compiled.metadata.num_warps)


def failed_gates(variant: Variant, code: Code, arch: int) -> list[str]:
    """In words; empty where the code is as it should be."""
    wanted = variant.gates
    failed = []
    if code.stack_bytes or code.local_accesses:
        failed.append(f"spills: {code.stack_bytes} bytes of stack, {code.local_accesses} local accesses")
    if code.registers > wanted.registers:
        failed.append(f"{code.registers} registers, at most {wanted.registers}")
    if code.shared_bytes > min(wanted.shared_bytes, MAX_SHARED_BYTES[arch]):
        failed.append(f"{code.shared_bytes} bytes of shared memory, at most {wanted.shared_bytes}")
    if code.shared_bytes < wanted.buffer_bytes:
        failed.append(
            f"{code.shared_bytes} bytes of shared memory, at least {wanted.buffer_bytes} are buffers"
        )
    for kind in wanted.instructions:
        if not any(code.instructions.get(name) for name in kind.split("|")):
            failed.append(f"no {kind.replace('|', ' or ')}")
    return failed


def judge(only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """One finding per variant and architecture; `only` keeps names that contain one of the words."""
    for arch in ARCHITECTURES:
        for variant in variants(arch):
            if only and not any(word in variant.name for word in only):
                continue
            began = time.perf_counter()
            code = compile_variant(variant, arch)
            yield {
                "variant": variant.name,
                "arch": f"sm_{arch}",
                "registers": code.registers,
                "stack_bytes": code.stack_bytes,
                "local_accesses": code.local_accesses,
                "shared_bytes": code.shared_bytes,
                "warps": code.warps,
                "occupancy": round(code.occupancy(arch), 3),
                "instructions": code.instructions,
                "seconds": round(time.perf_counter() - began, 2),
                "failed": failed_gates(variant, code, arch),
            }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagerelay.bench.aot", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="variants whose name has one of a,b,c")
    words = [word for word in parser.parse_args(argv).only.split(",") if word]
    if INTERPRETED:
        print("TRITON_INTERPRET is set: nothing would be compiled", file=sys.stderr)
        return 2
    print(json.dumps({"triton": triton.__version__}), flush=True)
    for finding in judge(words):
        print(json.dumps(finding), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
