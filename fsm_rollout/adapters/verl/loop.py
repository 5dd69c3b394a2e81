"""FsmAgentLoop: what verl makes of the YAML entry, once per trajectory.

    - name: fsm
      _target_: fsm_rollout.adapters.verl.FsmAgentLoop
      tools: [calculator]

It has the constructor and the `run` of verl's AgentLoopBase and is not one: that would build a
tokenization of verl's own for each trajectory, and refuse models that it does not know.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsm_rollout.adapters.tensors import trained
from fsm_rollout.adapters.verl.export import extra_fields, metrics_of, row_of, rows_of
from fsm_rollout.adapters.verl.player import player_of
from fsm_rollout.adapters.verl.settings import settings_of
from fsm_rollout.request import Request
from fsm_rollout.sample import Sample

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


class FsmAgentLoop:
    """Plays one trajectory with the parts that all trajectories of this process share."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        *,
        name: str = "fsm",
        tools: Any = None,
        **kwargs: Any,
    ) -> None:
        from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

        # verl gives its own tools under the name of the entry's `tools`: those are in its registry
        entry = _agent_loop_registry.get(name, {"name": name})
        loaded = getattr(tools, "tools", ())
        self._player = player_of(
            trainer_config.config, server_manager, tokenizer, loaded, settings_of(entry)
        )
        self._pad_id = pad_id_of(tokenizer)

    async def run(
        self, sampling_params: dict[str, Any], **columns: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The trajectory of a row with these `columns`: one output for V0, a list for V1.

        V1 gives each session a `session_id`; for it an ABORTED request has no output, and its
        siblings stay a group. V0 needs one, so there it has a stand-in with mask 0; its reward is
        0.0 where the rollout itself gives rewards. FsmAgentLoopManager does better: it knows the
        group.
        """
        [request] = await self._player.play(columns, sampling_params)
        if "session_id" in columns:
            return self.outputs(request, f"{columns['uid']}_{columns['session_id']}")
        reward = 0.0 if self._player.gives_rewards else None
        row, _ = row_of(request, pad_id=self._pad_id, reward=reward)
        sample_id = f"{self._player.run_id}-{request.samples[0].sample_id}"
        return output_of(self._player.leaves_rewards, request, row, sample_id)

    def outputs(self, request: Request, session: str) -> list[AgentLoopOutput]:
        """One output per sample, under the keys that V1 stores them by."""
        rows = rows_of(request, pad_id=self._pad_id)
        return [
            output_of(self._player.leaves_rewards, request, row, f"{session}_{number}")
            for number, row in enumerate(rows)
        ]


def output_of(
    leaves_rewards: bool, request: Request, sample: Sample, sample_id: str
) -> AgentLoopOutput:
    """One sample as verl's AgentLoopOutput. A reward of ours is final: verl's loop sees it."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    extra = extra_fields(request, sample, sample_id=sample_id)
    reward = None if leaves_rewards else sample.reward
    if reward is not None:
        extra["reward_extra_info"] = {"score": reward}
    log_probs, experts = sample.rollout_log_probs, sample.rollout_routed_experts
    return AgentLoopOutput(
        prompt_ids=sample.tokens[: sample.prompt_length].tolist(),
        response_ids=sample.tokens[sample.prompt_length :].tolist(),
        response_mask=trained(sample).tolist(),
        response_logprobs=None if log_probs is None else log_probs.tolist(),
        routed_experts=experts,
        reward_score=reward,
        num_turns=len(sample.turns) + 1,
        metrics=AgentLoopMetrics(**metrics_of(request, request.samples)),
        extra_fields=extra,
    )


def pad_id_of(tokenizer: Any) -> int:
    """What fills verl's tensors."""
    pad_id = tokenizer.pad_token_id
    return 0 if pad_id is None else int(pad_id)
