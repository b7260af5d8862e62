"""Logging: one line per event, no prompt text, no keys. Set up once per process."""

from __future__ import annotations

import logging
import sys


def setup_logging(service: str, level: str) -> None:
    """Lines on stderr as ``time level service message``; libraries only from WARNING up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {service} %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("pagerelay").setLevel(level.upper())
