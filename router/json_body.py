"""Bytes of a request body → typed structure, strictly; every fault is an :class:`InvalidRequest` in our own
words.

Strict means UTF-8 without lone surrogates, no NaN or Infinity, no number that a float cannot hold, at most
``MAX_CONTAINERS`` lists and objects, nested at most ``MAX_DEPTH`` deep, and an object at the top. Of
doubled keys the last one counts.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from pagerelay.common.errors import InvalidRequest

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 100_000
"""Lists and objects of one body: each costs many times its two bytes once it is decoded."""
_PIECE: Final = 1 << 18

T = TypeVar("T")

_WORDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_PATH = re.compile(r"^(.*?)(?: - at (?:`(key)` in )?`\$\.?([^`]*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `([^`]*)`(?: of length)?(?:, got `([^`]*)`| (>=|<=|>|<) (\S+))$")
_MISSING = re.compile(r"^Object missing required field `([^`]*)`$")
_BAD_BYTE = re.compile(r"\(byte (\d+)\)")
_LAST_KEY = re.compile(rb'"([A-Za-z_]{1,64})"\s*:\s*[-+]?\Z')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's type. Raises :class:`InvalidRequest`, with ``param`` wherever a field can be
    named.
    """
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        brackets = _brackets(body)
        if _deeper_than(brackets, MAX_DEPTH):
            raise _too_deep()
        if brackets.count(b"[") > MAX_CONTAINERS:
            raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} lists and objects")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error)) from error
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from error
    except RecursionError as error:
        raise _too_deep() from error


def _brackets(body: bytes) -> bytes:
    """The brackets outside strings, curly ones as square ones. In pieces, so that a thread that looks at
    megabytes lets others run in between.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare = bare.translate(bytes.maketrans(b"{}", b"[]"), delete=bytes(set(range(256)) - set(b'"[]{}')))
    kept, inside = [], 0
    for at in range(0, len(bare), _PIECE):
        parts = bare[at : at + _PIECE].split(b'"')
        kept.append(b"".join(parts[inside::2]))
        inside = (inside + len(parts) - 1) % 2
    return b"".join(kept)


def _deeper_than(brackets: bytes, limit: int) -> bool:
    """Is the nesting deeper than ``limit``? By a few passes in C, whose number and memory do not grow with
    the depth: each removes all innermost pairs.
    """
    for _ in range(limit):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    return b"[]" in brackets or brackets.count(b"[") > limit


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _wrong_value(text: str) -> InvalidRequest:
    match = _PATH.match(text)
    message, path = (match[1], match[3] or None) if match else (text, None)
    path = path and path.removesuffix("[...]")  # a value of an object, which one is not said
    what = f"a key of {path}" if match and match[2] else path or "the body"
    missing = _MISSING.match(message)
    if missing:
        field = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{field} is missing", param=field, code="missing_required_parameter")
    expected = _EXPECTED.match(message)
    if expected:
        types, got, bound, limit = expected.groups()
        if got:
            wanted = " or ".join(_WORDS.get(name, name) for name in types.split(" | ") if name != "null")
            found = "a number with fraction or exponent" if got == "float" else _WORDS.get(got, got)
            message = f"must be {wanted}, not {found}"
        elif "of length" in message:
            message = f"must have a length of {_BOUNDS[bound]} {limit}"
        else:
            message = f"must be {_BOUNDS[bound]} {limit.removesuffix('.0')}"
    else:
        message = f"cannot be used: {message[:1].lower()}{message[1:]}"
    return InvalidRequest(f"{what} {message}", param=path)


def _malformed(body: bytes, text: str) -> InvalidRequest:
    """Not JSON at all. Names the field whose value breaks it where the position tells."""
    position = _BAD_BYTE.search(text)
    if position:
        at = int(position[1])
        key = _LAST_KEY.search(body[max(0, at - 200) : at])
        if key and body[at : at + 1] in (b"N", b"I"):
            return InvalidRequest(f"{key[1].decode()} must be a finite number", param=key[1].decode())
    if "surrogate" in text or ("truncated" in text and _SURROGATE.search(body)):
        return InvalidRequest(
            "the body holds half of a surrogate pair (\\ud83d or the like), which is no character"
        )
    return InvalidRequest(
        "the body is not valid JSON" + (f" (byte {position[1]})" if position else ": it ends early")
    )


def object_keys(body: bytes) -> list[str]:
    """The top-level keys of a body that has been decoded before."""
    keys: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return list(keys)
