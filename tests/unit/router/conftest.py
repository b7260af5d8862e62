"""Small model folders made on the spot: byte-level BPE, BPE with byte fallback, WordPiece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from pagerelay.router.text import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The capital of France is Paris. A language model predicts the next token of a text.",
    "ok 🦜🦜 日本語 العربية 👩‍👩‍👧 end; numbers 123 and 4567, blanks      and tabs\t\tand lines\n\n",
    "user assistant system im_start im_end <| |> def f(x):\n    return x + 1\n",
] * 4

MakeFolder = Callable[..., Path]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def byte_fallback() -> Backend:
    """As Llama 2 has it: blanks are ▁, unknown characters are single-byte tokens."""
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token=tokens[0], byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def word_piece() -> Backend:
    tokens = ["[UNK]", "[CLS]", "[SEP]", "a", "##b", "c", "don", "'", "t", ".", ",", "�"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.WordPiece(vocabulary, unk_token=tokens[0]))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """``make_folder(backend, template=…, **settings)`` → a model folder as far as text goes."""

    def make(backend: Backend, template: str | None = CHATML, name: str = "model", **settings: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}), encoding="utf-8"
        )
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def byte_backend() -> Backend:
    backend = byte_level()
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


@pytest.fixture
def tokenizer(make_folder: MakeFolder, byte_backend: Backend) -> Tokenizer:
    """The byte-level one, in ChatML."""
    return Tokenizer.load(make_folder(byte_backend, bos_token=SPECIALS[1], eos_token=SPECIALS[2]))


@pytest.fixture(scope="session")
def fallback_backend() -> Backend:
    return byte_fallback()


@pytest.fixture(scope="session")
def word_backend() -> Backend:
    return word_piece()
