"""Verify: does a finished sample hold what it claims? `fsm-rollout verify` calls it.

The half that needs the model loads it and its tokenizer with plain Hugging Face code and shares
nothing with any engine or codec: a fault that one has in common with its check would go unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fsm_rollout.dataset import numbered_samples
from fsm_rollout.errors import ConfigError
from fsm_rollout.invariants import violations
from fsm_rollout.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Difference:
    """One sampled token whose recorded and recomputed log-probs were compared."""

    sample: int  # number of the row, from 0
    turn: int  # number of the turn, from 0
    position: int  # response-relative
    recorded: float
    recomputed: float

    def __str__(self) -> str:
        return (
            f"line {self.sample + 1}, turn {self.turn}, response position {self.position}: "
            f"recorded {self.recorded:.6f}, recomputed {self.recomputed:.6f}"
        )


@dataclass(frozen=True, slots=True)
class LogProbReport:
    """|recorded - recomputed| over all sampled tokens of all samples, in nats."""

    samples: int
    tokens: int
    largest: float  # infinite when a recorded log-prob is not finite
    mean: float
    p99: float
    worst: Difference


def recompute_log_probs(
    sample_rows: Iterable[Mapping[str, Any]], model_dir: str | Path, *, dtype: str = "float32"
) -> LogProbReport:
    """Compare every sampled token's log-prob with one plain forward pass of the model per sample.

    `sample_rows` are `Sample.to_dict()` rows. A sampled token lies in a model turn, outside its
    forced spans; whether it is trained does not matter. Its log-prob is log_softmax(logits / T)
    over the full vocabulary in float32, T the turn's recorded temperature (0: T = 1).

    Raises ConfigError when there is no sample or no sampled token, when a sample has no log-probs,
    or a turn no temperature, and when the model cannot be loaded or run on the tokens. The
    invariants are taken for granted: check them first.
    """
    model = _load(model_dir, dtype)
    differences: list[npt.NDArray[np.float64]] = []
    worst, largest = None, -1.0
    samples = 0
    for sample, row in enumerate(sample_rows):
        samples += 1
        positions, turns, temperatures = _sampled(row, sample)
        if not positions.size:
            continue
        recorded = np.asarray(row["rollout_log_probs"], np.float64)[positions]
        try:
            recomputed = _forward(model, row, positions, temperatures)
        except (IndexError, RuntimeError) as error:
            raise ConfigError(
                f"sample {sample}: the model {model_dir} cannot be run on its {len(row['tokens'])} "
                f"tokens, the largest is {max(row['tokens'])}: {error}; give the model that sampled"
            ) from error
        difference = np.abs(recorded - recomputed)
        difference[~np.isfinite(difference)] = np.inf
        differences.append(difference)
        at = int(difference.argmax())
        if difference[at] > largest:
            largest = float(difference[at])
            worst = Difference(
                sample,
                int(turns[at]),
                int(positions[at]),
                float(recorded[at]),
                float(recomputed[at]),
            )
    if worst is None:
        raise ConfigError(
            f"nothing to verify: {samples} samples without a sampled token; was the run aborted?"
        )
    every = np.concatenate(differences)
    p99 = float(np.quantile(every, 0.99, method="higher"))
    return LogProbReport(samples, len(every), largest, float(every.mean()), p99, worst)


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify_samples` found."""

    samples: int
    tokens: int
    violations: tuple[str, ...]
    responses: int | None  # compared with what their tokens decode to; None: there was no tokenizer
    log_probs: LogProbReport | None
    tolerance: float

    @property
    def passed(self) -> bool:
        """No invariant is broken and no log-prob is further off than the tolerance."""
        off = self.log_probs is not None and not self.log_probs.largest <= self.tolerance
        return not self.violations and not off

    def text(self) -> str:
        """The report in a few lines; at most ten violations are spelled out."""
        lines = [
            f"{self.samples} samples, {self.tokens} sampled tokens",
            f"invariants: {len(self.violations)} violations",
            *(f"  {violation}" for violation in self.violations[:10]),
        ]
        if found := self.log_probs:
            decoded = "not checked, no tokenizer can be loaded from there"
            lines += [
                f"responses: {decoded if self.responses is None else f'{self.responses} decoded'}",
                f"log-probs: largest difference {found.largest:.2e} (allowed {self.tolerance:.0e})",
                f"  mean {found.mean:.1e}, p99 {found.p99:.1e}",
                f"  largest at {found.worst}",
            ]
        return "\n".join([*lines, "passed" if self.passed else "FAILED"])


def verify_samples(
    path: Path,
    model_dir: str | Path | None = None,
    *,
    tolerance: float = 1e-3,
    dtype: str = "float32",
) -> Report:
    """Check every invariant of every sample of a JSONL file, and that they are of one run.

    With a model, and when nothing is broken: that each `response` is what its tokens decode to, if
    a tokenizer is there, and each log-prob what the model gives.

    Raises ConfigError, naming file and line, when the file holds no sample, no sampled token, or
    what is no sample at all.
    """
    numbered = numbered_samples(path)
    samples = list(numbered.values())
    tokens = sum(sample.columns.num_sampled for sample in samples)
    if not tokens:
        raise ConfigError(
            f"{path}: {len(samples)} samples, {tokens} sampled tokens: nothing to verify"
        )
    found = [
        (line, str(violation))
        for line, sample in numbered.items()
        for violation in violations(sample, at_rest=True)
    ]
    found += _of_one_run(numbered)
    responses, log_probs = None, None
    if model_dir is not None and not found:
        if (tokenizer := _tokenizer(model_dir)) is not None:
            responses = sum(sample.response is not None for sample in samples)
            found += _misread(numbered, tokenizer)
        rows = (sample.to_dict() for sample in samples)
        log_probs = recompute_log_probs(rows, model_dir, dtype=dtype)
    broken = tuple(
        f"line {line}, sample {numbered[line].sample_id}: {what}" for line, what in found
    )
    return Report(len(samples), tokens, broken, responses, log_probs, tolerance)


def _of_one_run(samples: Mapping[int, Sample]) -> Iterator[tuple[int, str]]:
    """Every sample has an id of its own; all of them have log-probs, or none."""
    ids: dict[str, int] = {}
    kinds: dict[bool, int] = {}
    for line, sample in samples.items():
        if (before := ids.setdefault(sample.sample_id, line)) != line:
            yield line, f"line {before} has the same sample_id"
        kinds.setdefault(sample.columns.has_log_probs, line)
    if len(kinds) == 2:
        yield kinds[False], f"R3.3: no log-probs, but line {kinds[True]} has some"


def _tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir)
    except Exception:  # a directory of weights alone, or whatever broken files raise
        return None
    return tokenizer


def _misread(
    samples: Mapping[int, Sample], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, str]]:
    """Each `response` that is not what its tokens say; one that was never decoded is none."""
    for line, sample in samples.items():
        said = str(
            tokenizer.decode(
                sample.columns.response_ids(),
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )
        if sample.response not in (None, said):
            pairs = enumerate(zip_longest(sample.response, said))
            at = next(number for number, (has, says) in pairs if has != says)
            yield (
                line,
                f"R3.6: the response goes on with {sample.response[at : at + 20]!r} at character "
                f"{at}, its tokens with {said[at : at + 20]!r}",
            )


def _sampled(
    row: Mapping[str, Any], sample: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Response position, turn number and temperature of every sampled token, [N] each."""
    length = len(row["tokens"]) - row["prompt_length"]
    log_probs = row["rollout_log_probs"]
    if log_probs is None or len(log_probs) != length or row["prompt_length"] < 1:
        found = "none" if log_probs is None else len(log_probs)
        raise ConfigError(
            f"sample {sample}: rollout_log_probs has {found} values for {length} response tokens "
            f"behind {row['prompt_length']} prompt tokens"
        )
    positions: list[int] = []
    turns: list[int] = []
    temperatures: list[float] = []
    for number, turn in enumerate(row["turns"]):
        forced = {at for start, stop in turn["forced"] for at in range(start, stop)}
        sampled = [at for at in range(turn["start"], turn["stop"]) if at not in forced]
        if turn["kind"] != "model" or not sampled:
            continue
        where = f"sample {sample}, turn {number}"
        if turn["temperature"] is None:
            raise ConfigError(f"{where}: no temperature is recorded, so none can be recomputed")
        if turn["log_prob_kind"] not in (None, "scaled"):
            raise ConfigError(
                f"{where}: log-probs of kind {turn['log_prob_kind']!r} cannot be recomputed, only "
                "'scaled' ones: log_softmax(logits / temperature) over the full vocabulary"
            )
        positions += sampled
        turns += [number] * len(sampled)
        temperatures += [turn["temperature"] or 1.0] * len(sampled)
    return (
        np.array(positions, np.int64),
        np.array(turns, np.int64),
        np.array(temperatures, np.float32),
    )


def _load(model_dir: str | Path, dtype: str) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ConfigError(
            f"dtype {dtype!r} is none that a model runs in; give float32, bfloat16 or float16"
        )
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=kind).eval()
    except Exception as error:  # what its files and its code raise
        why = " ".join(str(error).split())
        raise ConfigError(
            f"cannot load the model {model_dir} as {dtype}: {why}; give its directory"
        ) from error
    return model


def _forward(
    model: PreTrainedModel,
    row: Mapping[str, Any],
    positions: npt.NDArray[np.int64],
    temperatures: npt.NDArray[np.float32],
) -> npt.NDArray[np.float64]:
    """Log-prob of the token at each response position, [N]."""
    import torch

    at = torch.from_numpy(positions) + row["prompt_length"]
    ids = torch.tensor(row["tokens"][: int(at[-1]) + 1])
    with torch.inference_mode():
        logits = model(input_ids=ids[None], logits_to_keep=at - 1, use_cache=False).logits[0]
        scaled = logits.float() / torch.from_numpy(temperatures)[:, None]
        log_probs = scaled.log_softmax(-1).gather(1, ids[at][:, None])[:, 0]
    found: npt.NDArray[np.float64] = log_probs.double().numpy()
    return found
