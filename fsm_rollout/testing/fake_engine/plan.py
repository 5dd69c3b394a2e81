"""FaultPlan: which request meets which fault. A list of rules; the first that matches is taken.

Loaded from YAML (`fsm-rollout fake-engine --faults plan.yaml`) or written in Python. The same plan
and the same order of requests give the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import msgspec

from fsm_rollout.config import read_yaml
from fsm_rollout.errors import ConfigError, hint
from fsm_rollout.testing.fake_engine.faults import TRANSPORT, AnyFault

GENERATES = ("/generate", "/inference/v1/generate", "/v1/completions")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault and the requests that meet it. All that is given must hold."""

    fault: AnyFault
    nth: int | list[int] | None = None
    """of the requests that `path` and `session` leave: 1 is the first"""
    probability: float = 1.0
    session: str | None = None
    """the key of session affinity; `*` and `?` as in file names"""
    path: str | None = None
    """as in `session`; None: whatever generates. Name `/abort_request` to spoil an abort"""

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability must be in [0, 1], got {self.probability}")
        if self.numbers is not None and (not self.numbers or min(self.numbers) < 1):
            raise ConfigError(f"nth counts from 1, got {self.nth}")
        if not any(self._fits(path) for path in GENERATES) and not self._fits_all:
            name = type(self.fault).__struct_config__.tag
            raise ConfigError(
                f"fault {name!r} spoils what a generation says, {self.path!r} generates nothing; "
                f"leave path out, or give one of {', '.join(GENERATES)}"
            )

    @property
    def numbers(self) -> list[int] | None:
        return [self.nth] if isinstance(self.nth, int) else self.nth

    def fits(self, path: str, session: str | None) -> bool:
        """Whether such a request counts for it."""
        if not self._fits(path) or (path not in GENERATES and not self._fits_all):
            return False
        return self.session is None or fnmatchcase(session or "", self.session)

    def _fits(self, path: str) -> bool:
        return path in GENERATES if self.path is None else fnmatchcase(path, self.path)

    @property
    def _fits_all(self) -> bool:
        return isinstance(self.fault, TRANSPORT)


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules, tried in order."""

    rules: list[Rule] = []
    seed: int = 0
    """of the rules' probabilities"""


def load_faults(path: Path) -> FaultPlan:
    """Read a plan. ConfigError names file and field, and suggests the key that was meant."""
    values = read_yaml(path)
    try:
        _check_keys(values)
        return msgspec.convert(values, FaultPlan)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error


class Faults:
    """A plan in use: counts what each rule has seen."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._seen = [0] * len(plan.rules)

    def draw(self, path: str, session: str | None) -> AnyFault | None:
        """The fault that this request meets. Every rule counts it, the first that strikes wins."""
        drawn = None
        for i, rule in enumerate(self._plan.rules):
            if rule.fits(path, session):
                self._seen[i] += 1
                if drawn is None and self._strikes(i, rule):
                    drawn = rule.fault
        return drawn

    def _strikes(self, i: int, rule: Rule) -> bool:
        number = self._seen[i]
        if rule.numbers is not None and number not in rule.numbers:
            return False
        draw = random.Random(f"{self._plan.seed} {i} {number}").random
        return rule.probability == 1 or draw() < rule.probability


def _check_keys(values: Any) -> None:
    """Unknown keys and fault types, with a hint. All else msgspec says well enough by itself."""
    _known(values, FaultPlan.__struct_fields__, "")
    kinds = {fault.__struct_config__.tag: fault for fault in get_args(AnyFault)}
    rules = values.get("rules") if isinstance(values, Mapping) else None
    for i, rule in enumerate(rules if isinstance(rules, list) else ()):
        _known(rule, Rule.__struct_fields__, f"rules[{i}].")
        fault = rule.get("fault") if isinstance(rule, Mapping) else None
        if isinstance(fault, Mapping):
            name = fault.get("type")
            if not isinstance(name, str) or name not in kinds:
                raise ConfigError(f"unknown fault {name!r} in rules[{i}]; {hint(name, kinds)}")
            fields = ("type", *kinds[name].__struct_fields__)
            _known(fault, fields, f"rules[{i}].fault.")


def _known(values: Any, allowed: Iterable[str], where: str) -> None:
    for key in values if isinstance(values, Mapping) else ():
        if key not in allowed:
            raise ConfigError(f"unknown key {where + str(key)!r}; {hint(key, allowed)}")
