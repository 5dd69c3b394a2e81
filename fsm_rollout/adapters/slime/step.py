"""A rollout step as a whole, for --rollout-function-path: prompts in, a batch of groups out.

slime runs it in its own event loop. What differs from slime's: a group whose samples were aborted
goes back and is never trained; what is not needed any more is cancelled at once, its tools and
reward calls too; a failed sample does not end the step. Evaluation is slime's, which plays through
`generate`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from numbers import Real
from typing import Any

from fsm_rollout.adapters.slime import record
from fsm_rollout.adapters.slime.config import sampling_of
from fsm_rollout.adapters.slime.player import Player, ending, generate, player_of
from fsm_rollout.adapters.slime.tracker import PLAYED, alarm_of, of_evaluation
from fsm_rollout.adapters.slime.trainer import part_of
from fsm_rollout.errors import ConfigError
from fsm_rollout.failures import describe, log_failure, shown
from fsm_rollout.metrics import Facts

logger = logging.getLogger(__name__)

_ENDING_S, _ABORT_AGAIN_S = 5.0, 1.0
"""for what was aborted to come back, then it is cancelled; and until it is aborted again"""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One step: `rollout_batch_size` groups of `n_samples_per_prompt`, sorted by index.

    Returns slime's RolloutFnTrainOutput, or with `evaluation` its RolloutFnEvalOutput. Groups that
    were interrupted go back to `data_source`. Without flags, `args` None, there is no policy: a
    group that is over stays as it is, and one that is not is FAILED.
    """
    args = Namespace() if args is None else args
    if evaluation and getattr(args, "eval_datasets", None):
        return _evaluation(args, rollout_id, data_source)
    groups, played, metrics = part_of("run", "utils.async_utils")(
        _step(args, rollout_id, data_source)
    )
    if evaluation:  # of no data set, so of the next rows
        samples = list(_flat(groups))
        rows = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [record.is_status(sample, "truncated") for sample in samples],
            "samples": samples,
        }
        return part_of("RolloutFnEvalOutput", "rollout.base_types")(data={"rows": rows})
    if path := getattr(args, "rollout_sample_filter_path", None):
        part_of("load_function", "utils.misc")(path)(args, groups)
    if path := getattr(args, "rollout_all_samples_process_path", None):
        part_of("load_function", "utils.misc")(path)(args, played, data_source)
    return part_of("RolloutFnTrainOutput", "rollout.base_types")(samples=groups, metrics=metrics)


def _evaluation(args: Any, rollout_id: int, data_source: Any) -> Any:
    """slime's own, which plays through `generate`, with our metrics."""
    name = "custom_generate_function_path"
    if not all(getattr(args, name, None) or getattr(s, name, None) for s in args.eval_datasets):
        raise ConfigError(
            "an evaluation needs --custom-generate-function-path "
            "fsm_rollout.adapters.slime.generate: slime's own evaluation plays through it"
        )
    ended: list[Facts] = []
    before = PLAYED.set(ended)  # slime's loop inherits it
    try:
        theirs = part_of("generate_rollout", "rollout.sglang_rollout")
        output = theirs(args, rollout_id, data_source, evaluation=True)
    finally:
        PLAYED.reset(before)
    output.metrics = {**(output.metrics or {}), **of_evaluation(args, ended)}
    return output


async def _step(
    args: Any, rollout_id: int, data_source: Any
) -> tuple[list[Any], list[Any], dict[str, float]]:
    """The groups of the batch, all that were played to their end, and the step's metrics."""
    target, started = getattr(args, "rollout_batch_size", None) or 1, time.monotonic()
    alarm = alarm_of(args)
    ended: list[Facts] = []
    PLAYED.set(ended)  # the tasks below inherit it
    ask_for = getattr(args, "over_sampling_batch_size", None) or target
    params, drops = _sampling_params(args), _dynamic_filter(args)
    kept: list[Any] = []
    played: list[Any] = []
    dropped: Counter[str] = Counter()
    aborts: Counter[int] = Counter()
    running: dict[asyncio.Task[None], list[Any]] = {}
    try:
        while len(kept) < target:
            while len(kept) + len(running) < target:
                groups = data_source.get_samples(ask_for)
                if not groups:
                    raise ConfigError("the data source has no more samples")
                _mask_earlier_steps(args, rollout_id, groups)
                running |= {asyncio.create_task(_play(args, g, params)): g for g in groups}
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                remaining = len(kept) + len(running)
                group = running.pop(task)
                task.result()
                if _is_aborted(group):
                    _give_back(args, data_source, group, aborts)
                    continue
                played.append(group)
                if reason := drops(group, remaining, target):
                    dropped[reason] += 1
                else:
                    kept.append(group)
        spare = kept[target:]
        del kept[target:]
        if getattr(args, "partial_rollout", False):
            with ending():
                await _interrupt(player_of(args, sampling_of(params).stop), running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if getattr(args, "partial_rollout", False):
        _keep_for_later(rollout_id, data_source, [*spare, *running.values()])
    metrics: dict[str, float] = {
        **alarm.watch(ended, seconds=time.monotonic() - started),
        **{f"rollout/dynamic_filter/drop_{reason}": n for reason, n in dropped.items()},
        "rollout/failed": sum(record.is_status(sample, "failed") for sample in _flat(kept)),
        "rollout/aborted_groups": aborts.total(),
    }
    return sorted(_even(kept), key=_index), sorted(played, key=_index), metrics


async def _play(args: Any, group: list[Any], params: Mapping[str, Any]) -> None:
    """Play the samples of a prompt that are not over yet, in place, and have them scored."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for place in range(len(group)):
                tasks.create_task(_play_one(args, group, place, params))
    except BaseExceptionGroup as errors:  # a set-up that cannot work, or a bug
        raise errors.exceptions[0] from errors
    if getattr(args, "group_rm", False) and not _is_aborted(group):
        await _score_group(args, group)


async def _play_one(args: Any, group: list[Any], place: int, params: Mapping[str, Any]) -> None:
    sample = group[place]
    if not isinstance(sample, list) and record.is_status(sample, "pending", "aborted"):
        path = getattr(args, "custom_generate_function_path", None)
        play = part_of("load_function", "utils.misc")(path) if path else generate
        what = "the generate function"
        try:
            group[place] = await play(args, sample, dict(params))
            if getattr(args, "rollout_sample_hook_path", None):
                what = "a sample hook"
                hooks = part_of("apply_rollout_sample_hooks", "rollout.sample_hooks")
                group[place] = await hooks(args, group[place], evaluation=False)
        except ConfigError:
            raise
        except Exception as error:  # others' code: it costs the sample
            how = f"raised {describe(error)}"
            log_failure(logger, f"sample {sample.index}", what, how, error)
            record.fail(sample, f"{what} {how}", args)
            group[place] = sample
    if not getattr(args, "group_rm", False):
        await _score(args, group[place])


async def _score(args: Any, played: Any) -> None:
    """slime's reward model, for finished samples without a reward; its fault costs the sample."""
    for sample in _flat(played):
        if sample.reward is None and not record.is_status(sample, "aborted"):
            try:
                sample.reward = await part_of("async_rm", "rollout.rm_hub")(args, sample)
            except Exception as error:
                where, how = f"sample {sample.index}", f"failed: {describe(error)}"
                log_failure(logger, where, "the reward model", how, error)
                record.fail(sample, f"the reward model failed: {shown(error)}", args)
        _check_reward(args, sample)


def _check_reward(args: Any, sample: Any) -> None:
    """A finished sample has a reward, or the filters of the step would fall over it.

    What is no number is left alone: a distillation keeps the teacher's answer there.
    """
    is_over = not record.is_status(sample, "aborted", "pending", "failed")
    found, key = sample.reward, getattr(args, "reward_key", None)
    if key and isinstance(found, Mapping):
        found = found.get(key)  # slime's filters and metrics look it up, and want a number
    is_number = found is None or isinstance(found, Real)
    if is_over and is_number and record.reward_value(sample, args) is None:
        how = f"said {sample.reward!r}, which is no finite number"
        what = "the reward model"
        log_failure(logger, f"sample {sample.index}", what, how, place="no finite number")
        record.fail(sample, f"{what} {how}", args)


async def _score_group(args: Any, played: list[Any]) -> None:
    samples = list(_flat(played))
    scored = [sample for sample in samples if not record.is_status(sample, "failed")]
    if not scored:
        return
    score: Callable[..., Awaitable[list[Any]]] = part_of("batched_async_rm", "rollout.rm_hub")
    try:
        rewards = await score(args, scored)
        for sample, reward in zip(scored, rewards, strict=True):
            sample.reward = reward
            _check_reward(args, sample)
    except Exception as error:
        where, how = f"group {samples[0].group_index}", f"failed: {describe(error)}"
        log_failure(logger, where, "the reward model", how, error)
        for sample in scored:
            record.fail(sample, f"the reward model failed: {shown(error)}", args)


async def _interrupt(player: Player, running: Mapping[asyncio.Task[None], Any]) -> None:
    """Partial rollout: what still runs stops where it is, and goes on in a later step."""
    ends = time.monotonic() + _ENDING_S
    late: set[asyncio.Task[None]] = set(running)
    while late and time.monotonic() < ends:
        await player.abort()  # again: requests may have been on their way
        _, late = await asyncio.wait(late, timeout=_ABORT_AGAIN_S)


def _keep_for_later(rollout_id: int, data_source: Any, groups: list[Any]) -> None:
    for sample in _flat(groups):
        if sample.response:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    if groups:
        data_source.add_samples(groups)


def _mask_earlier_steps(args: Any, rollout_id: int, groups: list[Any]) -> None:
    """What other weights sampled, also in samples that were over before the rest of their group."""
    if getattr(args, "mask_offpolicy_in_partial_rollout", False):
        for sample in _flat(groups):
            known = sample.metadata if isinstance(sample.metadata, Mapping) else {}
            if known.get("start_rollout_id", rollout_id) != rollout_id:
                sample.loss_mask = [0] * sample.response_length


def _give_back(args: Any, data_source: Any, group: list[Any], aborts: Counter[int]) -> None:
    """A group that the servers interrupted is played again, but not for ever in one step."""
    number = next(_flat(group)).group_index
    aborts[number] += 1
    if aborts[number] > 2:
        for sample in _flat(group):
            if record.is_status(sample, "aborted"):
                record.fail(sample, "the servers aborted it three times in one step", args)
    data_source.add_samples([group])


def _dynamic_filter(args: Any) -> Callable[[list[Any], int, int], str | None]:
    """Says why a group is dropped; None: it is kept."""
    path = getattr(args, "dynamic_sampling_filter_path", None)
    if path is None:
        return lambda group, remaining, target: None
    function = part_of("load_function", "utils.misc")(path)
    call, drops = (
        part_of(name, "rollout.filter_hub.base_types")
        for name in ("call_dynamic_filter", "should_drop_dynamic_filter_output")
    )

    def reason(group: list[Any], remaining: int, target: int) -> str | None:
        output = call(function, args, list(_flat(group)))
        if drops(output, remaining_batch_size=remaining, target_data_size=target):
            return str(output.reason or "no_reason")
        return None

    return reason


def _sampling_params(args: Any) -> dict[str, Any]:
    return {
        name: getattr(args, f"rollout_{flag}", None)
        for name, flag in (
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("max_new_tokens", "max_response_len"),
            ("stop", "stop"),
            ("stop_token_ids", "stop_token_ids"),
        )
    }


def _is_aborted(group: list[Any]) -> bool:
    return any(record.is_status(sample, "aborted", "pending") for sample in _flat(group))


def _even(groups: list[Any]) -> list[Any]:
    """All rollouts lists as soon as one is: slime flattens a batch by the shape of the first."""
    if not any(isinstance(one, list) for group in groups for one in group):
        return groups
    return [[one if isinstance(one, list) else [one] for one in group] for group in groups]


def _index(group: list[Any]) -> int:
    found: int = next(_flat(group)).index
    return found


def _flat(played: Any) -> Iterator[Any]:
    """The samples of a group, of which any may be a list."""
    if isinstance(played, list):
        for one in played:
            yield from _flat(one)
    else:
        yield played
