"""Arguments → configuration → one of the commands. Errors a user can cause end in one line and an exit
code."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from pagerelay.cli.process import Announcer, Signals
from pagerelay.cli.terminal import TERMINAL_COMMANDS, add_commands, run_command
from pagerelay.common.config import Config, load_config
from pagerelay.common.errors import ConfigError, StartupError
from pagerelay.common.log import setup_logging
from pagerelay.common.wire.auth import new_cluster_key

# Short flags → settings. Everything else goes by --set section.field=value.
_FLAGS = {
    "model": ("model.path", "model folder, hub id, or a name that fetch-model knows"),
    "served-model-name": ("model.served_name", "name of the model in the API"),
    "max-model-len": ("model.max_model_len", "longest prompt + answer, in tokens"),
    "host": ("router.host", "HTTP address"),
    "port": ("router.port", "HTTP port; 0 takes a free one"),
    "workers-endpoint": ("router.workers_endpoint", "where workers dial in, tcp://HOST:PORT"),
    "router": ("worker.routers", "router(s) to dial, comma-separated tcp://HOST:PORT"),
    "transport": ("worker.transport", "auto, shm, cuda_ipc or tcp"),
    "name": ("worker.name", "id of the worker; a new process of that name takes the old one's place"),
    "drain": ("worker.drain", "what a decode worker does with its requests on SIGTERM: finish or hand-over"),
    "api-keys-file": ("router.api_keys_file", "file with the keys that clients must show, one a line"),
    "block-size": ("cache.block_size", "tokens per KV block"),
    "kv-memory-mib": ("cache.kv_memory_mib", "size of a worker's KV pool"),
    "num-blocks": ("cache.num_blocks", "blocks of a worker's KV pool"),
    "max-num-seqs": ("engine.max_num_seqs", "most sequences in one step"),
    "max-batch-tokens": ("engine.max_batch_tokens", "token budget of one step"),
    "threads": ("engine.threads", "CPU threads of a worker's model"),
    "device": ("engine.device", "cpu, cuda or cuda:N"),
    "dtype": ("engine.dtype", "auto, float32, float16 or bfloat16"),
    "gpu-memory-utilization": ("engine.gpu_memory_utilization", "part of a GPU's memory for one worker"),
    "enforce-eager": ("engine.enforce_eager", "no CUDA graphs"),
    "deterministic": ("engine.deterministic", "GPU attention independent of the rest of a step"),
    "cpu-ops": ("engine.cpu_ops", "auto, c or torch"),
    "cpu-weights": ("engine.cpu_weights", "fp32 or int8"),
    "speculative": ("engine.speculative", "guess tokens that repeat what came before: none or ngram"),
    "num-speculative-tokens": ("engine.num_speculative_tokens", "most guesses per sequence and step"),
    "prompt-lookup-min": ("engine.prompt_lookup_min", "fewest last tokens that a guess is looked up by"),
    "prompt-lookup-max": ("engine.prompt_lookup_max", "most last tokens that a guess is looked up by"),
    "prefill": ("cluster.prefill", "number of prefill workers"),
    "decode": ("cluster.decode", "number of decode workers"),
    "colocated": (
        "cluster.colocated",
        "number of workers that do both jobs, instead of prefill and decode workers",
    ),
    "cluster-key-file": ("cluster.key_file", "file with the cluster key"),
    "log-level": ("log_level", "debug, info, warning or error"),
}
_SWITCHES = ("enforce-eager", "deterministic")
"""Flags that mean true when they stand alone."""
_MODEL = ("model", "max-model-len", "log-level")
_ENGINE = (
    "block-size",
    "kv-memory-mib",
    "num-blocks",
    "max-num-seqs",
    "max-batch-tokens",
    "threads",
    "device",
    "dtype",
    "gpu-memory-utilization",
    "enforce-eager",
    "deterministic",
    "cpu-ops",
    "cpu-weights",
    "speculative",
    "num-speculative-tokens",
    "prompt-lookup-min",
    "prompt-lookup-max",
)
_WORKER = (*_MODEL, "router", "name", "transport", "drain", "cluster-key-file", *_ENGINE)
_ROUTER = (*_MODEL, "served-model-name", "host", "port", "workers-endpoint", "cluster-key-file",
           "api-keys-file")  # fmt: skip
_UP = (*_MODEL, "served-model-name", "host", "port", "workers-endpoint", "prefill", "decode", "colocated",
       "transport", "drain", "cluster-key-file", "api-keys-file", *_ENGINE)  # fmt: skip

_COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "up": ("start a whole cluster on this machine; Ctrl-C drains it, a second Ctrl-C ends it", _UP),
    "router": ("run the router", _ROUTER),
    "prefill": ("run one prefill worker", _WORKER),
    "decode": ("run one decode worker", _WORKER),
    "colocated": ("run one worker that does both jobs", _WORKER),
    "config": ("print the effective configuration, secrets masked, and check it", tuple(_FLAGS)),
    "fetch-model": ("fetch or make a model, and print its folder", ()),
    "keygen": ("print a new cluster key", ()),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagerelay",
        description="LLM serving with prefill and decode on different workers.",
        epilog="Settings also come from PAGERELAY_<SECTION>_<FIELD> and from --config FILE (YAML).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_text, flags) in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=help_text)
        if name == "keygen":
            continue
        command.add_argument("--config", metavar="FILE", help="YAML file with settings")
        command.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.FIELD=VALUE",
            dest="settings",
            help="any setting",
        )
        for flag in flags:
            dotted, text = _FLAGS[flag]
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if flag in _SWITCHES else {}
            command.add_argument(
                f"--{flag}", metavar="VALUE", help=f"{text} ({dotted})", dest=f"flag_{dotted}", **alone
            )
        if name == "fetch-model":
            command.add_argument("name", nargs="?", help="default: the configured model")
        if name in ("up", "router", "prefill", "decode", "colocated"):
            # For a launcher: a descriptor to write events to, and to die with it.
            command.add_argument("--announce-fd", type=int, help=argparse.SUPPRESS)
            command.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    add_commands(commands)
    return parser


def _config(arguments: argparse.Namespace) -> Config:
    flags: dict[str, str] = {}
    for key, value in vars(arguments).items():
        if key.startswith("flag_") and value is not None:
            flags[key.removeprefix("flag_")] = value
    for setting in arguments.settings:
        dotted, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting}: write it as SECTION.FIELD=VALUE")
        flags[dotted] = value
    return load_config(arguments.config, flags)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 the server refused or failed a request, 2 wrong configuration or
    usage, 3 something needed is missing, 130 interrupted."""
    # Workers share cores: an OpenMP thread that spins while it waits takes them from the others. Read by the
    # OpenMP library when torch loads it, which is after this line.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "keygen":
            print(new_cluster_key())
            return 0
        if arguments.command in TERMINAL_COMMANDS:
            return run_command(arguments)
        config = _config(arguments)
        setup_logging(arguments.command, config.log_level)
        return _run(arguments, config)
    except (ConfigError, StartupError) as error:
        print(f"pagerelay: {error}", file=sys.stderr)
        if (fd := getattr(arguments, "announce_fd", None)) is not None:
            Announcer(fd)({"event": "failed", "text": str(error)})
        return 2 if isinstance(error, ConfigError) else 3
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace, config: Config) -> int:
    # Imported here: each command pays for what it needs (the router never loads torch).
    if arguments.command == "config":
        from pagerelay.cli.show import print_config

        return print_config(config)
    if arguments.command == "fetch-model":
        from pagerelay.common.model.fetch import resolve_model

        print(resolve_model(arguments.name or config.model.path, progress=_progress))
        return 0
    signals = Signals(arguments.parent_pid)
    if arguments.command == "up":
        from pagerelay.cli.local import up

        return up(config, Announcer(arguments.announce_fd) if arguments.announce_fd is not None else None)
    from pagerelay.common.model.fetch import resolve_model

    announce = Announcer(arguments.announce_fd)
    folder = resolve_model(
        config.model.path, progress=lambda line: announce({"event": "progress", "text": line})
    )
    if arguments.command == "router":
        from pagerelay.cli.serve import run_router

        return asyncio.run(run_router(config, folder, announce, signals))
    from pagerelay.cli.serve import run_worker

    return asyncio.run(run_worker(arguments.command, config, folder, announce, signals))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
