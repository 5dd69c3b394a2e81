"""Codec: chat messages to token ids, sampled ids to what they say. Token-in, token-out."""

from fsm_rollout.codec.codec import Codec, ParsedTurn

__all__ = ["Codec", "ParsedTurn"]
