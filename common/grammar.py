"""Structured output: which tokens a grammar lets come next.

What a grammar allows is a function of its text and the output so far. So no worker hands its state to another
one: whoever samples the next token, after a hand-over, a preemption or a recovery, reads the output again.

llguidance does the parsing. It recurses as deep as a grammar nests, hence the stack of the thread that
compiles; and what it compiles must have passed the router's check, which a hostile text cannot outlive
(``router/grammar_check.py``).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pagerelay.common.errors import GrammarError
from pagerelay.common.wire.sampling import Grammar

NUM_KEPT = 64
"""Compiled grammars that are kept for the next request."""
STACK_BYTES = 512 << 20
"""Address space; what is not reached is never touched."""
LARGE_VOCAB = 100_000
"""From this size on the vocabulary is read at once: that holds the interpreter for 7 µs a token."""

_LIMITS = LLParserLimits(step_max_items=10_000, max_lexer_states=50_000, verbose_errors=False)
# A model that cannot stop indenting is stopped.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


class Grammars:
    """Compiles grammars for one model. Any thread may ask."""

    def __init__(self, folder: Path | None, vocab_size: int, eos: Iterable[int]) -> None:
        """``folder`` has the model's ``tokenizer.json``. Masks have a bit for each of ``vocab_size`` tokens;
        ``eos`` may come where a text may end."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos = [token for token in eos if token < vocab_size]
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        if folder is not None and vocab_size >= LARGE_VOCAB:
            _ = self._tokenizer

    def prepare(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begins to compile, unless it is known."""
        with self._lock:
            made = self._kept.get(grammar)
            if made is None:
                before = threading.stack_size(STACK_BYTES)
                try:
                    made = self._compiler.submit(self._compile, grammar)
                except RuntimeError as error:  # no room for the thread's stack
                    made = Future()
                    made.set_exception(GrammarError(f"it cannot be compiled here: {error}"))
                    return made
                finally:
                    threading.stack_size(before)
                self._kept[grammar] = made
                if len(self._kept) > NUM_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return made

    def matcher(self, grammar: Grammar, compiled: Future[LLMatcher] | None = None) -> Matcher:
        """For a fresh output. Waits until it is compiled, unless it is that. Raises :class:`GrammarError`."""
        made = (compiled or self.prepare(grammar)).result()
        return Matcher(made.deep_copy(), -(-self._vocab_size // 32) * 4)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        made = LLMatcher(self._tokenizer, _library_text(grammar), log_level=0, limits=_LIMITS)
        if made.is_error():
            raise GrammarError(made.get_error())
        Matcher(made.deep_copy(), 0).masks([])  # what is too much for the library shows here
        return made

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if self._folder is None or not self._eos:
            raise GrammarError("this model names no end token, so a structured answer could not end")
        try:
            definition = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            return LLTokenizer(definition, n_vocab=self._vocab_size, eos_token=self._eos)
        except (OSError, ValueError) as error:
            raise GrammarError("structured output does not work with this model's tokenizer") from error


class Matcher:
    """One output's place in its grammar."""

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._num_read = 0

    def masks(self, output: Sequence[int], draft: Sequence[int] = ()) -> list[bytes]:
        """What may come after ``output`` and after each token of ``draft``, up to the first that may not
        come: a bit a token, the lowest of a byte first, in full 32-bit words. ``output`` continues that of
        the last call. Raises :class:`GrammarError`."""
        if not self._matcher.consume_tokens(list(output[self._num_read :])):
            raise GrammarError(self._matcher.get_error())
        self._num_read = len(output)
        masks = [self._mask(self._matcher)]
        ahead = self._matcher.deep_copy() if draft else self._matcher
        for token in draft:
            if not allows(masks[-1], token) or not ahead.consume_token(token):
                break
            masks.append(self._mask(ahead))
        return masks

    def _mask(self, matcher: LLMatcher) -> bytes:
        """Where all is said, only end tokens."""
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return mask[: self._mask_bytes]  # the library's may have a word too many


def allows(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _library_text(grammar: Grammar) -> str:
    try:
        match grammar.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(
                    grammar.text, defaults={"whitespace_pattern": WHITESPACE}
                )
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "choice":
                choices = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
                return LLMatcher.grammar_from_lark(f"start: {choices}")
            case "lark":
                return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except Exception as error:  # the converter of GBNF raises nothing narrower
        raise GrammarError(str(error)) from error
