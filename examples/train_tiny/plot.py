"""The curves of train_tiny as a picture: reward and tool use of each arm, one line per seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"trained": "#1b7f5c", "lr0": "#7a7a7a", "no_tool": "#c2571a"}
LABELS = {"trained": "GRPO", "lr0": "learning rate 0", "no_tool": "tool tells nothing"}


def plot(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what `train.play_arms` returned, one per seed, into the PNG `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    panels = (
        ("reward", "reward"),
        ("tool_use", "called the tool"),
        ("found", "opened the right box"),
    )
    for axis, (name, title) in zip(axes, panels, strict=True):
        for arm, colour in COLOURS.items():
            for number, run in enumerate(runs):
                curve = run["curves"][arm]
                label = LABELS[arm] if number == 0 else None
                axis.plot(curve["step"], curve[name], color=colour, lw=1.4, label=label)
        axis.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
    axes[0].axhline(1 / 8, color="black", lw=0.8, ls=":", label="guessing")
    axes[0].legend(frameon=False)
    figure.suptitle("held-out prompts, mean over 256 rollouts")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
