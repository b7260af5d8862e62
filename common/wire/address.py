"""Endpoints: one place that parses, brackets and judges them (IPv4, IPv6, names)."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal

from pagerelay.common.errors import ConfigError


def parse(endpoint: str, setting: str) -> tuple[str, int]:
    """``tcp://host:port`` → (host without brackets, port). Raises :class:`ConfigError` naming the setting."""
    scheme, separator, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not port.isdigit() or int(port) > 65535 or not host:
        raise ConfigError(f"{setting}: {endpoint!r} is not of the form tcp://HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join(host: str, port: int | Literal["*"]) -> str:
    """The endpoint for a host and a port (``*``: a free one), IPv6 addresses bracketed."""
    host = host.removeprefix("[").removesuffix("]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """True only where no other machine can connect."""
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def numeric(host: str, setting: str) -> str:
    """An address that can be bound: ZeroMQ binds addresses, not names."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        info = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"{setting}: the host {host!r} cannot be resolved") from error
    return str(info[0][4][0])


def address_towards(endpoint: str) -> str | None:
    """This host's own address on the way to ``endpoint``: what others can reach us by. No packet is sent.

    ``None`` while the name does not resolve or there is no route: ask again later.
    """
    host, port = parse(endpoint, "worker.routers")
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None
