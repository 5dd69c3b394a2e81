"""Names: what verl, slime and TRL call those of our metrics that they log too."""

from __future__ import annotations

from collections.abc import Mapping

from fsm_rollout.errors import ConfigError


def named(metrics: Mapping[str, float], trainer: str) -> dict[str, float]:
    """Those of `metrics` that `trainer` ("verl", "slime", "trl") logs too, under its names.

    What counts by another rule there is listed in docs/reference/metrics.md. Raises ConfigError for
    another trainer.
    """
    if trainer not in NAMES:
        raise ConfigError(f"no names of {trainer!r}; known: {', '.join(NAMES)}")
    found: dict[str, float] = {}
    for theirs, ours in NAMES[trainer].items():
        if ours in metrics:
            found[theirs] = metrics[ours]
        elif ours.endswith("/*"):
            start, replaced = ours[:-1], theirs[:-1]
            found |= {
                replaced + name.removeprefix(start): value
                for name, value in metrics.items()
                if name.startswith(start)
            }
    return found


def _each(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}/{what}": f"{ours}/{what}" for what in ("mean", "min", "max")}


NAMES: Mapping[str, Mapping[str, str]] = {
    "verl": {
        **_each("response_length", "rollout/response_length"),
        "response_length/clip_ratio": "rollout/clip_ratio",
        "response/aborted_ratio": "rollout/abort_rate",
        **_each("prompt_length", "rollout/prompt_length"),
        **_each("num_turns", "rollout/turns"),
        **_each("tool_call_counts", "rollout/tool_calls"),
        **_each("critic/score", "rollout/reward"),
        **_each("critic/rewards", "rollout/reward"),
        **_each("timing_s/agent_loop/generate_sequences", "perf/generate_s"),
        **_each("timing_s/agent_loop/tool_calls", "perf/tool_s"),
        "timing_s/gen": "perf/seconds",
        "rollout_corr/kl": "log_prob_gap/kl_k1",
        "rollout_corr/k3_kl": "log_prob_gap/kl_k3",
    },
    "slime": {
        **_each("rollout/response_len", "rollout/trained_length"),
        "rollout/response_len/median": "rollout/trained_length/p50",
        "rollout/truncated_ratio": "rollout/truncated_ratio",
        "rollout/raw_reward": "rollout/reward/mean",
        "rollout/top_p_kept_vocab_per_token": "rollout/top_p_kept",
        "rollout/prefix_cache_hit_rate": "engine/cache_hit_rate",
        "perf/rollout_time": "perf/seconds",
        **_each("perf/non_generation_time", "perf/tool_s"),
        "perf/non_generation_time/median": "perf/tool_s/p50",
    },
    "trl": {
        "completions/mean_length": "rollout/trained_length/mean",
        "completions/min_length": "rollout/trained_length/min",
        "completions/max_length": "rollout/trained_length/max",
        "completions/clipped_ratio": "rollout/clip_ratio",
        "tools/call_frequency": "rollout/tool_calls/mean",
        "tools/failure_frequency": "tools/failure_rate",
        "reward": "rollout/reward/mean",
        "reward_std": "rollout/reward/std",
        "frac_reward_zero_std": "rollout/reward/zero_std_groups",
        "rewards/*": "rollout/reward_part/*",
        "sampling/sampling_logp_difference/mean": "log_prob_gap/mean",
        "sampling/sampling_logp_difference/max": "log_prob_gap/max",
        **_each("sampling/importance_sampling_ratio", "log_prob_gap/ratio"),
    },
}
"""theirs from ours, by trainer; /* stands for the rest of a name"""
