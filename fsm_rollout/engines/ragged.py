"""Ragged forward: sequences of any length, in any phase, in one pass of a Hugging Face model.

The batcher calls it. The new tokens of all sequences lie end to end in one row: no padding in the
linear layers; attention, plugged in through the library's `AttentionInterface`, runs sequence by
sequence over that sequence's own keys and values. What a sequence gets never depends on its
neighbours, except for the rounding of a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from fsm_rollout.errors import ConfigError

IMPLEMENTATION = "fsm_rollout_ragged"
SPARE = 64  # tokens of room beyond what is needed, so that a decoded token seldom moves the storage


class KeyValues:
    """Keys and values of a sequence's first `length` tokens, per layer [kv_heads, capacity, width].

    A pass writes beyond `length`, and its caller moves `length` once it has succeeded: a pass that
    fails leaves nothing behind.
    """

    __slots__ = ("layers", "length")

    def __init__(self) -> None:
        self.length = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fork(self, length: int, *, capacity: int) -> KeyValues:
        """A copy of the first `length` tokens with room for `capacity`."""
        copy = KeyValues()
        copy.length = length
        for layer, (keys, values) in self.layers.items():
            copy.layers[layer] = _moved(keys, length, capacity), _moved(values, length, capacity)
        return copy

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put [kv_heads, n, width] behind `length`; views of all [kv_heads, length + n, width]."""
        stop = self.length + keys.shape[1]
        stored = self.layers.get(layer) or (keys[:, :0], values[:, :0])
        if (capacity := stored[0].shape[1]) < stop:
            room = max(stop + SPARE, capacity * 5 // 4)
            stored = _moved(stored[0], self.length, room), _moved(stored[1], self.length, room)
            self.layers[layer] = stored
        stored[0][:, self.length : stop] = keys
        stored[1][:, self.length : stop] = values
        return stored[0][:, :stop], stored[1][:, :stop]


class Span:
    """The next tokens of one sequence: `ids` continue what `cache` holds."""

    __slots__ = ("cache", "ids", "masks")

    def __init__(self, cache: KeyValues, ids: Sequence[int]) -> None:
        self.cache = cache
        self.ids = ids
        self.masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def mask(self, groups: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Who sees whom: bool [groups * n, length + n], the same for every layer of one kind."""
        mask = self.masks.get((groups, window))
        if mask is None:
            stop = self.cache.length + len(self.ids)
            query = torch.arange(self.cache.length, stop, device=device)[:, None]
            key = torch.arange(stop, device=device)
            mask = key <= query
            if window is not None:
                mask &= key > query - window
            mask = self.masks[groups, window] = mask.repeat(groups, 1)
        return mask


def forward(model: PreTrainedModel, spans: Sequence[Span]) -> torch.Tensor:
    """Run the new tokens of every span through the model and write their keys and values.

    Returns the logits behind each span's last token, [spans, vocabulary] in the model's dtype.
    """
    device = model.device
    ids = [token for span in spans for token in span.ids]
    positions = [
        position
        for span in spans
        for position in range(span.cache.length, span.cache.length + len(span.ids))
    ]
    lengths = torch.tensor([len(span.ids) for span in spans], device=device)
    with _ragged_attention(model):
        output = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            logits_to_keep=lengths.cumsum(0) - 1,
            use_cache=False,
            spans=spans,
        )
    logits: torch.Tensor = output.logits[0]
    return logits


def prove(model: PreTrainedModel) -> None:
    """Compare the ragged pass with the model's own on a few ids; ConfigError when they differ.

    Catches what no list of model families can: attention that takes other arguments, recurrent
    state, layers that share keys.
    """
    name = type(model).__name__
    ids = [(7919 * i + 17) % model.config.get_text_config().vocab_size for i in range(24)]
    long, short = KeyValues(), KeyValues()
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        expected = plain.logits[0].float().log_softmax(-1)
        try:
            forward(model, [Span(long, ids[:9])])
            long.length = 9
            prompts = forward(model, [Span(long, ids[9:23]), Span(short, ids[:5])])
            long.length, short.length = 23, 5
            decoded = forward(model, [Span(long, ids[23:]), Span(short, ids[5:6])])
        except (TypeError, RuntimeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"the in-process engine cannot batch {name}: {type(error).__name__}: {error}"
            ) from error
        found = torch.cat([prompts, decoded]).float().log_softmax(-1)
        difference = float((found - expected[[22, 4, 23, 5]]).abs().mean())
    allowed = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
    if not difference <= allowed:
        raise ConfigError(
            f"the in-process engine cannot batch {name}: its log-probs differ from the model's own "
            f"forward pass by {difference:.2g} on average (allowed: {allowed}); serve it with "
            "SGLang or vLLM"
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, width]
    key: torch.Tensor,  # [1, kv_heads, tokens, width]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    spans: Sequence[Span],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, in the shape that the library's AttentionInterface asks for."""
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} uses {name}, which the in-process engine does not "
                "compute; serve this model with SGLang or vLLM"
            )
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads, kv_heads = query.shape[1], key.shape[1]
    output = query.new_empty(1, query.shape[2], heads, value.shape[3])
    start = 0
    for span in spans:
        stop = start + len(span.ids)
        keys, values = span.cache.write(layer, key[0, :, start:stop], value[0, :, start:stop])
        mask = None
        if len(span.ids) > 1:
            mask = span.mask(heads // kv_heads, sliding_window, query.device)
        elif sliding_window is not None:
            keys, values = keys[:, -sliding_window:], values[:, -sliding_window:]
        # The query heads that share a key head are laid along the query axis: no key is repeated.
        attended = scaled_dot_product_attention(
            query[0, :, start:stop].reshape(1, kv_heads, -1, query.shape[3]),
            keys[None],
            values[None],
            attn_mask=mask,
            scale=scaling,
        )
        output[0, start:stop] = attended.view(heads, stop - start, -1).transpose(0, 1)
        start = stop
    return output, None


@contextmanager
def _ragged_attention(model: PreTrainedModel) -> Iterator[None]:
    """Lend the model our attention for one pass: its owner finds it as it was."""
    before: Any = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _moved(tensor: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    heads, _, width = tensor.shape
    new = tensor.new_empty(heads, capacity, width)
    new[:, :length] = tensor[:, :length]
    return new


AttentionInterface.register(IMPLEMENTATION, _attend)
