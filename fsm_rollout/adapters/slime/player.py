"""Player: plays slime's samples, one per event loop and set-up; `generate` is what slime calls.

A sample that must start over starts from nothing. One that the end of a step interrupted goes on
where it was, if slime asks for that (--partial-rollout) and its tools still live: the request is
parked here meanwhile, under its session id. What went wrong with one sample costs that sample.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from fsm_rollout.adapters.slime import record
from fsm_rollout.adapters.slime.config import (
    KEY,
    TURN_TIMEOUT_S,
    Sampling,
    SlimeConfig,
    config_of,
    limits_of,
    sampling_of,
)
from fsm_rollout.adapters.slime.outcome import ASKED_FOR, failed, outcome
from fsm_rollout.adapters.slime.tracker import tell
from fsm_rollout.codec import Codec
from fsm_rollout.config import imported, template_text
from fsm_rollout.dataset import present
from fsm_rollout.engines.base import SamplingParams
from fsm_rollout.engines.http import HttpSettings
from fsm_rollout.engines.sglang import SGLangEngine
from fsm_rollout.errors import ConfigError, EngineError, GuardRefused
from fsm_rollout.failures import describe, log_failure, shown
from fsm_rollout.limits import Limits, Status, StopReason
from fsm_rollout.request import Request
from fsm_rollout.rollout import Rollout
from fsm_rollout.states.guards import attempts_left, guard, resumable, retryable
from fsm_rollout.states.table import Event
from fsm_rollout.tools.registry import Toolset

logger = logging.getLogger(__name__)

_PLAYERS: dict[asyncio.AbstractEventLoop, dict[bytes, Player]] = {}
_ENDING: set[asyncio.AbstractEventLoop] = set()
_MOST_VARIANTS = 64
_ABORT_S = 5.0


async def generate(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Any:
    """Play one sample of slime or miles: --custom-generate-function-path.

    Returns it COMPLETED, TRUNCATED, ABORTED (to be played again) or FAILED; or a list, when the
    rollout has several samples, which share `rollout_id`. Raises ConfigError when flags, YAML or
    `sampling_params`, which is not changed, ask for what cannot be.
    """
    for flag in ("hf_checkpoint", "sglang_router_ip", "sglang_router_port"):
        if not getattr(args, flag, None):
            why = f"args.{flag} is not set: there is no policy to sample from"
            return failed(sample, why, args, evaluation=evaluation)
    sampling = sampling_of(sampling_params)
    player = player_of(args, sampling.stop)
    return player.shaped(await player.play(args, sample, sampling, evaluation=evaluation))


def player_of(args: Any, stop: tuple[str, ...] = ()) -> Player:
    """The player of this event loop for what `args` say now; one that fits is used again."""
    for loop in [loop for loop in list(_PLAYERS) if loop.is_closed()]:  # of other threads, too
        _PLAYERS.pop(loop, None)
    players = _PLAYERS.setdefault(asyncio.get_running_loop(), {})
    config = config_of(args)
    key = msgspec.json.encode([config, stop, [getattr(args, n, None) for n in _BUILT_OF]])
    if key not in players:
        players[key] = Player(args, config, stop)
    return players[key]


_BUILT_OF = (
    "sglang_router_ip",
    "sglang_router_port",
    "hf_checkpoint",
    "custom_config_path",
    "chat_template_path",
    "rollout_top_p",
    "rollout_seed",
    "use_rollout_routing_replay",
    "num_layers",
    "moe_router_topk",
    "apply_chat_template_kwargs",
)
"""the args that a player is made of; all others are read anew for each sample"""


@guard(lambda request: "the step is over", StopReason.PAUSED)
def step_goes_on(request: Request) -> bool:
    """Neither slime nor `step.py` ends its step: what was aborted must not start again."""
    return asyncio.get_running_loop() not in _ENDING and not _slime_is_aborting()


@contextmanager
def ending() -> Iterator[None]:
    """While it is entered no turn is begun in this event loop: what runs is parked before it."""
    loop = asyncio.get_running_loop()
    _ENDING.add(loop)
    try:
        yield
    finally:
        _ENDING.discard(loop)


class Player:
    """A rollout against slime's router, and the requests that wait to go on."""

    def __init__(self, args: Any, config: SlimeConfig, stop: tuple[str, ...]) -> None:
        experts = None
        if getattr(args, "use_rollout_routing_replay", False):
            experts = (args.num_layers, args.moe_router_topk)
        timeout_s = config.limits.get("turn_timeout_s", TURN_TIMEOUT_S)
        self.engine = SGLangEngine(
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            stream=config.stream,
            log_prob_kind=config.log_prob_kind,
            sampling_mask=(getattr(args, "rollout_top_p", None) or 1.0) != 1.0,
            routed_experts=experts,
            stop=stop,
            settings=HttpSettings(timeout_s=timeout_s, first_byte_timeout_s=timeout_s),
        )
        folder = Path(getattr(args, "custom_config_path", None) or "fsm.yaml").resolve().parent
        tools = Toolset(config.tools)
        self.rollout = Rollout(
            self.engine,
            codec=Codec(
                _tokenizer(args.hf_checkpoint),
                tools=tools.schemas,
                parser=config.parser,
                chat_template=template_text(config.chat_template, folder)
                or template_text(getattr(args, "chat_template_path", None), Path.cwd()),  # miles
                template_kwargs=getattr(args, "apply_chat_template_kwargs", None),
            ),
            tools=tools,
            reward=_named("reward", config.reward),
            agent=_named("agent", config.agent),
            max_concurrent=_most_at_once(args),
            seed=getattr(args, "rollout_seed", None) or 0,
            guards={Event.GENERATE: [step_goes_on]},
        )
        if names := self.rollout.loop.rewards.by_group:
            raise ConfigError(
                f"{KEY}.reward: {names[0]!r} is a group's, and here each sample is played by "
                "itself; give slime a reward model of groups (--group-rm) in its place"
            )
        self.rollout.loop.run_id = ""  # slime's session ids are unique, and routers see them
        self.config = config
        self._variants: dict[tuple[Limits, SamplingParams], Rollout] = {}
        self._parked: dict[str, tuple[Request, weakref.finalize[..., Any]]] = {}
        self._loop = asyncio.get_running_loop()
        self._has_warned, self._fans_out = not tools, False

    async def play(self, args: Any, sample: Any, sampling: Sampling, *, evaluation: bool) -> Any:
        """See `generate`."""
        limits = limits_of(args, self.config, sampling.max_new_tokens, evaluation=evaluation)
        rollout = self._variant(limits, sampling.params)
        await rollout.start()
        goes_on = bool(getattr(args, "partial_rollout", False)) and not evaluation
        goes_on = goes_on and self.config.agent is None  # it would begin again
        try:
            request = await self._resumed(sample, goes_on=goes_on)
            request = request or await self._request(rollout, sample)
        except Exception as error:  # its row: the others may be good
            why = str(error) if isinstance(error, ConfigError) else repr(error)
            why = f"its row does not fit: {why}"
            return failed(sample, why, args, evaluation=evaluation)
        try:
            await self._attempts(rollout, request)
        except asyncio.CancelledError:
            record.write(sample, request.sample, request, args, reward=None)
            raise
        except Exception as error:
            how = f"ended it: {describe(error)}"
            log_failure(logger, f"sample {sample.index}", "a bug", how, error)
            return failed(sample, f"a bug: {shown(error)}", args, request, evaluation=evaluation)
        finally:
            if goes_on and request.status is Status.ABORTED and _may_go_on(request):
                self._park(sample, request)
            else:
                await rollout.loop.release(request)
                if request.is_done:
                    request.seal()
        if request.is_sealed:
            tell(args, request, evaluation=evaluation)
        has_reward = self.config.reward is not None
        return outcome(args, sample, request, has_reward=has_reward, evaluation=evaluation)

    def shaped(self, played: Any) -> Any:
        """A list once any rollout was one: slime's own loop flattens all or none of a batch.

        But not what is played again: of a list slime does not see that it was aborted.
        """
        if isinstance(played, list):
            self._fans_out = True
        elif self._fans_out and not record.is_status(played, "aborted"):
            return [played]
        return played

    async def abort(self) -> None:
        """Have the servers give back what they have; see `ending`, which keeps turns from it."""
        try:
            await self.engine.call("/abort_request", {"abort_all": True}, timeout_s=_ABORT_S)
        except EngineError as error:  # the other servers have got it
            logger.warning("a server did not take the abort: %s", error)

    # -- one attempt after another -----------------------------------------------------------------

    async def _attempts(self, rollout: Rollout, request: Request) -> None:
        loop = rollout.loop
        await loop.play(request)
        while (
            request.status is Status.ABORTED
            and request.stop_reason not in {*ASKED_FOR, StopReason.REWARD_ERROR}
            and retryable(request)
            and attempts_left(request)
        ):
            await loop.release(request)
            loop.machine.fire(Event.RETRY, request)
            await loop.play(request)

    def _variant(self, limits: Limits, params: SamplingParams) -> Rollout:
        key = limits, params
        if key not in self._variants:
            if len(self._variants) >= _MOST_VARIANTS:
                self._variants.clear()
            self._variants[key] = self.rollout.variant(limits=limits, params=params)
        return self._variants[key]

    async def _request(self, rollout: Rollout, sample: Any) -> Request:
        """A new request of the sample's row. ConfigError when the row does not fit."""
        if any(value is not None for value in (sample.multimodal_inputs or {}).values()):
            raise ConfigError("it has images, audio or video, which no codec can encode yet")
        if not isinstance(sample.metadata or {}, Mapping):
            kind = type(sample.metadata).__name__
            raise ConfigError(
                f"its metadata is a {kind}; --metadata-key names a column of mappings"
            )
        metadata = {k: v for k, v in (sample.metadata or {}).items() if k != KEY}
        vocabulary = rollout.codec.vocabulary
        ids = list(sample.tokens[: len(sample.tokens) - sample.response_length])
        has_ids = bool(ids) and not (sample.prompt and sample.response_length)
        row = {
            "prompt": sample.prompt or vocabulary.decode(ids),
            "label": sample.label,
            "metadata": metadata,
            "tools_kwargs": present(metadata.get("tools_kwargs") or {}),
        }
        request = rollout.request(row, index=sample.index, group_index=sample.group_index)
        request.sample.session_id = record.session_of(sample)
        if has_ids:  # of slime's own, or of who made the sample
            request.prompt_ids = ids
        elif isinstance(sample.prompt, str):  # rendered by slime, or meant to be read as it is
            self._warn_of_untold_tools(sample.prompt)
            request.prompt_ids = await asyncio.to_thread(vocabulary.encode, sample.prompt)
        return request

    def _warn_of_untold_tools(self, prompt: str) -> None:
        if not self._has_warned and not any(name in prompt for name in self.rollout.tools):
            self._has_warned = True
            logger.warning(
                "a prompt that slime has rendered names none of the tools (%s): leave out "
                "--apply-chat-template, so that prompts stay messages and the tools are told",
                ", ".join(self.rollout.tools),
            )

    # -- requests that wait ------------------------------------------------------------------------

    async def _resumed(self, sample: Any, *, goes_on: bool) -> Request | None:
        """The request that waits for this sample, pending again; None: it starts from nothing."""
        request, dropped = self._parked.pop(record.session_of(sample), (None, None))
        if request is None or dropped is None:
            return None
        dropped.detach()
        is_same = list(sample.tokens) == request.sample.tokens.tolist()
        if goes_on and is_same and record.is_status(sample, "aborted"):
            with suppress(GuardRefused):  # its tools have died
                self.rollout.loop.machine.fire(Event.RESUME, request)
                if sample.loss_mask and not any(sample.loss_mask):
                    request.sample.mask_out()  # --mask-offpolicy-in-partial-rollout
                return request
        await self.rollout.loop.release(request)
        return None

    def _park(self, sample: Any, request: Request) -> None:
        session = record.session_of(sample)
        dropped = weakref.finalize(sample, self._drop, session)
        dropped.atexit = False
        self._parked[session] = request, dropped

    def _drop(self, session: str) -> None:
        """A sample that slime forgets takes its tools along."""
        request, _ = self._parked.pop(session)
        if not self._loop.is_closed():
            release = self.rollout.loop.release(request)
            asyncio.run_coroutine_threadsafe(release, self._loop)


def _may_go_on(request: Request) -> bool:
    """Interrupted, by whoever ends the step, where a turn or its tools can go on."""
    return request.stop_reason in ASKED_FOR and resumable(request)


def _slime_is_aborting() -> bool:
    """slime, or miles, aborts what runs on the servers."""
    for name in ("slime.rollout.sglang_rollout", "miles.rollout.sglang_rollout"):
        state = getattr(sys.modules.get(name), "GenerateState", None)
        # not GenerateState(args), which would make one where there is none
        singletons = getattr(type(state), "_instances", {})
        if getattr(singletons.get(state), "aborted", False):
            return True
    return False


def _most_at_once(args: Any) -> int:
    """Requests that slime lets run at the same time."""
    gpus, per_engine = (
        getattr(args, name, None) or 1
        for name in ("rollout_num_gpus", "rollout_num_gpus_per_engine")
    )
    each = getattr(args, "sglang_server_concurrency", None) or 256
    return int(each) * max(int(gpus) // int(per_engine), 1)


@lru_cache(maxsize=8)
def _tokenizer(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
    except Exception as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"--hf-checkpoint {checkpoint!r} has no tokenizer: {why}") from error


def _named(key: str, dotted: str | None) -> Any:
    return None if dotted is None else imported(dotted, what=f"{KEY}.{key}")
