"""Makes the fp32 GGUF of the default model: ``python -m pagerelay.bench.peers.f32_gguf [FILE.gguf]``.

Every engine must compute with the same weights to be compared. pagerelay dequantises the published Q4_1 file
once, at conversion; llama.cpp would compute with the four-bit weights themselves. This writes the dequantised
weights back as a GGUF, with every other key of the original, and then reads the new file and compares each
tensor with pagerelay's own model folder, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pagerelay.common.config import DEFAULT_MODEL, cache_dir
from pagerelay.common.errors import StartupError
from pagerelay.common.model.fetch import default_gguf, resolve_model
from pagerelay.common.model.gguf import hub_weights

FILE_TYPE, ALL_F32 = "general.file_type", 0


def default_path() -> Path:
    """Where the file is made and looked for: in ``$PAGERELAY_CACHE``, beside the models."""
    return cache_dir() / "peers" / f"{DEFAULT_MODEL}-f32.gguf"


@contextmanager
def _as_llama(gguf_file: Path) -> Iterator[None]:
    """What goes wrong in reading a file that is not what it should be becomes a ``StartupError``."""
    try:
        yield
    except (KeyError, IndexError, ValueError) as error:  # of GGUFReader, and of keys and tensors by name
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise StartupError(
            f"{gguf_file.name}: not the GGUF of a llama ({reason}); give the published file of "
            f"{DEFAULT_MODEL}, or no file"
        ) from error


def write_f32(source: Path, target: Path) -> int:
    """Writes ``target``; returns the number of tensors. ``StartupError`` where ``source`` is no model's GGUF.

    Keys are copied as they are but for ``general.file_type``, which becomes F32. Rows of q and k keep
    llama.cpp's order.
    """
    import numpy as np
    from gguf import GGUFReader, GGUFWriter, dequantize

    with _as_llama(source):
        reader = GGUFReader(source)
        writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":  # the writer's own
            continue
        kind, *inner = field.types
        value = ALL_F32 if name == FILE_TYPE else field.contents()
        writer.add_key_value(name, value, kind, inner[0] if inner else None)
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        writer.add_tensor(tensor.name, values)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return len(reader.tensors)


def check_same_weights(gguf_file: Path, folder: Path) -> int:
    """Number of tensors, all equal bit for bit to those of the model folder; ``StartupError`` otherwise."""
    import numpy as np
    from safetensors import safe_open

    with _as_llama(gguf_file):
        ours = hub_weights(gguf_file)
    with safe_open(folder / "model.safetensors", framework="np") as theirs:
        if set(theirs.keys()) != set(ours):
            raise StartupError(f"{gguf_file.name}: its tensors are not those of {folder.name}")
        for name, values in ours.items():
            if not np.array_equal(values.view(np.uint32), theirs.get_tensor(name).view(np.uint32)):
                raise StartupError(f"{gguf_file.name}: {name} differs from the one in {folder.name}")
    return len(ours)


def make_f32(source: Path | None, target: Path, folder: Path, say: Callable[[str], None]) -> tuple[int, int]:
    """Makes ``target`` of ``source`` (None: the published file), checked against the model ``folder``, or
    leaves everything as it was. Returns the numbers of tensors (written, equal to the folder's)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        source = source or default_gguf(Path(work), say)
        made = Path(work) / "made" / source.name  # errors in checking it name the source
        made.parent.mkdir()
        written = write_f32(source, made)
        same = check_same_weights(made, folder)
        os.replace(made, target)
    return written, same


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pagerelay.bench.peers.f32_gguf", description=__doc__)
    parser.add_argument(
        "gguf",
        nargs="?",
        type=Path,
        help="the model's published GGUF; default: the one of the pinned package",
    )
    parser.add_argument("--out", type=Path, help="default: $PAGERELAY_CACHE/peers")
    args = parser.parse_args(argv)
    target = args.out or default_path()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        folder = resolve_model(DEFAULT_MODEL, progress=say)
        count, same = make_f32(args.gguf, target, folder, say)
    except (StartupError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{target.name}: {count} tensors in fp32; {same} equal to those of {folder.name}, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
