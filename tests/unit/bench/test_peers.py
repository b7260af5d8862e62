"""The peers' launchers and the fp32 file; no peer is installed here."""

from __future__ import annotations

import sys
import tomllib
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quantize

from pagerelay.bench.peers import f32_gguf, llamacpp
from pagerelay.bench.peers.f32_gguf import check_same_weights, make_f32, write_f32
from pagerelay.common.errors import StartupError
from pagerelay.common.model.gguf import hub_weights, write_weights

HEADS, KV_HEADS, HIDDEN = 4, 2, 32
Q8, F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """A llama of one layer, quantized, in llama.cpp's row order."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_file_type(7)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_types([1, 3, 1])
    writer.add_rope_freq_base(100000.0)
    shapes = {"token_embd": (3, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (16, HIDDEN)}
    for name, shape in shapes.items():
        values = quantize(rng.standard_normal(shape).astype(np.float32), Q8)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=Q8)
    writer.add_tensor("blk.0.attn_norm.weight", rng.standard_normal(HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def test_the_fp32_file_has_the_same_weights_and_keys(small_gguf: Path, tmp_path: Path) -> None:
    folder, target = tmp_path / "hub", tmp_path / "small-f32.gguf"
    folder.mkdir()
    write_weights(folder, hub_weights(small_gguf))
    assert write_f32(small_gguf, target) == 4
    assert check_same_weights(target, folder) == 4
    before, after = GGUFReader(small_gguf), GGUFReader(target)
    assert {tensor.tensor_type for tensor in after.tensors} == {F32}
    assert [(t.name, t.shape.tolist()) for t in after.tensors] == [
        (t.name, t.shape.tolist()) for t in before.tensors
    ]
    keys = {name: field.contents() for name, field in before.fields.items()}
    assert {name: field.contents() for name, field in after.fields.items()} == keys | {"general.file_type": 0}


def test_other_weights_are_told_apart(small_gguf: Path, tmp_path: Path) -> None:
    weights = hub_weights(small_gguf)
    norm = "model.layers.0.input_layernorm.weight"
    write_weights(tmp_path, weights | {norm: np.nextafter(weights[norm], np.float32(9))})
    with pytest.raises(StartupError, match=r"input_layernorm.weight differs"):
        check_same_weights(small_gguf, tmp_path)
    write_weights(tmp_path, {"strange": np.zeros(1, np.float32)})
    with pytest.raises(StartupError, match="its tensors are not those"):
        check_same_weights(small_gguf, tmp_path)


def test_the_file_appears_whole_and_checked(small_gguf: Path, tmp_path: Path) -> None:
    folder, target = tmp_path / "hub", tmp_path / "made" / "f32.gguf"
    folder.mkdir()
    write_weights(folder, hub_weights(small_gguf))
    assert make_f32(small_gguf, target, folder, print) == (4, 4)
    assert list(target.parent.iterdir()) == [target]
    assert target.read_bytes()[:4] == b"GGUF"


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fails", ["write", "check"])
def test_what_fails_leaves_the_folder_as_it_was(
    fails: str, small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = tmp_path / "hub", tmp_path / "made" / "f32.gguf"
    folder.mkdir()
    target.parent.mkdir()
    target.write_bytes(b"of an earlier run")
    weights = hub_weights(small_gguf)
    if fails == "write":
        monkeypatch.setattr(GGUFWriter, "write_tensors_to_file", _no_room)
    else:
        del weights["model.layers.0.input_layernorm.weight"]
    write_weights(folder, weights)
    with pytest.raises((StartupError, OSError), match=r"No space left|its tensors are not those"):
        make_f32(small_gguf, target, folder, print)
    assert list(target.parent.iterdir()) == [target]
    assert target.read_bytes() == b"of an earlier run"


def _foreign(path: Path, architecture: str, tensor: str) -> Path:
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_tensor(tensor, np.zeros(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_foreign_file_is_refused_by_name(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f32_gguf, "resolve_model", lambda *_, **__: tiny_dir)
    target = tmp_path / "made" / "f32.gguf"
    text = tmp_path / "text.gguf"
    text.write_bytes(b"no GGUF at all, but longer than a header")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    foreign = [
        (_foreign(tmp_path / "gemma.gguf", "gemma3", "output_norm.weight"), "llama.attention.head_count"),
        (_foreign(tmp_path / "part.gguf", "llama", "blk.0.ssm_conv1d.weight"), "ssm_conv1d"),
        (_foreign(tmp_path / "name.gguf", "llama", "v.patch_embd.weight"), "not enough values"),
        (text, "magic"),
        (empty, "empty"),
    ]
    for path, reason in foreign:
        assert f32_gguf.main([str(path), "--out", str(target)]) == 2
        said = capsys.readouterr().err
        assert f"{path.name}: not the GGUF of a llama" in said
        assert reason in said
        assert not list(target.parent.iterdir())


def test_the_pinned_version_is_that_of_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["optional-dependencies"]["peers"] == [llamacpp.PACKAGE]


def test_what_is_missing_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGERELAY_CACHE", str(tmp_path))
    assert llamacpp.main(["--port", "1"]) == 2
    assert "python -m pagerelay.bench.peers.f32_gguf` makes it" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(SystemExit, match=r"needs the package xllamacpp==.*extra `peers`"):
        llamacpp._xllamacpp()


def test_fp32_throughout() -> None:
    class Params(SimpleNamespace):
        def __init__(self) -> None:
            threads = SimpleNamespace
            super().__init__(model=threads(path=""), cpuparams=threads(), cpuparams_batch=threads())

    library = SimpleNamespace(
        CommonParams=Params, ggml_type=SimpleNamespace(GGML_TYPE_F32=0, GGML_TYPE_F16=1)
    )
    args = Namespace(gguf=Path("w.gguf"), model="m", port=81, threads=2, slots=24, ctx=32768, kv="f32")
    chosen = llamacpp.parameters(library, args)
    assert (chosen.cache_type_k, chosen.cache_type_v) == (0, 0)
    assert (chosen.cpuparams.n_threads, chosen.cpuparams_batch.n_threads) == (2, 2)
    assert (chosen.model.path, chosen.n_parallel, chosen.n_ctx) == ("w.gguf", 24, 32768)
    assert chosen.hostnames == ["127.0.0.1"]
