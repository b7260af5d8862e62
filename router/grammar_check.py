"""Can a grammar be used? Tried out by a child process, before anything is dispatched.

Compiling may take minutes, gigabytes or a stack without end: which text does is not to be seen in it. So the
child has limits that the system enforces, and dies of them; workers only compile what it has survived. It
ends with its standard input, so it never outlives the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Final

import msgspec

from pagerelay.common.errors import GrammarError, InvalidRequest, Unavailable
from pagerelay.common.grammar import Grammars
from pagerelay.common.wire.sampling import Grammar

MAX_CPU_S: Final = 1.0
"""To compile it and to find what it starts with."""
MAX_MEMORY_BYTES: Final = 4 << 30
MAX_WAIT_S: Final = 10.0
"""For an answer: the child may have to be started, and to wait for a processor."""
NUM_KNOWN: Final = 1024
BY_A_GRAMMAR: Final = {-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
"""Ways for the child to end that its limits bring about."""


class GrammarChecker:
    """Started when it is first asked, and again after it has died."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._arguments = (str(folder), str(vocab_size))
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._known: OrderedDict[Grammar, str] = OrderedDict()
        """What was found of the last ones: why they cannot be used, or nothing."""

    async def check(self, grammar: Grammar | None, param: str) -> None:
        """Raises :class:`InvalidRequest` where it cannot be used."""
        if grammar is None:
            return
        if grammar not in self._known:
            async with self._turn:
                reason = await self._ask(grammar)
            self._known[grammar] = reason
            if len(self._known) > NUM_KNOWN:
                self._known.popitem(last=False)
        else:
            reason = self._known[grammar]
        if reason:
            raise InvalidRequest(f"{param} cannot be used: {reason}", param=param, code="invalid_grammar")

    async def _ask(self, grammar: Grammar) -> str:
        if self._child is not None and self._child.returncode is not None:
            await self.close()  # it has died since the last question
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        child = self._child
        assert child.stdin is not None  # noqa: S101 - both are pipes
        assert child.stdout is not None  # noqa: S101
        try:
            with contextlib.suppress(ConnectionError):
                child.stdin.write(msgspec.json.encode(grammar) + b"\n")
                await child.stdin.drain()
            async with asyncio.timeout(MAX_WAIT_S):
                answer = await child.stdout.readline()
        except TimeoutError:
            await self.close()
            raise _no_check() from None
        except BaseException:
            await self.close()  # its answer would be taken for the next one's
            raise
        if not answer.endswith(b"\n"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await child.wait()  # what it died of tells whose fault it was
            await self.close()
            if child.returncode not in BY_A_GRAMMAR:
                raise _no_check()
            return f"compiling it takes more than {MAX_CPU_S:g} s, or too much memory"
        return msgspec.json.decode(answer, type=str)

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _no_check() -> Unavailable:
    return Unavailable("grammars cannot be checked right now", code="grammar_check", retry_after_s=1)


def main(folder: str, vocab_size: str) -> None:
    """Answers each grammar on standard input (JSON, a line each) with a line: why not, or nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router's business
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammars = Grammars(Path(folder), int(vocab_size), [0])
    with contextlib.suppress(GrammarError):
        grammars.matcher(Grammar(kind="regex", text="a"))  # reads the vocabulary, which does not count
    for line in sys.stdin.buffer:
        grammar = msgspec.json.decode(line, type=Grammar)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # ends the process
        try:
            grammars.matcher(grammar)
            reason = ""
        except GrammarError as error:
            reason = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(reason) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
