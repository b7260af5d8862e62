from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagerelay.router.detokenizer import PATIENCE, ByteDetokenizer, Detokenizer, token_bytes
from pagerelay.router.text import Tokenizer

WORDS = "ok 🦜🦜🦜 日本語 العربية 👩‍👩‍👧 🦜 end"
STRANGE = "\N{REPLACEMENT CHARACTER}"


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture
def words(make_folder, byte_backend: Backend) -> tuple[Tokenizer, Backend]:
    backend = Backend.from_str(byte_backend.to_str())
    backend.add_tokens([AddedToken("日本", special=False), AddedToken("é", special=False)])
    return Tokenizer.load(make_folder(backend)), backend


def test_whole_characters_only(tokenizer: Tokenizer) -> None:
    ids = [at for char in WORDS for at in tokenizer.encode(char)]
    assert len(ids) > len(WORDS)
    got = pieces(tokenizer.detokenizer(), ids)
    assert "".join(got) == WORDS
    assert STRANGE not in "".join(got)
    assert sum(map(bool, got)) > 5


def test_equals_one_shot_decode_of_any_ids(words: tuple[Tokenizer, Backend]) -> None:
    tokenizer, backend = words
    rng = random.Random(7)
    for skip in (True, False):
        for _ in range(1500):
            ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(14))]
            got = "".join(pieces(tokenizer.detokenizer(skip), ids))
            assert got == backend.decode(ids, skip_special_tokens=skip), ids


@given(st.binary(max_size=40), st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_any_bytes_in_any_cutting(data: bytes, sizes: list[int]) -> None:
    table, at = [], 0
    for size in sizes:
        table.append(data[at : at + size])
        at += size
    got = pieces(ByteDetokenizer(table), list(range(len(table))))
    assert "".join(got) == data.decode("utf-8", "replace")


def test_lone_continuation_bytes_come_at_once(tokenizer: Tokenizer) -> None:
    token_id = next(at for at in range(tokenizer.vocab_size) if tokenizer._token_bytes[at] == b"\x80")
    got = pieces(tokenizer.detokenizer(), [token_id] * 200)
    assert got == [STRANGE] * 200 + [""]


def test_a_real_replacement_character_comes_at_once(tokenizer: Tokenizer) -> None:
    got = pieces(tokenizer.detokenizer(), tokenizer.encode(f"a{STRANGE}b"))
    assert "".join(got) == f"a{STRANGE}b"
    assert got[-1] == ""


def test_an_unfinished_character_is_one_mark_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦭")
    assert len(ids) > 1
    assert pieces(tokenizer.detokenizer(), ids[:-1])[-1] == STRANGE


def test_special_tokens_are_skipped_by_default(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi<|im_end|> you")
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == "hi you"
    assert "".join(pieces(tokenizer.detokenizer(skip_special_tokens=False), ids)) == "hi<|im_end|> you"


def test_ids_outside_the_vocabulary_are_nothing(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer.detokenizer(), [-1, tokenizer.vocab_size, 10**9]) == ["", "", "", ""]


def test_linear(tokenizer: Tokenizer) -> None:
    ids = [random.Random(1).randrange(tokenizer.vocab_size) for _ in range(100_000)]
    began = time.thread_time()
    pieces(tokenizer.detokenizer(), ids)
    assert time.thread_time() - began < 2


def test_every_byte_has_a_stand_in() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(token_bytes(char)[0] for char in ByteLevel.alphabet()) == list(range(256))


# ------------------------------------------------------------------------------------- other decoders


@pytest.fixture
def fallback(make_folder, fallback_backend: Backend) -> Tokenizer:
    return Tokenizer.load(make_folder(fallback_backend))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab c é日🦜�"), max_size=24))
def test_byte_fallback_equals_one_shot(fallback: Tokenizer, fallback_backend: Backend, text: str) -> None:
    ids = fallback.encode(text)
    assert "".join(pieces(fallback.detokenizer(), ids)) == fallback_backend.decode(ids)


def test_byte_fallback_keeps_characters_whole(fallback: Tokenizer) -> None:
    got = pieces(fallback.detokenizer(), fallback.encode("a 🦜 b"))
    assert "".join(got) == "a 🦜 b"
    assert "🦜" in got


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab c é"), min_size=1, max_size=24), at=st.integers(1, 24))
def test_an_answer_goes_on_from_its_prompt(
    fallback: Tokenizer, fallback_backend: Backend, text: str, at: int
) -> None:
    ids = fallback.encode(text)
    prompt, answer = ids[:at], ids[at:]
    got = "".join(pieces(fallback.detokenizer(after=prompt), answer))
    assert fallback_backend.decode(prompt) + got == fallback_backend.decode(ids)


def test_the_first_blank_of_an_answer_is_kept(fallback: Tokenizer) -> None:
    blank_a = fallback.encode("b a")[-1]
    assert pieces(fallback.detokenizer(), [blank_a])[0] == "a"
    assert pieces(fallback.detokenizer(after=fallback.encode("b")), [blank_a])[0] == " a"
    # A prompt that ends within a character has no text to go on from.
    byte = fallback.encode("日")[-1]
    assert pieces(fallback.detokenizer(after=[byte]), [blank_a])[0] == "a"


def test_byte_fallback_never_waits_for_ever(fallback: Tokenizer) -> None:
    broken = fallback._encoder.token_to_id("<0x80>")
    got = pieces(fallback.detokenizer(), [broken] * 200)
    assert "".join(got) == STRANGE * 200
    assert all(any(got[at : at + PATIENCE]) for at in range(0, 196, PATIENCE))


def test_word_piece_equals_one_shot(make_folder, word_backend: Backend) -> None:
    tokenizer = Tokenizer.load(make_folder(word_backend))
    rng = random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(3, tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        assert "".join(pieces(tokenizer.detokenizer(), ids)) == word_backend.decode(ids), ids


def test_real_model(smollm_dir: Path) -> None:
    tokenizer = Tokenizer.load(smollm_dir)
    backend = Backend.from_file(str(smollm_dir / "tokenizer.json"))
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(60))]
        assert "".join(pieces(tokenizer.detokenizer(), ids)) == backend.decode(ids)
