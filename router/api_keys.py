"""Who may use the HTTP API: a key in ``Authorization: Bearer``, compared in constant time.

Routes are closed unless they stand in ``OPEN``: those tell the state of the server and run nothing. Keys
never appear in a log, a metric or an answer.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pagerelay.common.errors import Unauthorized

OPEN = frozenset({"/livez", "/readyz", "/health", "/metrics", "/cluster"})


class ApiKeys:
    """The keys as digests, so that a comparison's time tells neither a key's letters nor its length."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [self._digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @staticmethod
    def _digest(key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

    def admits(self, authorization: str | None) -> bool:
        """Does the header show one of the keys? Every key is compared, whichever fits."""
        scheme, _, key = (authorization or "").partition(" ")
        shown = self._digest(key.strip())
        fits = [hmac.compare_digest(shown, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(fits)


def guard(keys: ApiKeys, refused: Callable[[str], None]) -> Middleware:
    """Middleware: 401 without a key, before a body is read. ``refused`` is called with the route, as it was
    registered, or "other"."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN and not keys.admits(request.headers.get("Authorization")):
            resource = request.match_info.route.resource
            refused("other" if resource is None else resource.canonical)
            raise Unauthorized("a valid API key is needed: send the header Authorization: Bearer KEY")
        return await handler(request)

    return guarded
