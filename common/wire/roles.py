"""Who may say what: the one table of permissions on the control link.

The router reads it for what a worker sends, a worker for what the router sends; everything else is dropped
and counted as ``refused``. Who may fetch is no matter of roles alone: a lease is opened by its ticket, which
only the worker that the router has chosen gets to see (``common/engine/leasing.py``).
"""

from __future__ import annotations

from pagerelay.common.wire.messages import (
    Abort,
    DecodeJob,
    Detach,
    Detached,
    Drain,
    Failed,
    FirstToken,
    Goodbye,
    HandedOver,
    Heartbeat,
    Hello,
    Message,
    Preempted,
    PrefillJob,
    PrefillStarted,
    Probe,
    Role,
    Tokens,
)

_ANY_SENDS: frozenset[type[Message]] = frozenset({Hello, Heartbeat, Failed, Goodbye})
_ANY_GETS: frozenset[type[Message]] = frozenset({Abort, Drain, Probe})
_DECODE_SENDS: frozenset[type[Message]] = _ANY_SENDS | {HandedOver, Tokens, Preempted, Detached}
_DECODE_GETS: frozenset[type[Message]] = _ANY_GETS | {DecodeJob, Detach}

MAY_SEND: dict[Role, frozenset[type[Message]]] = {
    "prefill": _ANY_SENDS | {PrefillStarted, FirstToken},
    "decode": _DECODE_SENDS,
    "colocated": _DECODE_SENDS,
}
"""Worker → router."""

MAY_GET: dict[Role, frozenset[type[Message]]] = {
    "prefill": _ANY_GETS | {PrefillJob},
    "decode": _DECODE_GETS,
    "colocated": _DECODE_GETS,
}
"""Router → worker, once it has said Welcome."""
