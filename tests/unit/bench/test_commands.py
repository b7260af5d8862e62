"""The commands of the bench."""

from __future__ import annotations

import argparse

from pagerelay import bench
from pagerelay.bench import __main__ as commands


def test_the_rooms_docstring_names_every_command() -> None:
    parser = commands._parser()
    (choices,) = (
        action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    assert bench.__doc__ is not None
    listed = [line.split("``")[1] for line in bench.__doc__.splitlines() if line.startswith("``")]
    assert sorted(listed) == sorted(choices)
