"""What a request is given, right or wrong: budgets, replies, observations, calls.

Plain values and their Hypothesis strategies; `twin` plays them against a request. A fault spoils
the arguments of one good append and says with which codes it must be refused.
"""

from __future__ import annotations

import base64
import io
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from hypothesis import strategies as st

from fsm_rollout.columns import Column
from fsm_rollout.limits import Limits
from fsm_rollout.replay import REPLAY_NAMES, RoutedExperts, WeightVersion
from fsm_rollout.turn import FINISHES, ToolCall

Arguments: TypeAlias = dict[str, Any]
"""of one `Sample.append_response_tokens`; `log_probs` is there where the run has them"""

COLUMNS = (
    Column("teacher_log_probs", fill=-1),
    Column("weight", "float64", per="T", fill=1),
    Column("flag", "uint8", fill=7),
    Column("step", "int64", per="T"),
)


class Fault(NamedTuple):
    """What is wrong with an append, and the InvariantError codes that may refuse it."""

    codes: frozenset[str]
    spoil: Callable[[Arguments], None]
    only_sampled: bool


FAULTS: dict[str, Fault] = {}


def _fault(
    name: str, *codes: str, only_sampled: bool = False
) -> Callable[[Callable[[Arguments], None]], Callable[[Arguments], None]]:
    def register(spoil: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
        FAULTS[name] = Fault(frozenset(codes), spoil, only_sampled)
        return spoil

    return register


@_fault("log-probs missing, or given where there are none", "missing_log_probs", "R3.3.log_probs")
def _missing(arguments: Arguments) -> None:
    arguments["log_probs"] = None if "log_probs" in arguments else _log_probs(arguments)


@_fault("a log-prob short", "R3.1.lengths", "R3.3.log_probs", only_sampled=True)
def _short(arguments: Arguments) -> None:
    arguments["log_probs"] = _log_probs(arguments)[1:]


@_fault("a log-prob long", "R3.1.lengths", "R3.3.log_probs", only_sampled=True)
def _long(arguments: Arguments) -> None:
    arguments["log_probs"] = [*_log_probs(arguments), -1.0]


def _log_probs(arguments: Arguments) -> list[float]:
    return list(arguments.get("log_probs") or [-1.0] * len(arguments["tokens"]))


for _name, _value in {
    "NaN": float("nan"),
    "infinite": float("inf"),
    "minus infinity": float("-inf"),
    "clamped to -9999": -9999.0,
    "positive": 0.5,
}.items():

    @_fault(f"log-prob {_name}", "R3.3.log_probs", only_sampled=True)
    def _bad_log_prob(arguments: Arguments, value: float = _value) -> None:
        arguments["log_probs"] = [*_log_probs(arguments)[:-1], value]


for _name, _ids in {
    "negative": [3, -1],
    "fractional": [3, 1.5],
    "too large": [3, 2**31],
    "two-dimensional": [[3, 4]],
    "text": "not base64!",
    "ragged bytes": b"12345",
    "absent": None,
    "numpy floats": np.array([3.0, 4.0]),
    "numpy too large": np.array([3, 2**31]),
    "numpy two-dimensional": np.array([[3, 4]]),
}.items():

    @_fault(f"token ids {_name}", "R3.1.ids")
    def _bad_ids(arguments: Arguments, ids: Any = _ids) -> None:
        arguments["tokens"] = ids


for _name, _meta in {
    "finish reason unknown": {"finish_reason": "eos"},
    "finish reason not text": {"finish_reason": {"type": ["stop"]}},
}.items():

    @_fault(_name, "R3.6.finish", only_sampled=True)
    def _bad_finish(arguments: Arguments, meta: Any = _meta) -> None:
        arguments["meta_info"] = meta


for _name, _runs in {
    "too short": [("v1", 1)],
    "negative": [("v1", -1), ("v2", 3)],
    "malformed": ["v1"],
    "fractional": [("v1", 1.5), ("v2", 0.5)],
    "of no version": [({"step": 1}, 2)],
}.items():

    @_fault(f"version runs {_name}", "R3.4.versions", only_sampled=True)
    def _bad_runs(arguments: Arguments, runs: Any = _runs) -> None:
        arguments["meta_info"] = {"weight_versions": runs}


_TOP_P = REPLAY_NAMES - {"routed_experts"}
for _name, _code, _replay in (
    ("of top-p ids alone", "top_p_incomplete", lambda n: {"top_p_token_ids": [3] * n}),
    ("of top-p offsets alone", "top_p_incomplete", lambda n: {"top_p_token_offsets": [0] * n}),
    ("of top-p for one token less", "top_p_offsets", lambda n: {"sampling_mask": [[3]] * (n - 1)}),
    ("of a token that was not kept", "top_p_sampled", lambda n: {"sampling_mask": [[2**30]] * n}),
    ("of negative kept ids", "bad_meta_array", lambda n: {"sampling_mask": [[-1]] * n}),
    ("of kept ids in no list", "bad_meta_array", lambda n: {"sampling_mask": [3] * n}),
    ("of experts in no base64", "bad_meta_array", lambda n: {"routed_experts": "not base64!"}),
    ("of experts without layers", "routed_experts_shape", lambda n: {"routed_experts": [[1]] * n}),
    (
        "of experts for others",
        "routed_experts_length",
        lambda n: {"routed_experts": [[[1], [2]]] * 99},
    ),
    (
        "of experts after a gap",
        "routed_experts_start",
        lambda n: {"routed_experts": [[[1], [2]]], "routed_experts_start_len": 2**20},
    ),
):

    @_fault(f"report {_name}", _code, "top_p_incomplete", only_sampled=True)
    def _bad_replay(
        arguments: Arguments, replay: Callable[[int], dict[str, Any]] = _replay
    ) -> None:
        new = replay(len(arguments["tokens"]))
        instead_of = _TOP_P if _TOP_P & new.keys() else {"routed_experts"}
        given = {k: v for k, v in arguments["meta_info"].items() if k not in instead_of}
        arguments["meta_info"] = given | new


@_fault("column undeclared", "R3.1.columns")
def _undeclared(arguments: Arguments) -> None:
    arguments["extra"] = {**arguments["extra"], "entrpoy": [0.0] * len(arguments["tokens"])}


@_fault("column short", "R3.1.lengths", "R3.1.columns")
def _short_column(arguments: Arguments) -> None:
    name = next(iter(arguments["extra"]), "undeclared")
    arguments["extra"] = {**arguments["extra"], name: [1]}


@_fault("column out of range", "R3.1.columns")
def _wrapped_column(arguments: Arguments) -> None:
    arguments["extra"] = {**arguments["extra"], "flag": [300, 1]}


@_fault("forced and sampled at once", "R3.2.forced")
def _forced_and_sampled(arguments: Arguments) -> None:
    arguments |= {"forced": True, "trainable": True}


FORMS: dict[str, Callable[[str, list[Any]], Any]] = {
    "list": lambda code, values: values,
    "tuple": lambda code, values: tuple(values),
    "array": array,
    "numpy": lambda code, values: np.array(values, {"i": np.int64, "f": np.float64}[code]),
    "bytes": lambda code, values: array(code, values).tobytes(),
    "bytearray": lambda code, values: bytearray(array(code, values).tobytes()),
    "memoryview": lambda code, values: memoryview(array(code, values)),
    "base64": lambda code, values: base64.b64encode(array(code, values).tobytes()).decode(),
}
"""How a caller may hand over ids (code "i") and log-probs ("f")."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`count` tokens from an engine, a tool or ourselves, and what is wrong with them.

    The fault sits in the last append; those before it, of a stream, are good.
    """

    count: int
    fault: str = "none"
    finish: str | None = "stop"
    chunk: int = 0
    """tokens per append of a stream; 0: one append"""
    form: str = "list"
    versions: tuple[WeightVersion, WeightVersion] = ("v1", "v1")
    """of the first half and of the rest"""
    annotated: bool = True
    """with its text and values of the declared columns"""
    calls: tuple[ToolCall, ...] = ()

    def sizes(self) -> Iterator[int]:
        """Tokens of each append."""
        last = min(self.count, 2) if self.chunk else self.count
        for start in range(0, self.count - last, self.chunk or 1):
            yield min(self.chunk, self.count - last - start)
        yield last


@dataclass(frozen=True, slots=True)
class Setup:
    """What a request starts with."""

    limits: Limits
    prompt: int
    """prompt tokens"""
    log_probs: bool = True
    declared: tuple[Column, ...] = ()
    image: bool = False
    """the prompt holds a media span"""
    replay: bool = False
    """the engine reports what top-p kept and which experts it routed to"""


def wrapped(arguments: Arguments, form: str) -> Arguments:
    """`arguments` with ids and log-probs in another form, where they still are plain lists."""
    wrap, ids, log_probs = FORMS[form], arguments["tokens"], arguments.get("log_probs")
    if isinstance(ids, list) and all(type(i) is int and abs(i) < 2**31 for i in ids):
        arguments["tokens"] = wrap("i", ids)
    if log_probs is not None:
        arguments["log_probs"] = wrap("f", log_probs)
    return arguments


def replay_data(
    form: str, kept: list[tuple[int, ...]], rows: list[int], start: int
) -> dict[str, Any]:
    """The `meta_info` of replay data: ids per new token, and the experts of tokens from `start`."""
    ids, offsets = list(chain.from_iterable(kept)), [0, *accumulate(map(len, kept))]
    experts = [[[row], [row + 1]] for row in rows]
    array3d = np.array(experts, np.int32).reshape(-1, 2, 1)
    meta: dict[str, Any] = {"routed_experts_start_len": start}
    if form in ("list", "tuple"):
        name = "output_token_sampling_mask" if form == "list" else "sampling_mask"
        meta[name] = [FORMS[form]("i", list(span)) for span in kept]
        meta["routed_experts"] = experts or array3d
    else:
        meta["top_p_token_ids"] = FORMS[form]("i", ids)
        meta["top_p_token_offsets"] = FORMS[form]("i", offsets)
        meta["routed_experts"] = RoutedExperts(array3d, start)
        if form in ("bytes", "base64"):
            file = io.BytesIO()
            np.save(file, array3d)
            npy = file.getvalue()
            meta["routed_experts"] = npy if form == "bytes" else base64.b64encode(npy).decode()
    return meta


CALLS = (
    (),
    (ToolCall("calculator", {"expression": "1+1"}, id="a", span=(0, 2)),),
    (ToolCall("", error="invalid_json", raw="<tool_call>{"),),
    (
        ToolCall("calculator", {}, id="a", span=(1, 4)),
        ToolCall("", error="unterminated", raw="{", span=(4, 5)),
    ),
)

calls = st.sampled_from(CALLS)
setups = st.builds(
    Setup,
    limits=st.builds(
        Limits,
        max_context=st.sampled_from([8, 16, 32, 64, 64]),
        max_response=st.none() | st.integers(1, 48),
        max_new_tokens=st.integers(1, 12),
        max_turns=st.sampled_from([1, 2, 4, 8]),
        max_tool_calls=st.sampled_from([0, 1, 4, 8]),
        max_attempts=st.sampled_from([1, 2, 5]),
    ),
    prompt=st.integers(0, 8),
    log_probs=st.sampled_from([True, True, True, False]),
    declared=st.sampled_from([(), (), COLUMNS]),
    image=st.booleans(),
    replay=st.sampled_from([False, False, True]),
)


def replies(*, sampled: bool = True) -> st.SearchStrategy[Reply]:
    """Model tokens, or (`sampled=False`) observation and forced tokens; every third is wrong."""
    versions: st.SearchStrategy[WeightVersion] = st.sampled_from(["v1", "v2", 3, None])
    faults = [name for name, fault in FAULTS.items() if sampled or not fault.only_sampled]
    shape = {
        "finish": st.sampled_from([*["stop"] * 6, *sorted(FINISHES), None]),
        "chunk": st.integers(0, 3),
        "form": st.sampled_from(sorted(FORMS)),
        "versions": st.tuples(versions, versions),
        "annotated": st.booleans(),
        "calls": calls,
    }
    good = st.builds(Reply, count=st.integers(0, 12), **shape)
    wrong = st.builds(Reply, count=st.integers(2, 12), fault=st.sampled_from(faults), **shape)
    return st.one_of(good, good, wrong)
