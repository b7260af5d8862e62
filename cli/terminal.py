"""``pagerelay chat`` and ``pagerelay complete``: a running cluster from the terminal, tokens as they come.

Answers go to stdout, everything else to stderr, so both work in a pipe. Ctrl-C stops the answer; in a chat a
second one, with nothing entered in between, leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

API_KEY_VARIABLE = "PAGERELAY_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
TERMINAL_COMMANDS = {
    "chat": "talk to a running cluster; a pipe's text is one message",
    "complete": "continue a text, from the command line or a pipe",
}
HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves; Ctrl-C stops an answer, twice leaves"

Turns = list[dict[str, str]]


def add_commands(commands: Any) -> None:
    """Puts the two commands beside the others of ``pagerelay``."""
    for name, text in TERMINAL_COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=text, epilog=f"An API key is read from ${API_KEY_VARIABLE}."
        )
        command.add_argument("--url", default=DEFAULT_URL, help=f"of the router (default: {DEFAULT_URL})")
        command.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
        command.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
        command.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
        if name == "chat":
            command.add_argument("--system", metavar="TEXT", help="the system message")
        else:
            command.add_argument("prompt", nargs="?", help="the text; without it stdin is read")


def run_command(arguments: argparse.Namespace) -> int:
    """The exit code: 0 done, 1 the server refused or failed, 2 wrong usage, 3 no server there, 130
    interrupted."""
    # Imported here: the other commands need no HTTP client.
    from pagerelay.client import LLM, ApiError, ConnectionLost, SamplingParams

    params = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed
    )
    try:
        with LLM(base_url=arguments.url, api_key=os.environ.get(API_KEY_VARIABLE) or None) as llm:
            if arguments.command == "complete":
                text = _stdin() if arguments.prompt is None else arguments.prompt
                _show(piece.text for piece in llm.stream(text, params))
                return 0
            chat = Chat(llm, params, arguments.system)
            if sys.stdin.isatty():
                return chat.converse()
            chat.answer(_stdin())
            return 0
    except UnicodeDecodeError:
        return _complain("stdin is not UTF-8 text", 2)
    except ConnectionLost as lost:
        return _complain(f"{lost}; start a cluster with `pagerelay up`, or give its address with --url", 3)
    except ApiError as error:
        return _complain(_told(error), 1)
    except BrokenPipeError:
        # Whoever read has left. Python would complain again when it closes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


class Chat:
    """A conversation: what was said so far, and how the next answer comes."""

    def __init__(self, llm: Any, params: Any, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._first: Turns = [{"role": "system", "content": system}] if system else []
        self._turns: Turns = list(self._first)

    def reset(self) -> None:
        self._turns = list(self._first)

    def answer(self, text: str) -> None:
        """Shows the answer to a message. A stopped one is remembered as far as it came; after an error the
        message is forgotten too."""
        asked = [*self._turns, {"role": "user", "content": text}]
        said: list[str] = []

        def pieces() -> Iterator[str]:
            with contextlib.closing(self._llm.stream_chat(asked, self._params)) as stream:
                for piece in stream:
                    said.append(piece.text)
                    yield piece.text

        try:
            _show(pieces())
        except KeyboardInterrupt:
            self._turns = [*asked, {"role": "assistant", "content": "".join(said)}] if said else self._turns
            raise
        self._turns = [*asked, {"role": "assistant", "content": "".join(said)}]

    def converse(self) -> int:
        """Reads messages from the terminal until it ends."""
        from pagerelay.client import ApiError, ConnectionLost

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() edits lines with it

        print(f"{self._llm.model} at {self._llm.base_url}\n{HELP}", file=sys.stderr)
        interrupted = False
        while True:
            try:
                line = input("> ").strip()
                if line in ("/quit", "/exit"):
                    return 0
                if line:
                    interrupted = False
                if line == "/reset":
                    self.reset()
                elif line.startswith("/"):
                    print(HELP, file=sys.stderr)
                elif line:
                    self.answer(line)
            except EOFError:
                print(file=sys.stderr)
                return 0
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if interrupted:
                    return 130
                interrupted = True
                print("(Ctrl-C again leaves)", file=sys.stderr)
            except (ApiError, ConnectionLost) as error:
                _complain(_told(error) if isinstance(error, ApiError) else str(error), 1)


def _stdin() -> str:
    """All of stdin; the newline that ends its last line is not part of the text."""
    if sys.stdin.isatty():
        print("reading the text from the terminal; Ctrl-D ends it", file=sys.stderr)
    return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")


def _show(pieces: Iterator[str]) -> None:
    """Writes pieces as they come, and ends the line however they end."""
    terminal = sys.stdout.isatty()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    shown = False
    try:
        for text in pieces:
            sys.stdout.write(_harmless(text) if terminal else text)
            sys.stdout.flush()
            shown = True
    finally:
        if shown:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _harmless(text: str) -> str:
    """Without the control characters by which text could command a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() or c == "\u200d" else "\ufffd" for c in text)


def _told(error: Any) -> str:
    hint = f"; set {API_KEY_VARIABLE}" if error.status == 401 else ""
    return f"the server says: {error}{hint}"


def _complain(text: str, code: int) -> int:
    print(f"pagerelay: {text}", file=sys.stderr)
    return code
