"""What a client is told of a failure that no other worker would spare it."""

from __future__ import annotations

from pagerelay.common.errors import ApiError, InvalidRequest, Unavailable
from pagerelay.common.wire.messages import Failed


def error_of(failed: Failed) -> ApiError:
    match failed.code:
        case "too_long":
            return InvalidRequest(failed.message, code="context_length_exceeded")
        case "too_wide":
            text = f"{failed.message}; ask for fewer beams or a smaller max_tokens"
            return InvalidRequest(text, param="num_beams")
        case "grammar_failed":
            return InvalidRequest(failed.message, code=failed.code)
        case "bad_logits":
            return ApiError(failed.message, code=failed.code)  # not 503: asked again it would be the same
        case _:
            return Unavailable(failed.message, code=failed.code)
