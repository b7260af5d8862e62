"""``pagerelay config``: what is in force, as the YAML that would set it."""

from __future__ import annotations

import sys

import yaml

from pagerelay.common.config import Config


def print_config(config: Config) -> int:
    """Prints the effective configuration with secrets masked; the files with keys are read to check them."""
    config.cluster_key()
    config.client_keys()
    yaml.safe_dump(config.masked(), sys.stdout, sort_keys=False)
    return 0
