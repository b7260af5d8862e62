"""Runs one service in this process: the composition roots of the router and of the workers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pagerelay.cli.process import Signals
from pagerelay.common.config import Config, cache_dir
from pagerelay.common.errors import StartupError
from pagerelay.common.wire.address import join, parse
from pagerelay.common.wire.auth import CurveKeys

if TYPE_CHECKING:
    from pagerelay.common.service.worker import Worker

log = logging.getLogger("pagerelay.cli")
Announce = Callable[[dict[str, Any]], None]


def curve_keys(config: Config) -> CurveKeys | None:
    key = config.cluster_key()
    return CurveKeys(key) if key is not None else None


async def run_router(config: Config, folder: Path, announce: Announce, signals: Signals) -> int:
    """Serves HTTP until told to stop by a signal, and drains."""
    from aiohttp import web

    from pagerelay.router.app import make_app
    from pagerelay.router.http import Runner
    from pagerelay.router.model_files import read_model_files
    from pagerelay.router.service import RouterService

    settings = config.router
    service = RouterService(config, read_model_files(folder, config.model), curve_keys(config))
    host, port = parse(settings.workers_endpoint, "router.workers_endpoint")
    workers_port = service.links.bind(host, port)
    runner = Runner(make_app(service))
    await runner.setup()
    site = web.TCPSite(
        runner, settings.host.removeprefix("[").removesuffix("]"), settings.port, shutdown_timeout=1.0
    )
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        service.links.close()
        raise StartupError(
            f"router.port: cannot listen on {settings.host}:{settings.port}: "
            f"{os.strerror(error.errno or 0)}; give another with --port"
        ) from error
    service.start()
    stopped = asyncio.Event()
    signals.serve(stopped.set)
    http_port = runner.addresses[0][1]
    announce(
        {
            "event": "ready",
            "url": join(settings.host, http_port).replace("tcp:", "http:"),
            "workers_endpoint": join(host, workers_port),
        }
    )
    await stopped.wait()
    service.draining = True
    if service.running and not signals.orphaned():
        log.info("finishing %d requests, for at most %g s", service.running, settings.drain_s)
    deadline = monotonic() + settings.drain_s
    while service.running and monotonic() < deadline and not signals.orphaned():
        await asyncio.sleep(0.05)
    await runner.cleanup()
    await service.stop()
    return 0


async def run_worker(role: str, config: Config, folder: Path, announce: Announce, signals: Signals) -> int:
    """Loads the model and serves until told to stop by a signal or a router."""
    keys = curve_keys(config)
    for endpoint in config.worker.routers:
        parse(endpoint, "worker.routers")
    announce({"event": "progress", "text": "loading the model"})
    from pagerelay.common.service.build import build_parts, set_threads

    threads = set_threads(config)
    parts = build_parts(config, folder, choose_ops(config, threads))
    worker: Worker
    if role == "prefill":
        from pagerelay.prefill_svc.worker import PrefillWorker

        worker = PrefillWorker(config, keys, parts)
    else:
        from pagerelay.decode_svc.worker import DecodeWorker

        worker = DecodeWorker(config, keys, parts, colocated=role == "colocated")
    signals.serve(worker.stop)
    return await worker.run(announce, signals.orphaned)


def choose_ops(config: Config, threads: int) -> Any:
    """The kernels: on CPU compiled C, or torch's own where there is no compiler, said once; on a GPU
    Triton's."""
    from pagerelay.kernels.cpu_build import KernelUnavailable
    from pagerelay.kernels.cpu_ops import CpuOps
    from pagerelay.kernels.torch_ops import TorchOps

    if config.engine.device != "cpu":
        return _triton_ops(config)
    int8 = config.engine.cpu_weights == "int8"
    if config.engine.cpu_ops == "torch":
        if int8:
            raise StartupError(
                "engine.cpu_weights is int8, which torch's own kernels lack: cpu_ops must be c"
            )
        return TorchOps()
    try:
        return CpuOps(cache_dir() / "kernels", threads, int8_weights=int8)
    except KernelUnavailable as error:
        if config.engine.cpu_ops == "c":
            raise StartupError(f"engine.cpu_ops is c: {error.reason}") from error
        if int8:
            raise StartupError(
                f"engine.cpu_weights is int8, which needs the C kernels: {error.reason}"
            ) from error
        log.warning("%s: torch's own kernels serve, about half as fast", error.reason)
        return TorchOps()


def _triton_ops(config: Config) -> Any:
    from pagerelay.kernels.triton import missing

    if reason := missing():
        raise StartupError(f"engine.device is {config.engine.device}: {reason}")
    from pagerelay.kernels.triton.ops import TritonOps

    return TritonOps(config.engine.deterministic)
