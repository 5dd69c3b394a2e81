"""RunConfig of `fsm-rollout run`: YAML to typed structs; an unknown key is an error with a hint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
import yaml

from fsm_rollout.dataset import read_file
from fsm_rollout.engines.base import LogProbKind, SamplingParams
from fsm_rollout.engines.settings import HttpSettings
from fsm_rollout.errors import ConfigError, hint
from fsm_rollout.limits import Limits
from fsm_rollout.tools.registry import where_modules_are

Positive = Annotated[int, msgspec.Meta(ge=1)]
Urls = Annotated[list[str], msgspec.Meta(min_length=1)]


class TransformersConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="transformers"
):
    """A model in this process."""

    model: str
    """a directory or a name that transformers can load"""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_batch: Positive = 32
    """requests that run at once; others wait"""
    num_threads: Positive | None = None
    """torch's CPU threads; None: as torch would"""


class ScriptedConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="scripted"
):
    """Every request is answered with these texts, one per turn: to try tools and configs out."""

    replies: list[str]


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all servers have in common."""

    urls: Urls
    """`http://host:port` of each"""
    stream: bool = False
    """tokens come as they are sampled"""
    log_prob_kind: LogProbKind | None = None
    """what they report; None: they are probed where it makes a difference"""
    headers: dict[str, str] = {}
    """sent with every request, an API key for instance"""
    settings: HttpSettings = HttpSettings()
    """deadlines and bounds"""


class SGLangConfig(HttpConfig, frozen=True, kw_only=True, tag="sglang"):
    """SGLang servers, or a router in front of them."""


class VLLMConfig(HttpConfig, frozen=True, kw_only=True, tag="vllm"):
    """vLLM servers."""

    route: Literal["generate", "completions"] = "generate"
    """`/inference/v1/generate` (needs --enable-scale-out), or `/v1/completions`"""
    model: str | None = None
    """the name it is served under, a LoRA's for instance; None: the server's only one"""


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One function of the reward; the options are those of `rewards.RewardPart`."""

    function: str
    """`module:function` of your own"""
    weight: float = 1.0
    timeout_s: float | None = None
    """seconds of one call; None: limits.tool_timeout_s"""
    batch: int | None = None
    """the most requests of one call, as a list; None: one request"""
    batch_wait_s: float = 0.05
    """how long a batch that is not full waits for more"""
    group: bool = False
    """called once per row, with all its usable requests"""
    processes: int | None = None
    """run in so many processes of its own, which are killed when they are out of time"""


EngineConfig: TypeAlias = TransformersConfig | SGLangConfig | VLLMConfig | ScriptedConfig


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: rows in, samples out."""

    rows: str
    """JSONL of `{prompt, label, metadata, tools_kwargs}`; relative to the config file"""
    samples: str = "samples.jsonl"
    """where the samples go; relative to the config file"""
    engine: EngineConfig
    tokenizer: str | None = None
    """a directory or name that transformers can load; default: the engine's model, if it is here"""
    chat_template: str | None = None
    """replaces the tokenizer's own: a Jinja file, relative to the config file, or `hermes`"""
    tools: list[str] = []
    """registered names, or `module:Name` of your own"""
    parser: str = "hermes"
    reward: str | dict[str, float | str | RewardConfig] | None = None
    """`module:function` of your own, or parts by name: a function each, or a weight for what a tool
    or the turns say; default: the sum of what the tools say"""
    agent: str | None = None
    """`module:function` of your own, `async def agent(ctx)`, in place of the built-in loop"""
    limits: Limits = Limits()
    sampling: SamplingParams = SamplingParams()
    num_samples: int = 1
    max_concurrent: int = 256
    seed: int = 0
    tuned: bool = False
    """for thousands of requests in flight: uvloop, and a collector of garbage that runs rarely"""

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_concurrent"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")


def load_config(path: Path) -> RunConfig:
    """Read `path`. ConfigError names file and field, and suggests the key that was meant."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of {', '.join(RunConfig.__struct_fields__)}")
    try:
        check_keys(values, RunConfig, "")
        config = msgspec.convert(values, RunConfig)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_in_words(error)}") from error
    here = path.resolve().parent
    return msgspec.structs.replace(
        config,
        rows=str(here / config.rows),
        samples=str(here / config.samples),
        chat_template=template_text(config.chat_template, here),
    )


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that is given twice is an error, not a choice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key.value!r} is given twice; keep one",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return node


def read_yaml(path: Path) -> Any:
    """The plain values of a YAML file. ConfigError names the file and what is wrong with it."""
    text = _text(path, wanted="YAML")
    try:
        loader = _Loader(text)
        loader.name = path.name
        return loader.get_single_data()
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be read; flatten it") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2024-99-99, a number too long
        why = " ".join(str(error).split())
        raise ConfigError(f"{path}: not YAML that can be read: {why}") from error


def _text(path: Path, *, wanted: str) -> str:
    try:
        return read_file(path, wanted=wanted).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 ({error}); save the file as UTF-8") from error


def template_text(name: str | None, here: Path) -> str | None:
    """The text of a template file in the folder `here`; whatever else it is (a shipped one's name),
    as it is.
    """
    if name is None or not os.path.isfile(here / name):  # False for text that is no path
        return name
    return _text(here / name, wanted="Jinja")


def imported(dotted: str, *, what: str) -> Any:
    """The object `module:name` that a config's author named. ConfigError when there is none."""
    module, _, name = dotted.partition(":")
    try:
        return getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # what the module runs as it is imported
        raise ConfigError(
            f"{what} {dotted!r} is not an importable `module:name`: {error!r}"
            f"{where_modules_are(error)}"
        ) from error


def check_keys(values: Mapping[str, Any], struct: type[msgspec.Struct], path: str) -> None:
    """Raise ConfigError for a key that is no field of `struct`, or a word that is none of its
    choices; `path` stands before its name."""
    allowed = set(struct.__struct_fields__)
    if struct in get_args(EngineConfig):
        allowed.add("type")
    choices = _choices(struct)
    for key, value in values.items():
        if key not in allowed:
            raise ConfigError(f"unknown key {path + str(key)!r}; {hint(str(key), allowed)}")
        if key in choices and isinstance(value, str) and value not in choices[key]:
            raise ConfigError(f"{path}{key} is {value!r}; {hint(value, choices[key])}")
        if not isinstance(value, Mapping):
            continue
        if struct is RunConfig and key == "reward":  # its keys are names
            for name, part in value.items():
                if isinstance(part, Mapping):
                    check_keys(part, RewardConfig, f"reward.{name}.")
        elif inner := _struct_of(struct, key, value):
            check_keys(value, inner, f"{path}{key}.")


def _in_words(error: msgspec.ValidationError) -> str:
    """What msgspec found, the key first, in the words of YAML."""
    what, _, path = str(error).partition(" - at `$")
    what = what.replace("Object missing required field", "required, and missing: the key")
    for theirs, ours in ("array", "list"), ("object", "mapping"), ("str", "text"):
        what = re.sub(rf"\b{theirs}\b", ours, what)
    key = path.strip(".`")
    return f"{key}: {what[:1].lower()}{what[1:]}" if key else what


def _choices(struct: type[msgspec.Struct]) -> dict[str, set[str]]:
    """The fields that hold one of some words."""
    found = {}
    for name, annotation in get_type_hints(struct).items():
        parts = (annotation, *get_args(annotation))
        literals = [part for part in parts if get_origin(part) is Literal]
        if literals:
            found[name] = {str(word) for part in literals for word in get_args(part)}
    return found


def _struct_of(
    struct: type[msgspec.Struct], key: str, value: Mapping[str, Any]
) -> type[msgspec.Struct] | None:
    if issubclass(struct, HttpConfig):
        return HttpSettings if key == "settings" else None
    if struct is not RunConfig:
        return None
    nested: dict[str, type[msgspec.Struct]] = {"limits": Limits, "sampling": SamplingParams}
    if key == "engine":
        kinds: dict[str, type[msgspec.Struct]] = {
            str(kind.__struct_config__.tag): kind for kind in get_args(EngineConfig)
        }
        tag = value.get("type")
        if not isinstance(tag, str):
            return None
        if tag not in kinds:
            raise ConfigError(f"engine.type is {tag!r}; {hint(tag, kinds)}")
        return kinds[tag]
    return nested.get(key)
