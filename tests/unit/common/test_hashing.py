"""Prefix keys cover a block's tokens and its whole past; a model's digest covers what it computes with."""

from __future__ import annotations

from pathlib import Path

from pagerelay.common.hashing import PrefixHasher, model_digest

TOKENS = list(range(100, 120))


def keys(hasher: PrefixHasher, tokens: list[int], num_tokens: int | None = None) -> list[bytes]:
    made: list[bytes] = []
    hasher.extend(made, tokens, len(tokens) if num_tokens is None else num_tokens)
    return made


def test_one_key_for_each_full_block() -> None:
    hasher = PrefixHasher("model", 4)
    assert [len(keys(hasher, TOKENS, count)) for count in (0, 3, 4, 7, 8, 20)] == [0, 0, 1, 1, 2, 5]
    assert {len(key) for key in keys(hasher, TOKENS)} == {32}


def test_a_chain_made_in_pieces_is_the_same_chain() -> None:
    hasher = PrefixHasher("model", 4)
    made: list[bytes] = []
    for count in (3, 4, 11, 20):
        hasher.extend(made, TOKENS, count)
    assert made == keys(hasher, TOKENS)


def test_keys_agree_as_far_as_the_tokens_do() -> None:
    hasher = PrefixHasher("model", 4)
    other = [*TOKENS[:9], 7, *TOKENS[10:]]
    mine, theirs = keys(hasher, TOKENS), keys(hasher, other)
    assert mine[:2] == theirs[:2]
    # The block after the change has the same tokens, but another past.
    assert not set(mine[2:]) & set(theirs[2:])


def test_the_same_block_at_another_place_has_another_key() -> None:
    hasher = PrefixHasher("model", 4)
    first, second = keys(hasher, [1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_neighbouring_numbers_cannot_be_shifted_into_one_another() -> None:
    hasher = PrefixHasher("model", 2)
    assert keys(hasher, [1, 256]) != keys(hasher, [256, 1])
    assert keys(hasher, [0x0101, 0]) != keys(hasher, [1, 0x0100])


def test_two_processes_cannot_guess_each_others_keys() -> None:
    assert keys(PrefixHasher("model", 4), TOKENS) != keys(PrefixHasher("model", 4), TOKENS)


def test_a_models_digest_changes_with_its_config_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    first = model_digest(tmp_path)
    assert model_digest(tmp_path) == first
    assert len(first) == 32

    (tmp_path / "a.safetensors").write_bytes(b"weightz")
    second = model_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"rope": 1}')
    third = model_digest(tmp_path)
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    fourth = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("no part of the model")
    assert model_digest(tmp_path) == fourth
    assert len({first, second, third, fourth}) == 4
