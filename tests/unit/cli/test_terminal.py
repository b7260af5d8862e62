"""``pagerelay chat`` and ``pagerelay complete`` as processes: pipes, a terminal, Ctrl-C, exit codes."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_router import FakeRouter, events, piece, refusal

COMMAND = [sys.executable, "-m", "pagerelay.cli"]


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()
    yield fake
    fake.hold = False
    fake.close()


def said(*texts: str) -> bytes:
    return events(*({"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts))


def run(
    router: FakeRouter, *arguments: str, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments, "--url", router.url],
        input=stdin,
        env=os.environ | environment,
        capture_output=True,
        timeout=60,
        check=False,
    )


# ---------------------------------------------------------------- pipes


def test_complete_reads_a_pipe_and_passes_its_flags_on(router: FakeRouter) -> None:
    router.answers = [events(piece("日"), piece("本", "stop"))]
    flags = ("--max-tokens", "5", "--temperature", "0", "--seed", "7")
    done = run(router, "complete", *flags, stdin="Grüße\n".encode(), PAGERELAY_API_KEY="some-key")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "日本\n", b"")
    fields = {"prompt": "Grüße", "max_tokens": 5, "temperature": 0.0, "seed": 7, "stream": True}
    assert router.seen == [{"path": "/generate", **fields}]
    assert router.keys == ["Bearer some-key"]


def test_a_chat_in_a_pipe_is_one_message(router: FakeRouter) -> None:
    router.answers = [said("Hel", "lo")]
    done = run(router, "chat", "--system", "Be brief.", stdin=b"two\nlines\n")
    assert (done.returncode, done.stdout) == (0, b"Hello\n")
    assert router.seen[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two\nlines"},
    ]


def test_errors_are_one_line_and_an_exit_code(router: FakeRouter) -> None:
    router.answers = [refusal(400, "invalid_value", message="temperature must be at least 0")]
    done = run(router, "complete", "hi")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"pagerelay: the server says: temperature must be at least 0\n"
    router.answers = [refusal(401, "invalid_api_key", message="a key is needed")]
    assert run(router, "complete", "hi").stderr.endswith(b"a key is needed; set PAGERELAY_API_KEY\n")
    done = run(router, "complete", stdin=b"\xff")
    assert (done.returncode, done.stderr) == (2, b"pagerelay: stdin is not UTF-8 text\n")
    router.answers = [events(piece("a"), done=False)]
    done = run(router, "complete", "hi")
    assert done.returncode == 3
    assert b"without [DONE]" in done.stderr


def test_no_server_is_exit_code_3() -> None:
    for command in ("chat", "complete"):
        done = subprocess.run(
            [*COMMAND, command, "--url", "http://127.0.0.1:9"],
            input=b"hi",
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (3, b"")
        assert done.stderr == (
            b"pagerelay: no server answers at http://127.0.0.1:9: Connection refused; "
            b"start a cluster with `pagerelay up`, or give its address with --url\n"
        )


def test_a_reader_that_leaves_ends_the_command_quietly(router: FakeRouter) -> None:
    router.answers, router.hold = [events(*[piece("word ")] * 2000, done=False)], True
    process = subprocess.Popen(
        [*COMMAND, "complete", "hi", "--url", router.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(4) == b"word"
    process.stdout.close()
    assert process.wait(30) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


# ---------------------------------------------------------------- a terminal


# A session's first terminal is the one that it opens, and Ctrl-C comes from there.
ON_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for standard in range(3):
    os.dup2(terminal, standard)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.fd, inside = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_TERMINAL, os.ttyname(inside), *COMMAND, *arguments],
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
        )
        self._inside = inside  # held, so that the terminal stays readable to the end
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, text: str, seconds: float = 30.0) -> None:
        """Reads until ``text`` is shown; what was shown before it is forgotten."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self.fd], [], [], 0.1)
            if ready:
                self.shown += os.read(self.fd, 4096).decode(errors="replace")
            assert time.monotonic() < deadline, self.shown
        self.shown = self.shown.partition(text)[2]

    def interrupt_the_prompt(self) -> None:
        """Ctrl-C once the process sleeps: one between readline's prompt and its wait is seen late."""
        stat = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        deadline = time.monotonic() + 30
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.type("\x03")

    def end(self) -> int:
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self._inside)


@pytest.fixture
def terminal(router: FakeRouter) -> Iterator[Any]:
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(*arguments, "--url", router.url))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_conversation_is_remembered_until_reset(router: FakeRouter, terminal: Any) -> None:
    router.answers = [said("one"), said("two"), said("three")]
    chat = terminal("chat", "--system", "S")
    chat.until("> ")
    chat.type("first\n")
    chat.until("one\r\n> ")
    chat.type("second\n")
    chat.until("two\r\n> ")
    chat.type("/reset\n")
    chat.until("> ")
    chat.type("third\n")
    chat.until("three\r\n> ")
    chat.type("\x04")
    assert chat.end() == 0
    contents = [[turn["content"] for turn in seen["messages"]] for seen in router.seen]
    assert contents == [["S", "first"], ["S", "first", "one", "second"], ["S", "third"]]


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(router: FakeRouter, terminal: Any) -> None:
    begun = {"choices": [{"index": 0, "delta": {"content": "well"}}]}
    router.answers, router.hold = [events(begun, done=False), said("fine")], True
    chat = terminal("chat")
    chat.until("> ")
    chat.type("first\n")
    chat.until("well")
    chat.type("\x03")
    chat.until("> ")
    router.hold = False
    chat.type("second\n")
    chat.until("fine\r\n> ")
    assert [turn["content"] for turn in router.seen[1]["messages"]] == ["first", "well", "second"]
    assert router.left == 1
    chat.interrupt_the_prompt()
    chat.until("> ")
    chat.interrupt_the_prompt()
    assert chat.end() == 130


def test_a_refused_message_does_not_end_the_conversation(router: FakeRouter, terminal: Any) -> None:
    router.answers = [refusal(400, "context_length_exceeded", message="too long"), said("fine")]
    chat = terminal("chat")
    chat.until("> ")
    chat.type("first\n")
    chat.until("the server says: too long\r\n")
    chat.type("second\n")
    chat.until("fine\r\n> ")
    assert [turn["content"] for turn in router.seen[1]["messages"]] == ["second"]
    chat.type("/quit\n")
    assert chat.end() == 0


def test_an_answer_cannot_command_the_terminal(router: FakeRouter, terminal: Any) -> None:
    router.answers = [events(piece("a\x1b[31mb\u009b1mc\td🦜"))]
    shown = terminal("complete", "hi")
    shown.until("a\ufffd[31mb\ufffd1mc\td🦜\r\n")
    assert shown.end() == 0


def test_ctrl_c_ends_a_completion(router: FakeRouter, terminal: Any) -> None:
    router.answers, router.hold = [events(piece("well"), done=False)], True
    shown = terminal("complete", "hi")
    shown.until("well")
    shown.type("\x03")
    assert shown.end() == 130
