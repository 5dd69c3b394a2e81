"""The trainer that calls, slime or miles: its parts, by name. Ours never loads it first."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from fsm_rollout.errors import ConfigError


def part_of(name: str, *modules: str) -> Any:
    """`name` of the first of `modules` that has it: some move from release to release."""
    for trainer in ("slime", "miles"):
        if trainer not in sys.modules:
            continue
        for module in modules:
            try:
                found = import_module(f"{trainer}.{module}")
            except ModuleNotFoundError as error:
                if error.name is None or not f"{trainer}.{module}".startswith(error.name):
                    raise  # the trainer lacks a package of its own
            else:
                if hasattr(found, name):
                    return getattr(found, name)
        raise ConfigError(f"this {trainer} has no {' or '.join(modules)}, where {name!r} should be")
    raise ConfigError(f"{name!r} is slime's or miles's, and neither is loaded")
