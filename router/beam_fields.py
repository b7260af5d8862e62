"""What a request says of beam search, in vLLM's words or in transformers'."""

from __future__ import annotations

from pagerelay.common.errors import InvalidRequest
from pagerelay.common.wire.sampling import MAX_BEAMS
from pagerelay.router.schemas import Common

_NEUTRAL = {
    "stream": False,
    "temperature": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": [],
    "logprobs": False,
    "prompt_logprobs": None,
    "echo": False,
}
"""What cannot be had beside it with another value than this."""


def beam_width(request: Common, n: int) -> int:
    """Beams of the search that is wanted, 0 for none. Raises :class:`InvalidRequest` for what contradicts
    it."""
    if not request.use_beam_search and request.num_beams in (None, 1):
        for name in ("length_penalty", "early_stopping"):
            if getattr(request, name) not in (None, 1.0 if name == "length_penalty" else False):
                message = f"{name} is allowed only beside use_beam_search or num_beams"
                raise InvalidRequest(message, param=name)
        return 0
    if getattr(request, "tools", None):
        message = "tools are not supported beside a beam search"
        raise InvalidRequest(message, param="tools", code="unsupported_parameter")
    name, width = "num_beams", request.num_beams
    if width is None:
        name = "n" if request.best_of is None else "best_of"
        width = n if request.best_of is None else request.best_of
    if request.best_of not in (None, width):
        message = f"best_of is {request.best_of} and num_beams {width}; leave one of them out"
        raise InvalidRequest(message, param="best_of")
    if not 2 <= width <= MAX_BEAMS:
        raise InvalidRequest(f"a beam search has 2 to {MAX_BEAMS} beams, {name} says {width}", param=name)
    if n > width:
        raise InvalidRequest(f"n is {n}, but a search by {width} beams finds no more answers", param="n")
    for field, neutral in _NEUTRAL.items():
        value = getattr(request, field)
        # 0 is not false: of logprobs it wants some.
        if value is not None and (
            value != neutral or isinstance(value, bool) is not isinstance(neutral, bool)
        ):
            raise InvalidRequest(f"{field} cannot be had of a beam search; leave it out", param=field)
    return width
