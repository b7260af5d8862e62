"""``pagerelay config``: what is in force, as the YAML that would set it."""

from __future__ import annotations

import sys

import yaml

from pagerelay.common.config import Config


def print_config(config: Config) -> int:
    """Prints the effective configuration with secrets masked; the key file is read to check it."""
    config.cluster_key()
    yaml.safe_dump(config.masked(), sys.stdout, sort_keys=False)
    return 0
