"""What a client is told of a failure that no other worker would spare it."""

from __future__ import annotations

from pagerelay.common.errors import ApiError, InvalidRequest, Unavailable
from pagerelay.common.wire.messages import Failed


def error_of(failed: Failed) -> ApiError:
    code, text = failed.code, failed.message
    if code == "too_wide":
        return InvalidRequest(f"{text}; ask for fewer beams or a smaller max_tokens", param="num_beams")
    if code in ("too_long", "grammar_failed"):
        return InvalidRequest(text, code="context_length_exceeded" if code == "too_long" else code)
    # Not 503 for bad_logits: asked again it would be the same.
    return ApiError(text, code=code) if code == "bad_logits" else Unavailable(text, code=code)
