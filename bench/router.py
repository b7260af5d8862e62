"""``router``: the router alone. The real router process on one core; workers that compute nothing beside it.

Five measurements, one after the other:

1. *idle*: one client, one stream at a time. TTFT with workers that answer at once is the router's own share.
2. *short answers*: many clients, each answer whole (not streamed): requests a second.
3. *streams*: many streams at once, one token each per step: streamed tokens a second.
4. *flood*: the same with steps so short that no router can follow. A late router may put several tokens into
   one chunk, which is cheaper by the token: ``tokens a chunk`` tells.
5. *moderate load*: about 32 streams, one token each every 20 ms. From the moment a token leaves the worker
   to the moment its text reaches the client: the latency that the router adds. The client's own reading is
   in it.

Beside each rate stands the CPU time that the router took per request or token. ``per core`` is one core
divided by that time: what the router could carry if clients and workers (which share the other cores) were
never the limit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys

import aiohttp
from msgspec import Struct

from pagerelay.bench.client import served_model
from pagerelay.bench.phases import READY_S, Phase, Scripted, run_phase, scripted_workers
from pagerelay.bench.report import header, noise_note, number, stamped, table, write_json
from pagerelay.bench.server import Server, free_port, running
from pagerelay.bench.stats import Figures, ratio

IDLE_REQUESTS = 200
IDLE_TOKENS = 8
SHORT_TOKENS = 4
FLOOD_STEP_MS = 3.0
MODERATE_STREAMS = 32
MODERATE_TOKENS = 100
MODERATE_STEP_MS = 20.0


class RouterOptions(Struct, frozen=True, kw_only=True):
    model_path: str
    requests: int
    clients: int
    streams: int
    stream_tokens: int
    step_ms: float
    results: str
    router_core: int | None = None

    def phases(self) -> dict[str, Phase]:
        return {
            "idle": Phase(clients=1, count=IDLE_REQUESTS, tokens=IDLE_TOKENS, step_ms=0.0, stream=True),
            "short answers": Phase(
                clients=self.clients, count=self.requests, tokens=SHORT_TOKENS, step_ms=0.0, stream=False
            ),
            "streams": Phase(
                clients=self.streams,
                count=self.streams,
                tokens=self.stream_tokens,
                step_ms=self.step_ms,
                stream=True,
            ),
            "flood": Phase(
                clients=self.streams,
                count=self.streams,
                tokens=self.stream_tokens,
                step_ms=FLOOD_STEP_MS,
                stream=True,
            ),
            "moderate load": Phase(
                clients=MODERATE_STREAMS,
                count=MODERATE_STREAMS * 3,
                tokens=MODERATE_TOKENS,
                step_ms=MODERATE_STEP_MS,
                stream=True,
                spread_s=MODERATE_TOKENS * MODERATE_STEP_MS / 1e3,
            ),
        }

    @classmethod
    def of(cls, args: argparse.Namespace) -> RouterOptions:
        return cls(**{name: getattr(args, name) for name in cls.__struct_fields__})


def router_command() -> list[str]:
    """The router as it is installed. Raises ``ValueError`` if it is not."""
    if importlib.util.find_spec("pagerelay.cli.main") or importlib.util.find_spec("pagerelay.cli.__main__"):
        return [sys.executable, "-m", "pagerelay.cli", "router"]
    if command := shutil.which("pagerelay"):
        return [command, "router"]
    raise ValueError("the router's command line is not installed")


PHASE_ROWS = (
    ("requests", "requests"),
    ("failed", "  failed"),
    ("miscounted", "  with a token too few or many"),
    ("requests_per_s", "requests/s"),
    ("offered_tokens_per_s", "tokens/s offered by the worker"),
    ("tokens_per_s", "tokens/s delivered"),
    ("tokens_per_piece", "tokens a chunk"),
    ("ttft_p50", "TTFT p50 ms"),
    ("ttft_p99", "TTFT p99 ms"),
    ("added_p50", "added to a token p50 ms"),
    ("added_p99", "added to a token p99 ms"),
    ("e2e_p50", "e2e p50 ms"),
    ("e2e_p99", "e2e p99 ms"),
    ("router_cores", "router CPU cores"),
    ("our_cores", "clients and workers, cores"),
    ("other_cores", "other load, cores (noise)"),
    ("cpu_us_per_request", "router CPU µs/request"),
    ("cpu_us_per_token", "router CPU µs/token"),
)


def phases_table(phases: dict[str, Figures]) -> str:
    rows = [
        [label, *(number(phase.get(name)) for phase in phases.values())]
        for name, label in PHASE_ROWS
        if any(phase.get(name) is not None for phase in phases.values())
    ]
    short = number(ratio(1e6, phases["short answers"].get("cpu_us_per_request")))
    streamed = [
        f"{number(ratio(1e6, phases[name].get('cpu_us_per_token')))} streamed tokens/s "
        f"({number(phases[name].get('tokens_per_piece'))} a chunk)"
        for name in ("streams", "flood")
    ]
    per_core = f"per core, from CPU time: {short} short answers/s; {'; '.join(streamed)}"
    return "\n".join([table(["router alone", *phases], rows), "", per_core])


async def measure_router(options: RouterOptions) -> int:
    """Prints the table, writes the report; 0 if no request failed."""
    cores = sorted(os.sched_getaffinity(0))
    core = options.router_core if options.router_core is not None else cores[0]
    if core not in cores:
        raise ValueError(f"core {core} cannot be used here; these can: {', '.join(map(str, cores))}")
    others = set(cores) - {core}
    if not others:
        print("only one core here: clients and workers share it with the router", file=sys.stderr)
    port, workers = free_port(), f"tcp://127.0.0.1:{free_port()}"
    environment = {
        "PAGERELAY_ROUTER_HOST": "127.0.0.1",
        "PAGERELAY_ROUTER_PORT": str(port),
        "PAGERELAY_ROUTER_WORKERS_ENDPOINT": workers,
        "PAGERELAY_MODEL_PATH": options.model_path,
        "PAGERELAY_LOG_LEVEL": "warning",
    }
    phases = options.phases()
    rows = sum(phase.count for phase in phases.values() if phase.stream)
    columns = max(phase.tokens for phase in phases.values())
    async with running(router_command(), port, environment, core) as server:
        if others:
            os.sched_setaffinity(0, others)  # ours, and the scripted workers' who inherit it
        try:
            async with scripted_workers(workers, options.model_path, rows, columns) as scripted:
                await server.wait_ready(READY_S)
                await scripted.wait_welcome()
                async with aiohttp.ClientSession() as session:
                    model = await served_model(session, f"{server.url}/v1")
                figures = await _run_all(phases, server, scripted, model)
        finally:
            os.sched_setaffinity(0, set(cores))
    print(phases_table(figures))
    if note := noise_note(figures.values()):
        print(note)
    report = header(options=options, router_core=core, phases=figures)
    print(f"written: {write_json(stamped(options.results, 'router'), report)}")
    return 1 if any(one["failed"] or one["miscounted"] for one in figures.values()) else 0


async def _run_all(
    phases: dict[str, Phase], server: Server, scripted: Scripted, model: str
) -> dict[str, Figures]:
    warm_up = Phase(clients=8, count=50, tokens=SHORT_TOKENS, step_ms=0.0, stream=False)
    await run_phase(warm_up, server, scripted, model, 0)
    figures: dict[str, Figures] = {}
    row = 0
    for name, phase in phases.items():
        figures[name] = await run_phase(phase, server, scripted, model, row)
        row += phase.count if phase.stream else 0
    return figures
