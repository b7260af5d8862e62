"""llama.cpp's own HTTP server: ``python -m pagerelay.bench.peers.llamacpp --port 8080 --threads 2``.

Runs until SIGTERM or Ctrl-C. Computes in fp32 throughout: the weights of ``f32_gguf``, and an fp32 KV cache
unless told otherwise (llama.cpp's own default is fp16). Everything else is as the server comes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagerelay.common.config import DEFAULT_MODEL

PACKAGE = "xllamacpp==2026.10.11549"
KV_TYPES = {"f32": "GGML_TYPE_F32", "f16": "GGML_TYPE_F16"}


def _xllamacpp() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise SystemExit(
            f"llama.cpp's server needs the package {PACKAGE} ({error}): install the extra `peers` "
            f"(pip install -e '.[peers]'), or `pip install --target DIR {PACKAGE}` and put DIR on PYTHONPATH"
        ) from None
    return xllamacpp


def parameters(xllamacpp: Any, args: argparse.Namespace) -> Any:
    """llama.cpp's parameters for these arguments."""
    chosen = xllamacpp.CommonParams()
    chosen.model.path = str(args.gguf)
    chosen.model_alias = {args.model}
    chosen.hostnames, chosen.port = ["127.0.0.1"], args.port
    chosen.n_parallel, chosen.n_ctx = args.slots, args.ctx
    chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = args.threads
    chosen.cache_type_k = chosen.cache_type_v = getattr(xllamacpp.ggml_type, KV_TYPES[args.kv])
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pagerelay.bench.peers.llamacpp", description="llama.cpp's HTTP server."
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gguf", type=Path, help="default: the file that bench.peers.f32_gguf makes")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name in the API")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=24, help="requests at once (24)")
    parser.add_argument(
        "--ctx", type=int, default=32768, help="tokens of context, shared out among the slots (32768)"
    )
    parser.add_argument("--kv", choices=tuple(KV_TYPES), default="f32", help="type of the KV cache (f32)")
    args = parser.parse_args(argv)
    if args.gguf is None:
        # Imported here: with --gguf this runs in an environment without pagerelay's own packages.
        from pagerelay.bench.peers.f32_gguf import default_path

        args.gguf = default_path()
    if not args.gguf.is_file():
        print(
            f"{parser.prog}: no file {args.gguf}; `python -m pagerelay.bench.peers.f32_gguf` makes it",
            file=sys.stderr,
        )
        return 2
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # before the server's threads, which inherit it
    xllamacpp = _xllamacpp()
    server = xllamacpp.Server(parameters(xllamacpp, args))
    print(f"llama.cpp serves {args.model} at {server.listening_address}", file=sys.stderr, flush=True)
    signal.sigwait(ending)
    return 0


if __name__ == "__main__":
    sys.exit(main())
