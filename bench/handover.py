"""What it costs to hand finished samples to a trainer: ours, memcpy, lists, and verl.

    python bench/handover.py --quick --json FILE     64 samples of 4k tokens
    python bench/handover.py --json FILE             256 samples of 32k tokens; 2 GB of memory
    python bench/handover.py --json FILE --verl .venv-verl/bin/python    and verl's post-processing

Figures are CPU microseconds per sample, page faults included, one thread. `memcpy` copies the
finished batch, the same bytes into memory as fresh as ours; `lists` is the pattern of trainers that
keep a rollout in Python lists: pad, `torch.tensor`, stack. It and verl, which takes lists too, are
measured on the first `--few` samples, since lists of all would need tens of gigabytes; their cost
per sample does not depend on it. All make the same tensors, which is checked. The variants take
turns; the minimum is what the code costs, the median what it costs here and now.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from bench.verl import VerlHandOver
from fsm_rollout.adapters.handover import require
from fsm_rollout.adapters.tensors import packed, padded, tensor
from fsm_rollout.limits import Limits, StopReason
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Machine
from fsm_rollout.states.table import Event

PAD_ID = 151_643
"""<|endoftext|>"""
PEERS = ("lists", "verl")
SAMPLED, OBSERVED = 768, 256
"""tokens of a turn, and of the observation behind it"""


def finished(index: int, prompt: int, response: int) -> Sample:
    """A sealed sample of alternating model turns and observations, up to an eighth shorter."""
    chance = np.random.default_rng(index)
    prompt, response = (int(n * (1 - chance.random() / 8)) for n in (prompt, response))
    request = Request(index=index, limits=Limits(max_context=prompt + response))
    request.set_prompt(chance.integers(1, 150_000, prompt, np.int32))
    machine = Machine()
    machine.fire(Event.GENERATE, request)
    meta = {"finish_reason": "stop", "temperature": 1.0, "weight_version": 1}
    while request.room:
        ids = chance.integers(1, 150_000, min(SAMPLED, request.room), np.int32)
        log_probs = -chance.random(len(ids), np.float32)
        request.append_response_tokens(ids, log_probs, meta_info=meta)
        ids = chance.integers(1, 150_000, min(OBSERVED, request.room), np.int32)
        request.append_response_tokens(ids, trainable=False)
    machine.fire(Event.TRUNCATE, request, StopReason.MAX_CONTEXT)
    request.reward = 1.0
    request.seal()
    return request.sample


class Widths(TypedDict):
    """The batch that all make."""

    pad_id: int
    prompt_length: int
    response_length: int


class Lists:
    """A sample as trainers keep it."""

    def __init__(self, sample: Sample) -> None:
        ids, start = sample.tokens.tolist(), sample.prompt_length
        log_probs = sample.rollout_log_probs
        assert log_probs is not None
        self.prompt, self.response = ids[:start], ids[start:]
        self.mask, self.log_probs = sample.loss_mask.tolist(), log_probs.tolist()
        self.reward = sample.reward or 0.0


def from_lists(rows: Sequence[Lists], widths: Widths) -> dict[str, torch.Tensor]:
    """Pad, make tensors, stack: the same batch as `padded`."""
    pad, P, R = widths["pad_id"], widths["prompt_length"], widths["response_length"]
    made: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        left, right = P - len(row.prompt), R - len(row.response)
        prompts = torch.tensor([pad] * left + row.prompt)
        responses = torch.tensor(row.response + [pad] * right)
        seen = torch.tensor([0] * left + [1] * (len(row.prompt) + len(row.response)) + [0] * right)
        scores = torch.zeros(R)
        scores[len(row.response) - 1] = row.reward
        for name, values in {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses]),
            "attention_mask": seen,
            "position_ids": (seen.cumsum(-1) - 1).clamp(min=0),
            "response_mask": torch.tensor(row.mask + [0] * right),
            "rollout_log_probs": torch.tensor(row.log_probs + [0.0] * right),
            "rm_scores": scores,
        }.items():
            made.setdefault(name, []).append(values)
    return {name: torch.stack(values) for name, values in made.items()}


def copied(batch: dict[str, torch.Tensor]) -> list[npt.NDArray[Any]]:
    """memcpy of the whole batch into fresh memory, from numpy's allocator as ours is."""
    return [values.numpy().copy() for values in batch.values()]


def microseconds(action: Callable[[], object], count: int) -> float:
    """CPU time per sample; what the action made is let go after the clock has stopped."""
    started = time.process_time()
    made = action()
    seconds = time.process_time() - started
    del made
    return seconds / count * 1e6


def check_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """The variants make the same tensors, or the figures mean nothing."""
    for name, values in ours.items():
        if not torch.equal(values, theirs[name].to(values.dtype)):
            raise AssertionError(f"{name} differs")


def variants(
    samples: Sequence[Sample], widths: Widths, few: int, verl: VerlHandOver | None
) -> dict[str, Callable[[], float]]:
    """By the name of the figure: run once, CPU microseconds per sample."""
    count, lists = len(samples), [Lists(sample) for sample in samples[:few]]
    wide, long = padded(samples, **widths), packed(samples)
    check_equal(padded(samples[:few], **widths), from_lists(lists, widths))
    measured: dict[str, Callable[[], float]] = {
        "padded": lambda: microseconds(lambda: padded(samples, **widths), count),
        "padded_memcpy": lambda: microseconds(lambda: copied(wide), count),
        "packed": lambda: microseconds(lambda: packed(samples), count),
        "packed_memcpy": lambda: microseconds(lambda: copied(long), count),
        "require": lambda: microseconds(lambda: require(samples), count),
        "lists": lambda: microseconds(lambda: from_lists(lists, widths), len(lists)),
        "one_array": lambda: microseconds(lambda: [tensor(s.tokens) for s in samples], count),
    }
    if verl is not None:
        made = verl.batch([vars(row) for row in lists])
        check_equal(padded(samples[:few], **widths), made)
        measured["verl"] = verl.microseconds
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="64 samples of 4k tokens")
    parser.add_argument("--few", type=int, default=16, help="samples for lists and verl")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verl", help="the python of verl's environment")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()
    count, length = (64, 4_096) if options.quick else (256, 32_768)
    prompt = length // 16
    widths = Widths(pad_id=PAD_ID, prompt_length=prompt, response_length=length - prompt)
    samples = [finished(index, prompt, length - prompt) for index in range(count)]
    with ExitStack() as stack:
        verl = None
        if options.verl:
            verl = stack.enter_context(VerlHandOver(options.verl, **widths))
        measured: dict[str, list[float]] = {}
        named = variants(samples, widths, options.few, verl)
        for repeat in range(options.repeats):  # who comes first pays for the huge pages of all
            for name in list(named)[:: 1 if repeat % 2 else -1]:
                measured.setdefault(name, []).append(named[name]())
    best = {name: min(times) for name, times in measured.items()}
    ratios = {
        "padded / memcpy": best["padded"] / best["padded_memcpy"],
        "packed / memcpy": best["packed"] / best["packed_memcpy"],
        **{f"{name} / padded": best[name] / best["padded"] for name in PEERS if name in best},
    }
    report = {
        "samples": count,
        "tokens": length,
        "us": {name: round(value, 1) for name, value in best.items()},
        "median_us": {n: round(statistics.median(t), 1) for n, t in measured.items()},
        "ratio": {name: round(value, 2) for name, value in ratios.items()},
        "target": {"padded / memcpy": 3, "packed / memcpy": 3},
        "unit": "CPU microseconds per sample, minimum over repeats",
        "repeats": options.repeats,
        "versions": {name: version(name) for name in ("fsm-rollout", "numpy", "torch")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load_average_before": [round(value, 2) for value in load],
        "load_average_after": [round(value, 2) for value in os.getloadavg()],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"CPU microseconds per sample of {length} tokens, {count} samples; minimum (median)")
    for name in named:
        value = best[name]
        print(f"{name:15}{value:12.1f} ({statistics.median(measured[name]):.1f})")
    for name, ratio in ratios.items():
        print(f"{name:18}{ratio:9.2f}")


if __name__ == "__main__":
    main()
