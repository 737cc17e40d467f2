"""The parts of the reward in a report: each term, what it is made of, and how it changed."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from openenv_pipe.config.schema import RewardConfig
from openenv_pipe.system.markdown import UNKNOWN, table
from openenv_pipe.system.untrusted_text import for_markdown

PREFIX = "reward/"
SPAN = 0.1  # of the steps, at either end, whose mean is shown


def parts_table(config: RewardConfig, records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each term and each of its parts; empty before the first step.

    records: of metrics.jsonl; only those of GRPO are used.
    """
    steps = [record for record in records if record.get("stage") == "grpo"]
    names = dict.fromkeys(key for step in steps for key in step if key.startswith(PREFIX))
    names.pop("reward/std", None)
    if not names:
        return ""
    num_shown = max(1, round(SPAN * len(steps)))
    rows = [
        [
            for_markdown(name.removeprefix(PREFIX)) if name != "reward/mean" else "**all**",
            _role(config, name.removeprefix(PREFIX)),
            _mean(name, steps[:num_shown]),
            _mean(name, steps[-num_shown:]),
        ]
        for name in sorted(names, key=lambda name: (name == "reward/mean", name))
    ]
    noun = "step" if num_shown == 1 else f"{num_shown} steps"
    titles = ["part of the reward", "counts", f"first {noun}", f"last {noun}"]
    return "## Reward by parts\n\n" + table(titles, rows)


def _role(config: RewardConfig, name: str) -> str:
    """Say how a term counts in the reward; empty for the parts of a term."""
    if name not in config.terms:
        return ""
    kinds = [each.type for each in config.transforms.get(name, [])]
    weight = config.terms[name].weight
    counts = "multiplies" if "multiply" in kinds else f"× {weight:g}" if weight else "metric only"
    before = ", ".join(kind.replace("_", " ") for kind in kinds if kind != "multiply")
    return f"{counts}, after {before}" if before else counts


def _mean(name: str, steps: Sequence[Mapping[str, Any]]) -> str:
    values = [value for step in steps if (value := step.get(name)) is not None]
    return f"{fmean(values):.3f}" if values else UNKNOWN
