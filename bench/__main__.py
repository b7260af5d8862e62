"""Command line: ``python -m pagerelay.bench COMMAND``; the commands stand in the package's docstring."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from pagerelay.bench.client import is_loopback
from pagerelay.bench.compare import CompareOptions, Spec, compare
from pagerelay.bench.footprint import FootprintOptions, measure_footprint
from pagerelay.bench.gpu_check import SECTIONS, GpuCheckOptions, gpu_check
from pagerelay.bench.grammar import GrammarOptions, measure_grammar
from pagerelay.bench.handover import HandoverOptions, measure_handover
from pagerelay.bench.kernels import KernelOptions, check_kernels
from pagerelay.bench.load import LoadOptions, load
from pagerelay.bench.router import RouterOptions, measure_router
from pagerelay.bench.sharing import SharingOptions, measure_sharing
from pagerelay.bench.speculation import SpeculationOptions, measure_speculation
from pagerelay.bench.stats import Slo
from pagerelay.bench.traffic import MAX_REQUESTS, MAX_SECONDS
from pagerelay.bench.workloads import WORKLOADS, Shape
from pagerelay.common.config import DEFAULT_MODEL
from pagerelay.common.errors import StartupError

MAX_CLIENTS = 4096


def _whole(low: int, high: int) -> Any:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    read.__name__ = "number"
    return read


def _above_0(most: float) -> Any:
    def read(text: str) -> float:
        value = float(text)
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {most:g}")
        return value

    read.__name__ = "number"
    return read


def _spelled(read: Any) -> Any:
    """Lets a parser's own words reach the user."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("give a JSON object")
    return value


def _workload_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise ValueError(
            f"unknown workload {', '.join(unknown or ['(none given)'])}; known: {', '.join(WORKLOADS)}"
        )
    return names


def _traffic_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="name in the API; default: the first that the server lists")
    parser.add_argument("--api", choices=("chat", "completions"), default="chat")
    parser.add_argument(
        "--extra-body",
        type=_spelled(_json_object),
        default={},
        metavar="JSON",
        help="merged into each request; null drops a field",
    )
    parser.add_argument(
        "--workload", type=_spelled(_workload_names), metavar="NAMES", help=f"of {','.join(WORKLOADS)}"
    )
    parser.add_argument(
        "--slo",
        type=_spelled(Slo.parse),
        metavar="LIMITS",
        help="for goodput, in ms: ttft=2000,itl=500 (also tpot, e2e)",
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of prompts and arrivals; default: the time"
    )
    parser.add_argument(
        "--max-seconds", type=_above_0(MAX_SECONDS), default=150.0, help="bound of one run (150)"
    )
    parser.add_argument(
        "--timeout", type=_above_0(MAX_SECONDS), default=300.0, help="bound of one request in s (300)"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pagerelay.bench", description="Measures LLM servers.")
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("load", help="traffic to a running server")
    one.add_argument("--base-url", required=True, help="for example http://127.0.0.1:8000/v1")
    one.add_argument("--allow-remote", action="store_true", help="send to a host other than this one")
    one.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    _traffic_arguments(one)
    one.add_argument("--rate", type=_above_0(10_000), help="open loop: Poisson arrivals, requests/s")
    one.add_argument("--duration", type=_above_0(MAX_SECONDS), help="open loop: seconds of arrivals")
    one.add_argument("--concurrency", type=_whole(1, MAX_CLIENTS), help="closed loop: clients")
    one.add_argument(
        "--requests", type=_whole(1, MAX_REQUESTS), help="requests of the loop, or of each workload"
    )
    one.add_argument("--prompt-tokens", type=_whole(1, 1_000_000), default=128, help="loops: tokens in (128)")
    one.add_argument(
        "--prefix-tokens", type=_whole(0, 1_000_000), default=0, help="loops: of those, shared by all (0)"
    )
    one.add_argument("--output-tokens", type=_whole(1, 1_000_000), default=64, help="loops: tokens out (64)")
    one.add_argument("--repeat", type=_whole(1, 100), default=1)
    one.add_argument(
        "--pid", type=_whole(1, 2**31 - 1), help="server process: measure its tree's memory and CPU"
    )
    one.add_argument("--label", default="")
    one.add_argument("--json", metavar="FILE", help="write the full report")

    many = commands.add_parser("compare", help="start several servers in turn, run the same traffic on each")
    many.add_argument(
        "--spec", action="append", required=True, type=_spelled(Spec.parse), metavar="NAME=COMMAND",
        help="a server; {port} in the command stands for a free port, VAR=VALUE words before it set its "
        "environment; the last server is the baseline",
    )  # fmt: skip
    _traffic_arguments(many)
    many.add_argument(
        "--rounds", type=_whole(1, 100), default=1, help="starts of each server, taking turns (1)"
    )
    many.add_argument("--requests", type=_whole(1, MAX_REQUESTS), help="of each workload, instead of its own")
    many.add_argument(
        "--agree",
        action="store_true",
        help="first ask each server the same questions, and compare the answers",
    )
    many.add_argument(
        "--ready-seconds", type=_above_0(MAX_SECONDS), default=300.0, help="bound of one start (300)"
    )
    many.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    router = commands.add_parser("router", help="the router alone, with scripted workers")
    router.add_argument(
        "--model-path", required=True, help="model folder; only its tokenizer and config are read"
    )
    router.add_argument(
        "--router-core", type=_whole(0, 4095), help="core that the router is pinned to; default: the first"
    )
    router.add_argument(
        "--requests", type=_whole(100, MAX_REQUESTS), default=3000, help="short answers (3000)"
    )
    router.add_argument(
        "--clients", type=_whole(1, 400), default=32, help="that ask for short answers at once (32)"
    )
    router.add_argument(
        "--streams", type=_whole(1, 400), default=200, help="at once, for streamed tokens/s (200)"
    )
    router.add_argument(
        "--stream-tokens", type=_whole(2, 10_000), default=200, help="tokens of each stream (200)"
    )
    router.add_argument(
        "--step-ms",
        type=_above_0(1000),
        default=10.0,
        help="of the scripted decode worker, for tokens/s (10)",
    )
    router.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")
    foot = commands.add_parser(
        "footprint", help="a worker's memory and time to readiness, beside their bounds"
    )
    foot.add_argument("--model", default=DEFAULT_MODEL, help="model folder, hub id or known name")
    foot.add_argument(
        "--kv-memory-mib", type=_whole(16, 1 << 20), default=128, help="pool; small, to be filled (128)"
    )
    foot.add_argument("--threads", type=_whole(1, 4096), default=1, help="CPU threads of a worker (1)")
    foot.add_argument("--seed", type=int, default=int(time.time()), help="of prompts; default: the time")
    foot.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    roof = commands.add_parser("roofline", help="a step of the model on this CPU beside what it can do")
    roof.add_argument("--model", default=DEFAULT_MODEL, help="model folder, hub id or known name")
    roof.add_argument("--threads", type=_whole(1, 4096), default=1, help="CPU threads (1)")
    roof.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    kernels = commands.add_parser(
        "kernels", help="compile the Triton kernels without a GPU; exit code: variants that failed a gate"
    )
    kernels.add_argument("--only", default="", metavar="WORDS", help="variants whose name has one of a,b,c")
    kernels.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    guesses = commands.add_parser("speculation", help="answers with and without guessed tokens, side by side")
    guesses.add_argument("--model-path", required=True, help="model folder")
    guesses.add_argument(
        "--questions", type=_whole(1, MAX_REQUESTS), default=12, help="of each of the three workloads (12)"
    )
    guesses.add_argument("--clients", type=_whole(1, 64), default=1, help="questions at a time (1)")
    guesses.add_argument("--max-tokens", type=_whole(2, 4096), default=128, help="of an answer (128)")
    guesses.add_argument("--num-speculative-tokens", type=_whole(1, 32), default=4, help="guesses a step (4)")
    guesses.add_argument("--seed", type=int, default=1, help="of the prompts")
    guesses.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    sharing = commands.add_parser("sharing", help="KV held for several answers to a prompt, and for beams")
    sharing.add_argument("--model-path", required=True, help="model folder")
    sharing.add_argument("--prompt-tokens", type=_whole(1, 4096), default=512, help="of each prompt (512)")
    sharing.add_argument("--max-tokens", type=_whole(2, 4096), default=64, help="of each answer (64)")
    sharing.add_argument("--seed", type=int, default=1, help="of the prompts")
    sharing.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    grammar = commands.add_parser("grammar", help="time between tokens with and without a grammar")
    grammar.add_argument("--model-path", required=True, help="model folder")
    grammar.add_argument(
        "--rounds", type=_whole(1, MAX_REQUESTS), default=8, help="of each way, by 1 and by all clients (8)"
    )
    grammar.add_argument("--clients", type=_whole(1, 64), default=8, help="questions at a time (8)")
    grammar.add_argument("--max-tokens", type=_whole(4, 4096), default=96, help="of an answer (96)")
    grammar.add_argument("--seed", type=int, default=1, help="of the prompts")
    grammar.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    handover = commands.add_parser("handover", help="what a hand-over adds to the second token, by phase")
    handover.add_argument("--model-path", required=True, help="model folder")
    handover.add_argument(
        "--requests", type=_whole(1, MAX_REQUESTS), default=200, help="one after another (200)"
    )
    handover.add_argument(
        "--prompt-tokens", type=_whole(1, 100_000), default=128, help="of each prompt (128)"
    )
    handover.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    handover.add_argument("--seed", type=int, default=1, help="of the prompts")
    handover.add_argument("--results", default="bench/results", metavar="DIR", help="folder of the report")

    gpu = commands.add_parser(
        "gpu-check", help="all that only a GPU can prove, in ten minutes; exit code: checks that failed"
    )
    gpu.add_argument("--only", default="", metavar="SECTIONS", help=f"of {','.join(SECTIONS)}")
    gpu.add_argument("--dry-run", action="store_true", help="on the CPU, in Triton's interpreter")
    gpu.add_argument("--device", default="cuda:0", metavar="CUDA", help="(cuda:0)")
    gpu.add_argument("--out", default="bench/results/gpu", metavar="DIR", help="folder of the reports")
    gpu.add_argument("--one-section", action="store_true", help=argparse.SUPPRESS)
    return parser


def _workloads(names: list[str], requests: int | None) -> dict[str, Shape]:
    """Named workloads, with another number of requests where one is given."""
    chosen = {name: WORKLOADS[name] for name in names}
    if requests is None:
        return chosen
    return {name: msgspec.structs.replace(shape, requests=requests) for name, shape in chosen.items()}


def _shapes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Shape]:
    """The traffic of ``load``: one loop, or named workloads."""
    loops = [flag for flag in ("rate", "concurrency") if getattr(args, flag) is not None]
    if len(loops) + (args.workload is not None) > 1:
        parser.error("give one of --workload, --rate and --concurrency")
    if args.duration is not None and args.rate is None:
        parser.error("--duration belongs to --rate; a closed loop is bounded by --requests and --max-seconds")
    if not loops:
        return _workloads(args.workload or list(WORKLOADS), args.requests)
    if args.prefix_tokens >= args.prompt_tokens:
        parser.error("--prefix-tokens must be smaller than --prompt-tokens")
    if args.requests is None and args.duration is None:
        parser.error("give --requests, or with --rate --duration")
    shape = Shape(
        clients=args.concurrency or 1,
        rate=args.rate,
        requests=args.requests,
        duration_s=args.duration,
        prefix_tokens=args.prefix_tokens,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
    )
    return {f"open {args.rate:g}/s" if args.rate else f"closed {args.concurrency}": shape}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.command == "load":
            return asyncio.run(load(_load_options(parser, args), args.label, args.json))
        if args.command == "compare":
            names = [spec.name for spec in args.spec]
            if len(set(names)) < len(names):
                parser.error("two specs have the same name")
            return asyncio.run(_ended_by_sigterm(compare(_compare_options(args))))
        if args.command == "roofline":
            # As a worker has it (``pagerelay.cli``): read when torch loads its OpenMP library, just below.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            from pagerelay.bench.roofline import RooflineOptions, measure_roofline  # the only one with torch

            return measure_roofline(RooflineOptions(args.model, args.threads, args.results))
        if args.command == "footprint":
            return asyncio.run(_ended_by_sigterm(measure_footprint(_footprint_options(args))))
        if args.command == "kernels":
            return check_kernels(KernelOptions.of(args))
        if args.command == "speculation":
            options = {name: getattr(args, name) for name in SpeculationOptions.__struct_fields__}
            return asyncio.run(_ended_by_sigterm(measure_speculation(SpeculationOptions(**options))))
        if args.command == "sharing":
            options = {name: getattr(args, name) for name in SharingOptions.__struct_fields__}
            return asyncio.run(_ended_by_sigterm(measure_sharing(SharingOptions(**options))))
        if args.command == "grammar":
            options = {name: getattr(args, name) for name in GrammarOptions.__struct_fields__}
            return asyncio.run(_ended_by_sigterm(measure_grammar(GrammarOptions(**options))))
        if args.command == "handover":
            options = {name: getattr(args, name) for name in HandoverOptions.__struct_fields__}
            return asyncio.run(_ended_by_sigterm(measure_handover(HandoverOptions(**options))))
        if args.command == "gpu-check":
            return gpu_check(GpuCheckOptions.of(args))
        return asyncio.run(_ended_by_sigterm(measure_router(RouterOptions.of(args))))
    except (StartupError, ValueError, OSError) as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


async def _ended_by_sigterm(work: Coroutine[Any, Any, int]) -> int:
    """SIGTERM ends the work as Ctrl-C does: the servers it started are stopped."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _load_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> LoadOptions:
    if not args.base_url.startswith(("http://", "https://")):
        parser.error("--base-url must start with http:// or https://")
    if not (args.allow_remote or is_loopback(args.base_url)):
        parser.error(f"{args.base_url} is not on this host; add --allow-remote if you mean to load it")
    return LoadOptions(
        base_url=args.base_url.rstrip("/"),
        shapes=_shapes(parser, args),
        seed=args.seed,
        model=args.model,
        api=args.api,
        extra_body=args.extra_body,
        repeat=args.repeat,
        pid=args.pid,
        slo=args.slo,
        max_s=args.max_seconds,
        timeout_s=args.timeout,
        api_key_env=args.api_key_env,
    )


def _compare_options(args: argparse.Namespace) -> CompareOptions:
    return CompareOptions(
        specs=tuple(args.spec),
        shapes=_workloads(args.workload or ["W4b", "W4l"], args.requests),
        rounds=args.rounds,
        ready_s=args.ready_seconds,
        results=args.results,
        seed=args.seed,
        model=args.model,
        api=args.api,
        extra_body=args.extra_body,
        slo=args.slo,
        max_s=args.max_seconds,
        timeout_s=args.timeout,
        agree=args.agree,
    )


def _footprint_options(args: argparse.Namespace) -> FootprintOptions:
    return FootprintOptions(
        model=args.model,
        kv_memory_mib=args.kv_memory_mib,
        threads=args.threads,
        results=args.results,
        seed=args.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
