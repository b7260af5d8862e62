"""Who may say what: the one table of permissions on the control link.

The router reads it for what a worker sends, a worker for what the router sends; everything else is dropped
and counted as ``refused``.

The data link has no roles, only two ends: each decodes nothing but the union of what it may hear
(``ToPrefill``, ``ToDecode``). Who may fetch there is a matter of the lease, which is opened by its ticket:
only the worker that the router has chosen gets to see that (``common/engine/leasing.py``). ``Attach`` and
``Detached`` need none: they say who has the pool's memory open, with or without a lease that still stands,
and an owner that refused to hear it would free memory under a reader.
"""

from __future__ import annotations

from pagerelay.common.wire.messages import (
    Abort,
    Beams,
    DecodeJob,
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
    PromptScores,
    Role,
    Suspend,
    Suspended,
    Tokens,
)

_ANY_SENDS: frozenset[type[Message]] = frozenset({Hello, Heartbeat, PromptScores, Failed, Goodbye})
_ANY_GETS: frozenset[type[Message]] = frozenset({Abort, Drain, Probe})
_DECODE_SENDS: frozenset[type[Message]] = _ANY_SENDS | {HandedOver, Tokens, Beams, Preempted, Suspended}
_DECODE_GETS: frozenset[type[Message]] = _ANY_GETS | {DecodeJob, Suspend}

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
