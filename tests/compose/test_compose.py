"""compose.yaml on a real engine: one command up, tokens over shared memory, scaling under load, nothing left.

    pytest -m compose tests/compose

A Docker engine is used if one answers, else dockerd is started (as root) and stopped again. The base image
is pulled, or made by deploy/local-base.sh where nothing can be pulled. All containers, volumes and ports are
this run's own. Environment:

    PAGERELAY_REQUIRE_COMPOSE=1   no engine is a failure, not a skip
    PAGERELAY_TEST_BASE=IMAGE     base image to build on; default as above
    PAGERELAY_TEST_COMPOSE=CMD    compose command; default `docker compose`, else `docker-compose`
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from strict_sse import StrictStream

ROOT = Path(__file__).resolve().parents[2]
PULLED_BASE = "python:3.11-slim-bookworm"
LOCAL_BASE = "pagerelay-base:local"
IMAGE = "pagerelay:compose-test"

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2400)]


def sh(*command: str, timeout: float, env: dict[str, str] | None = None, check: bool = True) -> str:
    """Output of a command that must end in time; its last lines stand in the failure."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if check and done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-60:])
        pytest.fail(f"{shlex.join(command)}: exit {done.returncode}\n{tail}", pytrace=False)
    return done.stdout


def succeeds(*command: str, timeout: float) -> bool:
    try:
        return subprocess.run(command, timeout=timeout, capture_output=True).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def wait_for(what: str, condition: Callable[[], Any], seconds: float, every: float = 0.25) -> Any:
    """The first true answer of the condition."""
    end = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds:.0f} s: {what}", pytrace=False)
        time.sleep(every)


# ---------------------------------------------------------------------------------------- engine and image


def no_engine(reason: str) -> NoReturn:
    if os.environ.get("PAGERELAY_REQUIRE_COMPOSE"):
        pytest.fail(f"PAGERELAY_REQUIRE_COMPOSE is set, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Docker engine that answers; started here if need be, and then stopped by its pid."""
    if not shutil.which("docker"):
        no_engine("docker is not installed")
    if succeeds("docker", "info", timeout=30):
        yield
        return
    if os.environ.get("DOCKER_HOST"):
        no_engine(f"no Docker engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}")
    if os.geteuid() or not shutil.which("dockerd"):
        no_engine("no Docker engine answers, and starting one needs root and dockerd")
    log = tmp_path_factory.mktemp("dockerd") / "dockerd.log"
    with log.open("wb") as out:
        daemon = subprocess.Popen(
            ["dockerd"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        end = time.monotonic() + 60
        while not succeeds("docker", "info", timeout=30):
            if daemon.poll() is not None or time.monotonic() > end:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                no_engine(f"dockerd does not come up here: {tail}")
            time.sleep(0.5)
        yield
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(10)


@pytest.fixture(scope="session")
def compose_command(engine: None) -> list[str]:
    if chosen := os.environ.get("PAGERELAY_TEST_COMPOSE"):
        return shlex.split(chosen)
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and succeeds(*command, "version", timeout=30):
            return command
    no_engine("neither `docker compose` nor docker-compose is installed")


@pytest.fixture(scope="session")
def base(engine: None) -> str:
    """Name of the base image, on this engine."""
    if chosen := os.environ.get("PAGERELAY_TEST_BASE"):
        return chosen
    for image in (PULLED_BASE, LOCAL_BASE):
        if succeeds("docker", "image", "inspect", image, timeout=30):
            return image
    if succeeds("docker", "pull", "-q", PULLED_BASE, timeout=300):
        return PULLED_BASE
    if os.geteuid() or not shutil.which("debootstrap"):
        no_engine(f"{PULLED_BASE} cannot be pulled, and making a base needs root and debootstrap")
    sh("deploy/local-base.sh", timeout=600, env={**os.environ, "BASE_IMAGE": LOCAL_BASE})
    return LOCAL_BASE


# ---------------------------------------------------------------------------------------- the deployment


@dataclass
class Stream:
    """What came of one streamed request."""

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    chunks: int = 0
    finish_reason: str | None = None
    error: str = ""


@dataclass
class Deployment:
    compose: list[str]
    env: dict[str, str]
    project: str
    port: int
    started: float = field(default_factory=time.time)

    def run(self, *arguments: str, timeout: float, check: bool = True) -> str:
        return sh(*self.compose, *arguments, timeout=timeout, env=self.env, check=check)

    def scale(self, **services: int) -> None:
        scales = [part for name, count in services.items() for part in ("--scale", f"{name}={count}")]
        self.run("up", "-d", "--no-build", "--no-recreate", *scales, timeout=120)

    def containers(self, service: str, *, everything: bool = False) -> list[str]:
        label = "label=com.docker.compose."
        command = ["docker", "ps", "-q", "--no-trunc", *(["-a"] if everything else [])]
        filters = ["--filter", f"{label}project={self.project}", "--filter", f"{label}service={service}"]
        return sh(*command, *filters, timeout=30).split()

    def inspect(self, service: str) -> dict[str, Any]:
        [container] = self.containers(service, everything=True)[:1]
        return dict(json.loads(sh("docker", "inspect", container, timeout=30))[0])

    # -- HTTP, always through the published port on loopback

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, body: Any = None, timeout: float = 60
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, bytes]:
        """Status 0: nobody listens yet."""
        try:
            with self.request("GET", path, timeout=10) as response:
                return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, f"{path}: {status} {body[:300]!r}"
        return json.loads(body)

    def post(self, path: str, body: Any) -> Any:
        with self.request("POST", path, body) as response:
            answer = response.read()
            assert response.status == 200, f"{path}: {response.status} {answer[:300]!r}"
        return json.loads(answer)

    def generate(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """The one choice of a plain answer."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        [choice] = self.post("/generate", body)["choices"]
        return dict(choice)

    def stream(self, prompt: str, max_tokens: int, **more: Any) -> Stream:
        """One streamed generation; never raises for what the server does, but records it."""
        result = Stream(prompt)
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more}
        try:
            with self.request("POST", "/generate", body) as response:
                if response.status != 200:
                    result.error = f"{response.status} {response.read()[:300]!r}"
                    return result
                checked = StrictStream("/generate", body)
                for line in response:
                    for chunk in checked.feed(line):
                        for choice in chunk.get("choices", ()):
                            result.chunks += 1
                            result.text += choice["text"]
                            result.tokens += choice["token_ids"]
                            result.finish_reason = choice["finish_reason"] or result.finish_reason
                if checked.error is not None:
                    result.error = str(checked.error)
                elif not checked.done:
                    result.error = "the stream broke off"
        except (OSError, http.client.HTTPException) as error:
            result.error = repr(error)
        return result

    # -- what the router says of its workers

    def workers(self, role: str) -> dict[str, dict[str, Any]]:
        """Live workers of a role by id."""
        listed = self.json("/cluster")["workers"]
        return {worker["id"]: worker for worker in listed if worker["role"] == role}

    def is_ready(self, prefill: int, decode: int) -> bool:
        if self.get("/readyz")[0] != 200:
            return False
        return (len(self.workers("prefill")), len(self.workers("decode"))) == (prefill, decode)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def deployment(
    compose_command: list[str], base: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Built and up as a user would have it, save for names, port and base."""
    override = tmp_path_factory.mktemp("compose") / "override.yaml"
    # The build reaches its packages as this machine does.
    override.write_text("services: {init: {build: {network: host}}}\n")
    project, port = f"pagerelay-test-{os.getpid()}", free_port()
    env = {
        **os.environ,
        "PAGERELAY_IMAGE": IMAGE,
        "PAGERELAY_PORT": str(port),
        "PAGERELAY_BASE": base,
        "COMPOSE_PROJECT_NAME": project,
    }
    if base == LOCAL_BASE:  # its pip.conf says where packages are
        env.setdefault("PAGERELAY_TORCH_INDEX", "")
    files = ["-f", str(ROOT / "compose.yaml"), "-f", str(override), "--project-directory", str(ROOT)]
    made = Deployment([*compose_command, *files], env, project, port)
    try:
        made.run("up", "-d", "--build", timeout=1500)
        wait_for("the cluster is ready", lambda: made.is_ready(prefill=1, decode=1), 180)
        yield made
    finally:
        print(made.run("logs", "--no-color", "--tail=80", timeout=60, check=False))
        made.run("down", "-v", "--remove-orphans", timeout=180, check=False)


def test_one_command_gives_a_working_service(deployment: Deployment) -> None:
    assert deployment.get("/livez")[0] == 200
    assert b"# TYPE" in deployment.get("/metrics")[1]
    assert "Paris" in deployment.generate("The capital of France is", 8)["text"]
    [model] = deployment.json("/v1/models")["data"]
    messages = [{"role": "user", "content": "Say hello."}]
    chat = deployment.post(
        "/v1/chat/completions", {"model": model["id"], "messages": messages, "max_tokens": 8}
    )
    assert chat["choices"][0]["message"]["content"]


def test_stream_says_the_same_as_one_answer(deployment: Deployment) -> None:
    streamed = deployment.stream("Once upon a time", 24)
    assert not streamed.error
    assert streamed.chunks > 8, "tokens come one by one"
    whole = deployment.generate("Once upon a time", 24)
    assert (streamed.text, streamed.tokens) == (whole["text"], whole["token_ids"])
    assert streamed.finish_reason == whole["finish_reason"]


def test_health_checks_pass(deployment: Deployment) -> None:
    for service in ("router", "prefill", "decode"):

        def healthy(service: str = service) -> bool:
            return bool(deployment.inspect(service)["State"]["Health"]["Status"] == "healthy")

        wait_for(f"{service} is healthy", healthy, 90)


def test_kv_goes_through_shared_memory(deployment: Deployment) -> None:
    deployment.generate("Shared memory between two containers is", 4)
    wait_for("the decode worker has fetched blocks", lambda: transfers(deployment).get("shm"), 10)
    assert not transfers(deployment).get("tcp")
    segments = sh("docker", "exec", deployment.containers("decode")[0], "ls", "/dev/shm", timeout=30).split()
    assert len(segments) >= 2, f"the prefill worker's pool is not seen beside the decode worker's: {segments}"


def test_containers_have_few_rights_and_a_private_key(deployment: Deployment) -> None:
    for service in ("router", "prefill", "decode"):
        found = deployment.inspect(service)
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert not found["HostConfig"]["Privileged"]
        published = [port for port, hosts in (found["NetworkSettings"]["Ports"] or {}).items() if hosts]
        assert published == (["8000/tcp"] if service == "router" else [])
    [container] = deployment.containers("decode")
    shown = sh(
        "docker", "exec", container, "sh", "-c", "id -u; stat -c %a:%u /run/pagerelay/cluster.key", timeout=30
    )
    assert shown.split() == ["10001", "600:10001"]
    assert deployment.inspect("init")["State"]["ExitCode"] == 0


class Load:
    """Bounded streams on a few threads until told to stop."""

    def __init__(self, deployment: Deployment, threads: int, max_tokens: int, at_most_s: float) -> None:
        self.streams: list[Stream] = []
        self._deployment, self._max_tokens = deployment, max_tokens
        self._end = time.monotonic() + at_most_s
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def _run(self) -> None:
        while not self._stop.is_set() and time.monotonic() < self._end:
            prompt = f"Story number {next(self._numbers)}: once upon a time there was"
            self.streams.append(self._deployment.stream(prompt, self._max_tokens, ignore_eos=True))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def failures(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.error or stream.finish_reason != "length"]


def test_decode_scales_up_and_down_under_load(deployment: Deployment) -> None:
    """1 → 2 → 1 decode workers while streams run: the new one works, and no request is lost."""
    fell_back = transfers(deployment).get("tcp", 0)
    first = set(deployment.workers("decode"))
    with Load(deployment, threads=4, max_tokens=48, at_most_s=240) as load:
        wait_for("streams run", lambda: len(load.streams) >= 4, 60)
        deployment.scale(decode=2)
        wait_for(
            "a second decode worker has registered", lambda: deployment.is_ready(prefill=1, decode=2), 90
        )
        [added] = set(deployment.workers("decode")) - first
        wait_for(
            "the new decode worker fetches KV from shared memory too",
            lambda: transfers(deployment, added).get("shm", 0) > 4,
            60,
        )

        assert transfers(deployment).get("tcp", 0) == fell_back

        since = str(int(time.time()))
        deployment.scale(decode=1)
        wait_for("one decode worker is left", lambda: deployment.is_ready(prefill=1, decode=1), 60)
        finished = len(load.streams)
        wait_for("streams go on", lambda: len(load.streams) >= finished + 4, 60)
    assert not load.failures()
    assert {len(stream.tokens) for stream in load.streams} == {48}
    assert stopped_with(deployment, "decode", since) == ["0"], "the removed worker drained and left by itself"
    for stream in load.streams[-8:]:  # those that a worker left, or that moved, say what an idle cluster says
        assert stream.tokens == deployment.generate(stream.prompt, 48, ignore_eos=True)["token_ids"]


def test_prefill_scales_too(deployment: Deployment) -> None:
    with Load(deployment, threads=2, max_tokens=16, at_most_s=120) as load:
        deployment.scale(prefill=2)
        wait_for(
            "a second prefill worker has registered", lambda: deployment.is_ready(prefill=2, decode=1), 90
        )
        deployment.scale(prefill=1)
        wait_for("one prefill worker is left", lambda: deployment.is_ready(prefill=1, decode=1), 60)
    assert load.streams
    assert not load.failures()


KILL_WORKER = """
import os, pathlib, signal
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    pid, words = int(path.parent.name), path.read_bytes().split(b"\\0")
    if pid != 1 and words[-2:-1] == [b"prefill"]:
        os.kill(pid, signal.SIGKILL)
"""


def test_a_killed_worker_comes_back(deployment: Deployment) -> None:
    """The engine restarts it, and shared memory still works: no worker lends another its /dev/shm."""
    [container] = deployment.containers("prefill")
    before = set(deployment.workers("prefill"))
    # From inside, as a crash would be: an engine does not restart what was killed through it.
    sh("docker", "exec", container, "python3", "-c", KILL_WORKER, timeout=30, check=False)
    wait_for(
        "the prefill worker is back",
        lambda: deployment.is_ready(prefill=1, decode=1) and set(deployment.workers("prefill")) != before,
        90,
    )
    fetched = transfers(deployment).get("shm", 0)
    deployment.generate("After a crash the service", 4)
    wait_for(
        "blocks go through shared memory again", lambda: transfers(deployment).get("shm", 0) > fetched, 10
    )


def test_router_restart_keeps_key_and_workers(deployment: Deployment) -> None:
    deployment.run("restart", "router", timeout=90)
    wait_for("the workers have registered again", lambda: deployment.is_ready(prefill=1, decode=1), 60)
    deployment.generate("Back again", 4)


def test_down_leaves_nothing(deployment: Deployment) -> None:
    since = str(int(time.time()))
    began = time.monotonic()
    deployment.run("down", "-v", timeout=180)
    assert time.monotonic() - began < 60, "an idle cluster does not sit out its grace period"
    for service in ("router", "prefill", "decode"):
        assert stopped_with(deployment, service, since) == ["0"], service
    mine = ("--filter", f"label=com.docker.compose.project={deployment.project}")
    for what in ("ps -a", "volume ls", "network ls"):
        assert not sh("docker", *what.split(), "-q", *mine, timeout=30).split(), what


def transfers(deployment: Deployment, worker_id: str | None = None) -> dict[str, int]:
    """Blocks fetched by decode workers, or by one of them, by transport."""
    total: dict[str, int] = {}
    for name, worker in deployment.workers("decode").items():
        if worker_id in (None, name):
            for transport, count in worker["transports_in_use"].items():
                total[transport] = total.get(transport, 0) + count
    return {transport: count for transport, count in total.items() if count}


def stopped_with(deployment: Deployment, service: str, since: str) -> list[str]:
    """Exit codes of the service's containers that ended since then."""
    label = "label=com.docker.compose."
    events = sh(
        "docker", "events", "--since", since, "--until", str(int(time.time()) + 1),
        "--filter", "event=die", "--filter", f"{label}project={deployment.project}",
        "--filter", f"{label}service={service}", "--format", "{{json .Actor.Attributes}}",
        timeout=30,
    )  # fmt: skip
    return [json.loads(line)["exitCode"] for line in events.splitlines() if line.startswith("{")]
