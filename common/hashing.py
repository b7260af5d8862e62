"""Keys of the prefix cache and digests of models. Keyed 256-bit BLAKE2b; nothing here can be predicted by a
client."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path


class PrefixHasher:
    """Chained digests of full blocks: a block's key covers its tokens, its whole past and the model's
    identity.

    The salt is random per process, so keys of one worker mean nothing to another and none can be guessed.
    """

    def __init__(self, model_digest: str, block_size: int) -> None:
        self._salt = os.urandom(32)
        self._root = self._digest(b"root", model_digest.encode())
        self._block_size = block_size

    def _digest(self, parent: bytes, payload: bytes) -> bytes:
        return hashlib.blake2b(parent + payload, key=self._salt, digest_size=32).digest()

    def extend(self, keys: list[bytes], token_ids: Sequence[int], num_tokens: int) -> None:
        """Appends to ``keys`` until it has one key for each full block of ``token_ids[:num_tokens]``."""
        size = self._block_size
        while (len(keys) + 1) * size <= num_tokens:
            start = len(keys) * size
            block = array("q", token_ids[start : start + size]).tobytes()
            keys.append(self._digest(keys[-1] if keys else self._root, block))


def model_digest(folder: Path) -> str:
    """Identity of a model folder: its config and the name, size and edges of each weight file (not every byte
    of it).

    Two workers that load different weights must not pair. Hashing gigabytes at every start would cost more
    than it protects: safetensors headers carry every tensor's name, shape and offset, and the last MiB
    carries weights.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in ["config.json", "generation_config.json"]:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()
