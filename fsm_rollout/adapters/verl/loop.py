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

from fsm_rollout.adapters.handover import trained
from fsm_rollout.adapters.verl.export import (
    NO_REWARD,
    extra_fields,
    metrics_of,
    not_handed,
    row_of,
    rows_of,
    several,
    stand_in,
)
from fsm_rollout.adapters.verl.player import Player, player_of
from fsm_rollout.adapters.verl.settings import settings_of
from fsm_rollout.errors import HandOverError
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

        # verl's own tools come in place of the entry's `tools`; the registry has the whole entry
        settings = settings_of(_agent_loop_registry.get(name, {"name": name}))
        loaded = getattr(tools, "tools", ())
        self._player = player_of(trainer_config.config, server_manager, tokenizer, loaded, settings)
        self._player.check_plays_alone()

    async def run(
        self, sampling_params: dict[str, Any], **columns: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The trajectory of a row with these `columns`: one output for V0, a list for V1.

        V1 gives each session a `session_id` and a step. There an ABORTED request has no output,
        nor one whose reward, ours to give, is None; its siblings remain a group. V0 takes one row
        of each: here a stand-in with mask 0, and reward 0.0 where the rollout gives rewards.
        FsmAgentLoopManager knows the group, and does better.
        Raises HandOverError in V0 for a request of several samples.
        """
        [request] = await self._player.play(columns, sampling_params)
        lacks_reward = self._player.lacks_reward(request, columns)
        if lacks_reward:
            request.error = request.error or NO_REWARD
            not_handed(request.sample, request.error)
        if columns.keys() >= {"session_id", "global_steps"}:
            outputs = [] if lacks_reward else outputs_of(self._player, request)
            for output in outputs:  # verl makes an array of ints of them
                for end in ("min_global_steps", "max_global_steps"):
                    if output.extra_fields[end] is None:
                        output.extra_fields[end] = columns["global_steps"]
            return outputs
        if len(request.rows) > 1:  # nobody would notice a batch of stand-ins alone
            raise HandOverError(several(request, len(request.rows)))
        sample, has_outcome = row_of(request, pad_id=self._player.pad_id)
        if lacks_reward and has_outcome:
            sample, has_outcome = stand_in(sample, request, self._player.pad_id), False
        output = output_of(self._player, request, sample)
        output.extra_fields["is_stand_in"] = not has_outcome
        if not has_outcome and self._player.gives_rewards:
            _reward(output, 0.0)  # without one, verl would drop the rewards of the whole batch
        return output


def outputs_of(player: Player, request: Request) -> list[AgentLoopOutput]:
    """One output for each sample of a request."""
    return [output_of(player, request, row) for row in rows_of(request, pad_id=player.pad_id)]


def output_of(player: Player, request: Request, sample: Sample) -> AgentLoopOutput:
    """One sample as verl's AgentLoopOutput.

    Its reward is the request's: V1 compares the last outputs of sessions, and gives the others
    their reward. Where there is one, verl's reward loop is not asked.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    log_probs = sample.rollout_log_probs
    output = AgentLoopOutput(
        prompt_ids=sample.tokens[: sample.prompt_length].tolist(),
        response_ids=sample.tokens[sample.prompt_length :].tolist(),
        response_mask=trained(sample).tolist(),
        response_logprobs=None if log_probs is None else log_probs.tolist(),
        num_turns=len(sample.turns) + 1,
        metrics=AgentLoopMetrics(**metrics_of(request)),
        extra_fields=extra_fields(request, sample, drafts=player.drafts),
    )
    if sample.rollout_routed_experts is not None:
        output.routed_experts = sample.rollout_routed_experts
    if player.gives_rewards and request.reward is not None:
        _reward(output, request.reward)
    return output


def _reward(output: AgentLoopOutput, reward: float) -> None:
    output.reward_score = reward
    output.extra_fields["reward_extra_info"] = {"score": reward}
