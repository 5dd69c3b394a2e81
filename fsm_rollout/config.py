"""RunConfig of `fsm-rollout run`: YAML to typed structs; an unknown key is an error with a hint."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, get_args

import msgspec
import yaml

from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import Limits


class TransformersConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="transformers"
):
    """A model in this process."""

    model: str
    """a directory or a name that transformers can load"""
    device: str = "cpu"
    dtype: str = "float32"


class ScriptedConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="scripted"
):
    """Every request is answered with these texts, one per turn: to try tools and configs out."""

    replies: list[str]


EngineConfig: TypeAlias = TransformersConfig | ScriptedConfig


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: rows in, samples out."""

    rows: str
    """JSONL of `{prompt, label, metadata, tools_kwargs}`; relative to the config file"""
    samples: str = "samples.jsonl"
    """where the samples go; relative to the config file"""
    engine: EngineConfig
    tokenizer: str | None = None
    """default: the engine's model"""
    chat_template: str | None = None
    """replaces the tokenizer's own: a Jinja file, relative to the config file, or `hermes`"""
    tools: list[str] = []
    """registered names, or `module:Name` of your own"""
    parser: str = "hermes"
    reward: str | None = None
    """`module:function` of your own; default: the sum of what the tools say"""
    limits: Limits = Limits()
    sampling: SamplingParams = SamplingParams()
    num_samples: int = 1
    max_concurrent: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_concurrent"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")


def load_config(path: Path) -> RunConfig:
    """Read `path`. ConfigError names file and field, and suggests the key that was meant."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of {', '.join(RunConfig.__struct_fields__)}")
    try:
        _check_keys(values, RunConfig, "")
        config = msgspec.convert(values, RunConfig)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    here = path.resolve().parent
    return msgspec.structs.replace(
        config,
        rows=str(here / config.rows),
        samples=str(here / config.samples),
        chat_template=_template(config.chat_template, here),
    )


def _template(name: str | None, here: Path) -> str | None:
    """The text of a template file; the name of a shipped one as it is."""
    if name is None or not (here / name).is_file():
        return name
    return (here / name).read_text("utf-8")


def _check_keys(values: Mapping[str, Any], struct: type[msgspec.Struct], path: str) -> None:
    allowed = set(struct.__struct_fields__)
    if struct in get_args(EngineConfig):
        allowed.add("type")
    for key, value in values.items():
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(allowed))}"
            raise ConfigError(f"unknown key {path + str(key)!r}; {hint}")
        if isinstance(value, Mapping) and (inner := _struct_of(struct, key, value)):
            _check_keys(value, inner, f"{path}{key}.")


def _struct_of(
    struct: type[msgspec.Struct], key: str, value: Mapping[str, Any]
) -> type[msgspec.Struct] | None:
    if struct is not RunConfig:
        return None
    nested: dict[str, type[msgspec.Struct]] = {"limits": Limits, "sampling": SamplingParams}
    if key == "engine":
        kinds = {kind.__struct_config__.tag: kind for kind in get_args(EngineConfig)}
        return kinds.get(value.get("type"))
    return nested.get(key)
