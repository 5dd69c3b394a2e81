"""Gsm8kAnswer: checks answers to a GSM8K question; its reward is the best or the last of them."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from fsm_rollout.errors import ToolError
from fsm_rollout.tools.base import Tool

_MAX_CHARS = 10_000
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})")


class Gsm8kAnswer(Tool):
    """Check a proposed answer to the question. You may try again if it is wrong."""

    name = "check_answer"
    blocking = False
    required = True

    def create(self, ground_truth: str | float, keep: Literal["best", "last"] = "best") -> None:
        """ground_truth: a number, or a GSM8K solution that ends in "#### number" """
        self.truth = parse_number(ground_truth)
        self.keep = keep
        self.score = 0.0

    def execute(self, answer: str | float) -> str:
        """answer: the number you propose"""
        is_right = float(parse_number(answer) == self.truth)
        self.score = max(self.score, is_right) if self.keep == "best" else is_right
        return "correct" if is_right else "incorrect"

    def calc_reward(self) -> float:
        """1.0 for a right answer, else 0.0, also if none was proposed."""
        return self.score


def parse_number(text: str | float) -> Fraction:
    """The one number in a text such as "1,234", "$5", "5.0", "18 apples" or "... #### 18".

    Raises ToolError for a text with none, or with several: a list of guesses is not an answer.
    """
    if not isinstance(text, str):
        return _exact(text)
    if len(text) > _MAX_CHARS:
        raise ToolError(f"the answer must be one number, got {len(text)} characters")
    text = text.rpartition("####")[2]
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text).replace("\u2212", "-")
    numbers = _NUMBER.findall(text)
    if len(numbers) != 1:
        raise ToolError(f"the answer must be one number, got {len(numbers)} numbers")
    return Fraction(numbers[0])


def _exact(number: float) -> Fraction:
    if not math.isfinite(number):
        raise ToolError(f"the answer must be one number, got {number}")
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
