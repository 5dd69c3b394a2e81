"""Vocabulary: text to ids and back for one tokenizer, and what in it is a control token.

The codec's lower half. What always holds: a control token comes out of `encode` only where template
text spells it; `encode_text` and `encode_after` read any text as plain text. To that end plain text
has a tokenizer of its own: the same model, normaliser and pre-tokeniser, no added tokens.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from fsm_rollout.arrays import Ints, int32
from fsm_rollout.codec.detokenizer import Detokenizer
from fsm_rollout.errors import ConfigError
from fsm_rollout.limits import CUT_MARK

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

Side: TypeAlias = Literal["left", "right", "middle"]

LONG = 2_048
"""characters or ids from which on a text is better encoded, decoded or parsed in a thread"""
_WINDOW = 16_384
"""characters per encoding of a long text: making its ids and freeing it hold the GIL"""
_OVERLAPS = (256, 509, 1_021, 2_039, 4_093, 8_191)
"""how far before the end of a window the next one may start; in step with no pattern of a text"""
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, as broken JSON holds
_GUESS = 4
"""characters per token; a window that turns out too small is doubled"""
_MOST_IDS = 33
"""of one character: bytes of the longest compatibility decomposition (U+FDFA)"""


class Vocabulary:
    """What the ids of a tokenizer mean. Raises ConfigError for a tokenizer that can't be used."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: int | Iterable[int] | None = None,
    ) -> None:
        from tokenizers import AddedToken, Tokenizer

        if isinstance(tokenizer, str | os.PathLike):
            raise ConfigError(
                f"tokenizer is {str(tokenizer)!r}, a name: give the tokenizer, "
                f"AutoTokenizer.from_pretrained({str(tokenizer)!r})"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(tokenizer).__name__} is a slow tokenizer; the codec needs a fast one "
                "(tokenizer.json): load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
            )
        backend: Any = tokenizer.backend_tokenizer
        self._backend = backend
        self._plain = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(backend, part)) is not None:
                setattr(self._plain, part, value)
        # Two strings that no text holds, since nobody knows them. Text never starts a sequence: the
        # anchor in front of it says so to tokenizers that put a space before a first word. The mark
        # breaks what only looks like a control token; letters, so that no template changes it.
        self._anchor = f"\ue000{secrets.token_hex(8)}\ue000"
        self._mark = f"Zq{secrets.token_hex(8)}Qz"
        self._plain.add_special_tokens([AddedToken(self._anchor, normalized=False)])

        self.size = len(tokenizer)
        """ids >= size are out of vocabulary, also where the model's embedding has padding rows"""
        added = tokenizer.added_tokens_decoder
        self.control = {
            token.content: i
            for i, token in added.items()
            if self._is_control(token.content, i, special=token.special)
        }
        """the spelling of each control token, special or added, and its id"""
        self.control_ids = frozenset(self.control.values())
        eos: Any = tokenizer.eos_token_id
        if stop_token_ids is None:
            stop_token_ids = [i for i in _generation_stops(tokenizer) if 0 <= i < self.size]
        self.stop_ids = self._checked_stop_ids(stop_token_ids, eos)
        self.detokenizer = Detokenizer(backend, size=self.size, inner=min(self.stop_ids))
        self._spellings = sorted(self.control, key=len, reverse=True)
        self._beginnings = {token[:n] for token in self.control for n in range(1, len(token))}
        self._eats_left = {t.content for t in added.values() if t.lstrip}
        self._eats_right = {t.content for t in added.values() if t.rstrip}

    def _is_control(self, token: str, token_id: int, *, special: bool) -> bool:
        if token.isspace():
            return False
        reached = token_id in self.encode_text(token)
        if reached and special:
            raise ConfigError(
                f"the tokenizer's model makes the control token {token!r} out of plain text, so "
                "text from tools could forge turns; use another tokenizer"
            )
        return not reached  # else it is a word that the model knows anyway

    def _checked_stop_ids(
        self, given: int | Iterable[int] | None, eos: int | None
    ) -> frozenset[int]:
        stops = frozenset([given] if isinstance(given, int) else given or ())
        if not all(isinstance(i, SupportsIndex) for i in stops):
            raise ConfigError(f"stop_token_ids must be ids, got {given!r}")
        if eos is not None:
            stops |= {eos}
        if not stops:
            raise ConfigError(
                "the tokenizer has no eos_token_id and no stop_token_ids are given: "
                "pass the ids of generation_config.eos_token_id"
            )
        if wrong := sorted(i for i in stops if not 0 <= i < self.size):
            raise ConfigError(f"stop_token_ids {wrong} lie outside the vocabulary [0, {self.size})")
        return stops

    # -- text to ids -------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of a render: control tokens where it spells them, unless `guard` broke them."""
        ids: list[int] = []
        before = ""
        parts = [*self.split(text), ""]
        for text, control in zip(parts[::2], parts[1::2], strict=True):
            plain = text.replace(self._mark, "")
            ids += self.encode_after(
                before, plain.rstrip() if control in self._eats_left else plain
            )
            if control:
                ids.append(self.control[control])
            before = control
        return ids

    def encode_text(self, text: str, *, most: int | None = None) -> list[int]:
        """The ids of text that nobody vouches for: never a control token.

        Of a long text no more is encoded than `most` ids and what one window holds take.
        """
        if len(text) <= _WINDOW:
            return self._fast(text).ids[1:] if text else []
        ids: list[int] = []
        for _, encoding, kept in self._windows(text):
            ids += encoding.ids[1:kept]
            if most is not None and len(ids) >= most:
                break
        return ids

    def encode_after(self, control: str, text: str, *, most: int | None = None) -> list[int]:
        """`encode_text` for text that stands right behind a control token."""
        return self.encode_text(text.lstrip() if control in self._eats_right else text, most=most)

    def split(self, text: str) -> list[str]:
        """Text, control token, text, ..., text."""
        present = [re.escape(token) for token in self._spellings if token in text]
        return re.split(f"({'|'.join(present)})", text) if present else [text]

    def guard(self, text: str) -> str:
        """Text for a render: what it spells or begins of control tokens stays text in `encode`."""
        for token in self._spellings:
            if token in text:
                text = text.replace(token, token[0] + self._mark + token[1:])
        longest = len(self._spellings[0]) if self._spellings else 0
        begins = any(text[-n:] in self._beginnings for n in range(1, longest))
        return text + self._mark if begins else text

    def _windows(self, text: str) -> Iterator[tuple[int, Encoding, int]]:
        """A long text in bounded encodings: first character, encoding, tokens of it that count.

        The next window starts where the end of this one, encoded on its own, gives the same ids:
        no merge and no pre-tokeniser reaches across such a boundary of tokens. The anchor counts.
        """
        start, size = 0, _WINDOW
        while start + size < len(text):
            window = text[start : start + size]
            encoding = self._encoding(window)
            kept, stop = self._boundary(window, encoding)
            if stop:
                yield start, encoding, kept
                start, size = start + stop, _WINDOW
            else:
                size *= 2
        encoding = self._encoding(text[start:])
        yield start, encoding, len(encoding)

    def _boundary(self, window: str, encoding: Encoding) -> tuple[int, int]:
        """How many tokens and characters come before the next window; (0, 0) if it finds none."""
        ids = encoding.ids
        for overlap in _OVERLAPS:
            character = len(self._anchor) + len(window) - overlap
            if number := encoding.char_to_token(character) or 0:
                stop, _ = self._characters(encoding, number)
                if stop > 0 and self._fast(window[stop:]).ids[1:] == ids[number:]:
                    return number, stop
        return 0, 0

    def _fast(self, text: str) -> Encoding:
        """Ids alone. A batch of one is encoded without the GIL, and faster than by `encode`."""
        return self._plain.encode_batch_fast([self._anchored(text)], add_special_tokens=False)[0]

    def _encoding(self, text: str) -> Encoding:
        """Ids and the characters they stand for."""
        return self._plain.encode_batch([self._anchored(text)], add_special_tokens=False)[0]

    def _characters(self, encoding: Encoding, number: int) -> tuple[int, int]:
        """Which characters of the text its token of that number stands for; the anchor is 0."""
        start, stop = encoding.token_to_chars(number) or (0, 0)
        return start - len(self._anchor), stop - len(self._anchor)

    def _anchored(self, text: str) -> str:
        return self._anchor + _SURROGATE.sub("\ufffd", text)

    # -- ids to text -------------------------------------------------------------------------------

    def decode(self, ids: Ints) -> str:
        """The text of the ids, control tokens included; for reading, never to be encoded again."""
        return self.detokenizer.decode(int32(ids))

    def pieces(self, ids: Ints) -> list[str]:
        """What each id adds to the text ("" until a character is complete); joined, `decode`."""
        return self.detokenizer.pieces(int32(ids))

    def token_spans(
        self, ids: Ints, text: str, spans: Iterable[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The tokens [start, stop) that cover each span of characters of `text` = `decode(ids)`.

        The spans are ascending and disjoint.
        """
        return self.detokenizer.token_spans(int32(ids), text, spans)

    # -- text that fits ----------------------------------------------------------------------------

    def fit(self, text: str, max_tokens: int, *, side: Side) -> str:
        """`text` cut between characters to at most `max_tokens` ids; `side` is what is dropped.

        A cut shows as `CUT_MARK` where that leaves room for text. Costs what is kept, not what is
        given.
        """
        if len(text) * _MOST_IDS <= max_tokens or self._end(text, max_tokens, tail=False) == text:
            return text
        marker = CUT_MARK if len(self.encode_text(CUT_MARK)) < max_tokens else ""
        room = max_tokens - len(self.encode_text(marker))
        while room > 0:
            head = {"left": 0, "right": room, "middle": (room + 1) // 2}[side]
            start = self._end(text, head, tail=False)
            cut = start + marker + self._end(text[len(start) :], room - head, tail=True)
            excess = len(self.encode_text(cut)) - max_tokens
            if excess <= 0 and (cut or side != "middle"):
                return cut
            room -= max(excess, 1)
        # two halves of a small cap may hold no whole character where one of them does
        return self.fit(text, max_tokens, side="right") if side == "middle" else ""

    def _end(self, text: str, count: int, *, tail: bool) -> str:
        """The start of the text, or its tail, as far as `count` ids go."""
        size = _GUESS * count
        while count > 0:
            part = text[-size:] if tail else text[:size]
            windows, number = self._windows(part), count
            if tail:
                held = deque(windows)
                number = sum(kept - 1 for _, _, kept in held) - count - 1
                windows = iter(held.popleft, None)  # which frees them one by one
            if number >= 0 and (found := self._place(windows, number)):
                return part[found[1] :] if tail else part[: found[0]]
            if size >= len(text):
                return text
            size *= 2
        return ""

    def _place(
        self, windows: Iterable[tuple[int, Encoding, int]], number: int
    ) -> tuple[int, int] | None:
        """Which characters the token of that number, from 0, stands for; None: there are fewer."""
        for start, encoding, kept in windows:
            if number < kept - 1:
                first, last = self._characters(encoding, number + 1)
                return start + first, start + last
            number -= kept - 1
        return None


def _generation_stops(tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """`eos_token_id` of the generation config beside the tokenizer's files: a server stops there,
    whatever the tokenizer says. Empty: there is none on this machine."""
    if not (name := tokenizer.name_or_path):
        return ()
    from transformers import GenerationConfig

    try:
        stops: Any = GenerationConfig.from_pretrained(name, local_files_only=True).eos_token_id
    except (OSError, ValueError):
        return ()
    return () if stops is None else [stops] if isinstance(stops, int) else stops
