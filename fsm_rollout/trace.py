"""What a run looks like from outside: progress by status, the summary table, one sample's tokens.

Progress listens to the transitions; the rest reads finished requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from fsm_rollout.limits import TERMINAL, Status
from fsm_rollout.metrics import metrics_of
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample
from fsm_rollout.states.machine import Transition

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


class Summary(msgspec.Struct, frozen=True):
    """The figures of a finished run, and the table of them that people read."""

    metrics: dict[str, float]
    """of `metrics.metrics_of`"""

    @property
    def reward(self) -> float | None:
        """The mean over the requests that have one."""
        return self.metrics.get("rollout/reward/mean")

    def table(self, title: str = "") -> Table:
        """The figures, a row each."""
        table = Table("", "", title=title, show_header=False, title_justify="left")
        of = Counter(self.metrics)  # 0 for what there is not
        kept, reward = self.metrics.get("rollout/top_p_kept"), self.reward
        engine = _counts(self._under("engine/"))
        invalid = f"{of['rollout/invalid_calls']:.0f} invalid in all"
        for name, value in (
            ("requests", f"{of['rollout/requests']:.0f} in {of['rollout/attempts']:.0f} attempts"),
            ("status", _counts(self._under("rollout/status/"))),
            ("stop reason", _counts(self._under("rollout/stop_reason/"))),
            ("turns per request", f"{of['rollout/turns/mean']:.2f}"),
            ("tool calls per request", f"{of['rollout/tool_calls/mean']:.2f}, {invalid}"),
            ("tools", _counts(self._under("tools/")) or "nothing to report"),
            *([("engine", engine)] if engine else ()),
            *([("ids kept by top-p", f"{kept:.1f} per trained token")] if kept else ()),
            (
                "mean reward",
                "none" if reward is None else f"{reward:.3f} (of {of['rollout/reward/count']:.0f})",
            ),
            (
                "sampled tokens",
                f"{of['rollout/tokens/sampled']:.0f}, {of['perf/tokens_per_s']:.0f} per second",
            ),
            ("seconds", f"{of['perf/seconds']:.1f}"),
        ):
            table.add_row(name, value)
        return table

    def _under(self, start: str) -> dict[str, float]:
        """The counts whose names begin with `start`, without it; no rates."""
        return {
            name.removeprefix(start): n
            for name, n in self.metrics.items()
            if n and name.startswith(start) and not name.endswith("_rate")
        }


def summarise(requests: Iterable[Request], seconds: float) -> Summary:
    """Status, stop reason, turns, tool calls, reward and tokens per second of a finished run."""
    return Summary(metrics_of(requests, seconds=seconds))


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
    return ", ".join(f"{count:.10g} {name}" for name, count in ordered)
