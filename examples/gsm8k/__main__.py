"""GSM8K as rows for fsm-rollout, TRL, slime or verl.

    python -m examples.gsm8k --to verl --out gsm8k.parquet

Without --questions, the eight that lie here are converted (MIT, see LICENSE).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from examples.gsm8k.rows import FORMS, QUESTIONS, rows


def main() -> None:
    """Read, convert, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="GSM8K's JSONL")
    parser.add_argument("--to", choices=FORMS, default="rows")
    parser.add_argument("--out", type=Path, required=True, help=".jsonl or .parquet")
    parser.add_argument("--split", default="test", help="what the ids of the rows say")
    options = parser.parse_args()
    if options.out.suffix not in (".jsonl", ".parquet"):
        parser.error(f"--out {options.out}: give it the suffix .jsonl or .parquet")
    converted = rows(options.questions, to=options.to, split=options.split)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list(converted).to_parquet(options.out)
    else:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in converted), "utf-8")
    print(f"{len(converted)} rows for {options.to} in {options.out}")


if __name__ == "__main__":
    main()
