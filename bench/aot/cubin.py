"""What a compiled kernel costs and which instructions it has, read with the tools that Triton ships."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

REGISTERS = 65536
"""Of a multiprocessor, for sm_80 and sm_90 alike; handed out to warps by 256."""
WARPS = 64
PROGRAMS = 32
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
"""Of a multiprocessor; each program takes 1 KiB more than it asks for."""
MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""That one program may have."""


@dataclass(frozen=True, slots=True)
class Code:
    """One kernel for one architecture. Spills show as stack and as local loads and stores."""

    registers: int
    stack_bytes: int
    local_accesses: int
    shared_bytes: int
    warps: int
    instructions: dict[str, int]
    """By opcode with its width, as `LDGSTS.128` or `HMMA`; only the kinds that are judged."""

    def occupancy(self, arch: int) -> float:
        """Share of a multiprocessor's warps that can be resident."""
        by_registers = REGISTERS // (-(-self.registers * 32 // 256) * 256 * self.warps)
        by_shared = SHARED_BYTES[arch] // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, WARPS // self.warps, PROGRAMS) * self.warps / WARPS


def tool() -> Path:
    """The disassembler. FileNotFoundError where this Triton came without it."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not in this installation of Triton {triton.__version__}")
    return path


def read(cubin: bytes, shared_bytes: int, warps: int) -> Code:
    """Disassembles a cubin; shared_bytes and warps are the launch's, which the cubin does not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (_run(option, file.name) for option in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"no resource usage in: {usage.strip()[-300:]}")
    instructions: dict[str, int] = {}
    local = 0
    for opcode in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE):
        kind = opcode.split(".")[0]
        if kind in ("LDL", "STL"):
            local += 1
        elif kind in ("LDG", "STG", "LDGSTS"):
            kind = f"{kind}.128" if ".128" in opcode else kind
        elif kind not in ("HMMA", "HGMMA"):
            continue
        instructions[kind] = instructions.get(kind, 0) + 1
    return Code(int(found[1]), int(found[2]), local, shared_bytes, warps, instructions)


def _run(option: str, path: str) -> str:
    command = [str(tool()), option, path]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout  # noqa: S603
