"""Loaded by schemathesis (``SCHEMATHESIS_HOOKS``): each answer is strict JSON, or a stream that passes the
strict reader; what was answered is counted, one line each in the file named by ``OPENAPI_ANSWERS``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import schemathesis
from strict_sse import StrictStream, strict_json


@schemathesis.check
def strict_answer(ctx: Any, response: Any, case: Any) -> None:
    kind = response.headers.get("content-type", [""])[0]
    shown = ""
    if kind.startswith("text/event-stream"):
        stream = StrictStream(case.path, case.body)
        stream.feed(response.content)
        shown = "stream, left early"
        if not response.stream_cut_short:
            stream.close()
            shown = "stream" if stream.error is None else f"stream: {stream.error['code']}"
    elif kind.startswith("application/json"):
        answer = strict_json(response.content.decode("utf-8"))
        other = case.path in ("/readyz", "/health") and "error" not in answer
        if response.status_code >= 400 and not other:
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert not re.search(r"\w(Error|Exception)\b|Traceback", answer["error"]["message"])
            shown = f"{answer['error']['code']} {answer['error']['param']}"
    if "OPENAPI_ANSWERS" in os.environ:
        line = f"{case.method} {case.path} {response.status_code} {re.sub(r'[0-9]+', '#', shown)}"
        with Path(os.environ["OPENAPI_ANSWERS"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
