"""Pages of packed weights go back, their contents never change, memory that is no file's is left alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from pagerelay.common.model.mapped import MappedWeights, _mapped_spans
from pagerelay.common.model.replace import PackedEmbedding, PackedLinear, use_ops
from pagerelay.kernels.torch_ops import TorchOps

MIB = 1 << 20


def resident_mib(file: Path) -> float:
    """Of this process's mappings of the file."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        head = line.split()
        if "-" in head[0]:
            inside = line.endswith(str(file))
        elif inside and head[0] == "Rss:":
            found += int(head[1])
    return found / 1024


def mapped_file(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    file = folder / "model.safetensors"
    one, two = torch.arange(MIB, dtype=torch.float32), torch.rand(2 * MIB)
    save_file({"one": one, "two": two.clone()}, file)
    with safe_open(file, framework="pt") as opened:
        return file, {name: opened.get_tensor(name) for name in ("one", "two")}


def test_pages_of_a_mapped_weight_go_back_and_come_again(tmp_path: Path) -> None:
    file, weights = mapped_file(tmp_path)
    link = tmp_path / "as-a-hub-has-it"
    link.symlink_to(file)
    before = {name: weight.clone() for name, weight in weights.items()}
    assert resident_mib(file) > 11.9
    assert MappedWeights([link]).release(weights["two"])
    assert not MappedWeights([]).release(weights["two"])
    assert 3.9 < resident_mib(file) < 4.3
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_memory_that_is_no_files_is_left_alone(tmp_path: Path) -> None:
    file, weights = mapped_file(tmp_path)
    own = torch.ones(MIB)
    mapped = MappedWeights([file])
    assert not mapped.release(own)
    assert not mapped.release(torch.empty(0))
    assert not mapped.release(weights["two"].view(2, MIB).t())  # its elements are not one span
    assert bool((own == 1).all())


def test_spans_of_a_maps_file() -> None:
    maps = """\
7f00-8f00 rw-p 00000000 fe:00 2149914                    /a folder/model-00001-of-00002.safetensors
9f00-af00 r--p 00000000 fe:00 5326749                    /a/_safetensors_rust.abi3.so
bf00-cf00 rw-p 00000000 00:00 0
df00-ef00 rw-p 00000000 fe:00 2149915                    /a/model.safetensors (deleted)
"""
    assert _mapped_spans(maps, {2149914, 2149915}) == [(0x7F00, 0x8F00), (0xDF00, 0xEF00)]


class KeepsWeights(TorchOps):
    """Packs by copying, as the C kernels do; notes the order."""

    name = "copying"

    def __init__(self) -> None:
        self.packed: list[int] = []

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        self.packed.append(weight.numel())
        return weight.clone()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.small, self.middle = nn.Linear(8, 8, bias=False), nn.Linear(8, 32)
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight


def test_large_weights_are_packed_first_and_tied_ones_once() -> None:
    ops, model = KeepsWeights(), Tied()
    x, ids = torch.rand(3, 8), torch.tensor([[1, 63]])
    want = model.head(x), model.middle(x), model.embed(ids)
    use_ops(model.requires_grad_(False), ops)
    assert ops.packed == [512, 256, 64]
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.embed, PackedEmbedding)
    for found, wanted in zip((model.head(x), model.middle(x), model.embed(ids)), want, strict=True):
        torch.testing.assert_close(found, wanted)
