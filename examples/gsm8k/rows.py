"""A GSM8K problem as a row: the right answer goes to the tool, never to the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.tools.gsm8k import parse_number

QUESTIONS = Path(__file__).with_name("questions.jsonl")
"""the first eight of the test split"""
SYSTEM = "Solve the problem. Check your answer with check_answer, then say it in a sentence."
Row = dict[str, Any]


def row(number: int, problem: Row, split: str) -> Row:
    """What every trainer's row is made of."""
    truth = str(parse_number(problem["answer"]))
    return {
        "id": f"gsm8k-{split}-{number}",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": problem["question"]},
        ],
        "label": truth,
        "tools_kwargs": {"check_answer": {"create_kwargs": {"ground_truth": truth}}},
    }


def for_slime(row: Row) -> Row:
    """--input-key prompt --label-key label --metadata-key metadata"""
    metadata = {"id": row["id"], "tools_kwargs": row["tools_kwargs"]}
    return {"prompt": row["prompt"], "label": row["label"], "metadata": metadata}


def for_verl(row: Row) -> Row:
    """verl's columns; `agent_name` picks the agent loop of that name, row by row."""
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "fsm",
        "prompt": row["prompt"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["label"]},
        "extra_info": {
            "index": row["id"],
            "need_tools_kwargs": True,
            "tools_kwargs": row["tools_kwargs"],
        },
    }


FORMS: dict[str, Callable[[Row], Row]] = {
    "rows": dict,
    "trl": dict,  # a dataset's columns are the fields of a row
    "slime": for_slime,
    "verl": for_verl,
}


def rows(questions: Path, *, to: str = "rows", split: str = "test") -> list[Row]:
    """The rows of a file in GSM8K's own form, `{"question": ..., "answer": "... #### 18"}`."""
    converted: list[Row] = []
    for number, line in enumerate(questions.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            problem = row(len(converted), json.loads(line), split)
        except (ValueError, KeyError, TypeError, ToolError) as error:
            raise ConfigError(
                f"{questions}:{number}: {error!r}; a line of GSM8K is "
                '{"question": "...", "answer": "... #### 18"}'
            ) from error
        converted.append(FORMS[to](problem))
    return converted
