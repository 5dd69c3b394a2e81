"""What a run looks like from outside: progress by status, the summary table, one sample's tokens.

Progress listens to the transitions; the rest reads finished requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from types import TracebackType

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from fsm_rollout.limits import TERMINAL, Status
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Transition

_ENGINE = "engine/"
"""begins the names of what the engine counted, in Request.metrics"""
_SHORT = {
    Status.PENDING: "pending",
    Status.GENERATING: "generating",
    Status.TOOL_CALLING: "in tools",
    Status.COMPLETED: "completed",
    Status.TRUNCATED: "truncated",
    Status.ABORTED: "aborted",
}


class Progress:
    """How many requests stand in which status, as a bar. A context and a listener."""

    def __init__(
        self, total: int, *, title: str = "rollout", console: Console | None = None
    ) -> None:
        self.statuses: Counter[Status] = Counter({Status.PENDING: total})
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[statuses]}"),
            console=console,
        )
        self._task = self._bar.add_task(title, total=total, statuses="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, transition: Transition) -> None:
        if transition.request.is_child:  # no rollout of its own
            return
        self.statuses[transition.source] -= 1
        self.statuses[transition.dest] += 1
        counts = self.statuses
        shown = ", ".join(f"{counts[s]} {word}" for s, word in _SHORT.items() if counts[s])
        done = sum(counts[status] for status in TERMINAL)
        self._bar.update(self._task, completed=done, statuses=shown)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a finished run."""

    requests: int
    statuses: dict[str, int]
    stop_reasons: dict[str, int]
    attempts: int
    turns: float
    """mean per request"""
    tool_calls: float
    """mean per request"""
    invalid_calls: int
    reward: float | None
    """mean over the requests that have one"""
    rewarded: int
    tool_metrics: dict[str, float]
    """summed over the requests: tool_errors, tool_timeouts …"""
    engine_metrics: dict[str, float]
    """summed over the requests: prompt_tokens, cached_tokens …"""
    kept_per_trained_token: float | None
    """mean number of ids that top-p kept, where the engine reports it"""
    sampled_tokens: int
    seconds: float
    tokens_per_s: float

    def table(self, title: str = "") -> Table:
        """The figures, a row each."""
        table = Table("", "", title=title, show_header=False, title_justify="left")
        kept = self.kept_per_trained_token
        reward = "none" if self.reward is None else f"{self.reward:.3f} (of {self.rewarded})"
        for name, value in (
            ("requests", f"{self.requests} in {self.attempts} attempts"),
            ("status", _counts(self.statuses)),
            ("stop reason", _counts(self.stop_reasons)),
            ("turns per request", f"{self.turns:.2f}"),
            (
                "tool calls per request",
                f"{self.tool_calls:.2f}, {self.invalid_calls} invalid in all",
            ),
            ("tools", _counts(self.tool_metrics) or "nothing to report"),
            *([("engine", _counts(self.engine_metrics))] if self.engine_metrics else ()),
            *([("ids kept by top-p", f"{kept:.1f} per trained token")] if kept else ()),
            ("mean reward", reward),
            ("sampled tokens", f"{self.sampled_tokens}, {self.tokens_per_s:.0f} per second"),
            ("seconds", f"{self.seconds:.1f}"),
        ):
            table.add_row(name, value)
        return table


def summarise(requests: Iterable[Request], seconds: float) -> Summary:
    """Count `requests` by status, stop reason, turns, tool calls, reward and tokens per second."""
    done = list(requests)
    samples = [s for request in done for s in (request.rows or request.samples)]
    rewards = [request.reward for request in done if request.reward is not None]
    metrics: Counter[str] = Counter()
    for request in done:
        metrics.update(request.metrics)
    sampled = sum(sample.columns.num_sampled for sample in samples)
    return Summary(
        requests=len(done),
        statuses=dict(Counter(str(request.status) for request in done)),
        stop_reasons=dict(Counter(str(request.stop_reason) for request in done)),
        attempts=sum(request.attempt for request in done),
        turns=fmean(request.num_turns for request in done) if done else 0.0,
        tool_calls=fmean(request.num_tool_calls for request in done) if done else 0.0,
        invalid_calls=sum(request.num_invalid_calls for request in done),
        reward=fmean(rewards) if rewards else None,
        rewarded=len(rewards),
        tool_metrics={name: n for name, n in metrics.items() if not name.startswith(_ENGINE)},
        engine_metrics={
            name.removeprefix(_ENGINE): n for name, n in metrics.items() if name.startswith(_ENGINE)
        },
        kept_per_trained_token=kept_per_trained_token(samples),
        sampled_tokens=sampled,
        seconds=seconds,
        tokens_per_s=sampled / seconds if seconds else 0.0,
    )


def kept_per_trained_token(samples: Iterable[Sample]) -> float | None:
    """The mean number of ids that top-p kept, over trained tokens; None: there is none to average.

    Samples that were taken out of training or did not report it are left out.
    """
    kept = trained = 0
    for sample in samples:
        offsets = sample.rollout_top_p_token_offsets
        if offsets is not None and not sample.remove_sample:
            mask = sample.loss_mask.astype(bool)
            kept += int(np.diff(offsets)[mask].sum())
            trained += int(mask.sum())
    return kept / trained if trained else None


def token_strip(
    sample: Sample, pieces: Callable[[Sequence[int]], Sequence[str]], *, prompt_tail: int = 16
) -> Text:
    """The sample token by token: trained ones in colour with their log-prob, the others dim.

    Green is likely, yellow less so, red a surprise (log-prob below -3); a dot is a log-prob of 0.
    `pieces` is `Codec.pieces`.
    """
    texts = pieces(sample.tokens.tolist())
    log_probs, mask, start = sample.rollout_log_probs, sample.loss_mask, sample.prompt_length
    strip = Text()
    if start > prompt_tail:
        strip.append(f"… {start - prompt_tail} prompt tokens … ", style="dim italic")
    for text in texts[max(0, start - prompt_tail) : start]:
        strip.append(_shown(text), style="dim")
    for position, text in enumerate(texts[start:]):
        if not mask[position] or log_probs is None:
            strip.append(_shown(text), style="bold" if mask[position] else "dim")
            continue
        value = float(log_probs[position])
        colour = "green" if value > -0.5 else "yellow" if value > -3 else "red"
        strip.append(text.replace("\n", "⏎"), style=f"bold {colour}")
        shown = "·" if value > -0.005 else f"{value:.2f}"
        strip.append(shown + ("\n" if text.endswith("\n") else " "), style=f"dim {colour}")
    return strip


def _shown(text: str) -> str:
    return text.replace("\n", "⏎\n")


def _counts(counts: Mapping[str, float]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:g} {name}" for name, count in ordered)
