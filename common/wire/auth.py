"""CURVE for every ZeroMQ socket, from one cluster key.

Whoever has the key derives both key pairs from it: the servers' and the clients'. A server lets in only the
clients' public key, a client talks only to the servers' public key, and everything on the wire is encrypted.
Without a key only loopback addresses may be bound or dialled.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import zmq
import zmq.auth.asyncio
from zmq.utils import z85

from pagerelay.common.errors import ConfigError
from pagerelay.common.wire.address import is_loopback


def new_cluster_key() -> str:
    return secrets.token_urlsafe(32)


class CurveKeys:
    """The two key pairs of a cluster."""

    def __init__(self, cluster_key: str) -> None:
        self.server = self._pair(cluster_key, b"pagerelay-server")
        self.client = self._pair(cluster_key, b"pagerelay-client")

    @staticmethod
    def _pair(cluster_key: str, purpose: bytes) -> tuple[bytes, bytes]:
        secret = z85.encode(hashlib.blake2b(cluster_key.encode(), digest_size=32, person=purpose).digest())
        return zmq.curve_public(secret), secret

    def serve(self, socket: Any) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.server
        socket.curve_server = True

    def dial(self, socket: Any) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.client
        socket.curve_serverkey = self.server[0]

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP: may this client in?"""
        return secrets.compare_digest(key, self.client[0])


def require_key_off_loopback(host: str, keys: CurveKeys | None, setting: str) -> None:
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"{setting}: {host} can be reached from other machines, so a cluster key is needed: "
            f"`pagerelay keygen > FILE`, then cluster.key_file: FILE (the same on every service)"
        )


class Gatekeeper:
    """Answers ZAP requests of one context's servers: without it a CURVE server would let in any key pair."""

    def __init__(self, context: Any, keys: CurveKeys) -> None:
        self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
        self._keys = keys

    def start(self) -> None:
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self._keys)

    def stop(self) -> None:
        self._authenticator.stop()
