"""Group metrics by meaning: sections of panels, each with the curves of one plot."""

import re
from collections.abc import Iterable, Sequence
from typing import TypedDict

from openenv_pipe.runs.metrics import ENVIRONMENT, MEMORY

# Section, then title of a panel, then its metrics in the order of their colours.
SECTIONS: dict[str, dict[str, Sequence[str]]] = {
    "Reward": {
        "Reward": ("reward/mean",),
        "Success": ("success/rate",),
        "Spread of the reward": ("reward/std",),
        "Reward terms": ("reward/*",),
    },
    "Episodes": {
        "Turns per episode": ("turns/mean",),
        "Tokens per episode": ("episodes/tokens_mean", "episodes/tokens_max"),
        "Tokens per reply": ("reply/tokens_mean",),
        "Episodes that ended badly": ("episodes/failed", "episodes/truncated"),
        "Replies cut off": ("reply/truncated",),
        "Unusable replies": ("replies/unusable",),
        "Groups": ("groups/trained", "groups/skipped", "groups/unlike"),
        "Groups without a signal": ("skipped/identical", "skipped/solved", "skipped/unsolved"),
        "Groups with a signal, per episode": ("signal/per_episode",),
        "Groups with a signal, per 1000 sampled tokens": ("signal/per_1000_tokens",),
        "Staleness": ("staleness/mean", "staleness/max"),
        "Judge": ("judge/calls", "judge/failed"),
        "Judge's tokens": ("judge/tokens",),
        "Judge's cost": ("judge/cost",),
    },
    "Environments and players": {
        "Reward by environment": ("environment/*/reward/mean",),
        "Success by environment": ("environment/*/success/rate",),
        "Groups with a signal, by environment": ("environment/*/groups/trained",),
        "Turns by environment": ("environment/*/turns/mean",),
        "Unusable replies by environment": ("environment/*/replies/unusable",),
        "Sampled tokens by environment": ("environment/*/tokens/sampled",),
        "Spread of the reward by environment": ("environment/*/reward/std",),
        "Tokens per reply by environment": ("environment/*/reply/tokens_mean",),
        "Entropy by environment": ("environment/*/sampling/entropy",),
        "Episodes that ended badly, by environment": (
            "environment/*/episodes/failed",
            "environment/*/episodes/truncated",
        ),
        "Reward by player": ("player/*/reward",),
        "Success by player": ("player/*/success",),
        "Against earlier policies": ("league/success", "league/reward"),
    },
    "Learning": {
        "Loss": ("loss/total", "loss/policy"),
        "Supervised loss": ("loss/supervised",),
        "Entropy": ("sampling/entropy", "loss/entropy"),
        "KL to the reference": ("loss/kl",),
        "Cross entropy of the environment's tokens": ("loss/echo",),
        "Cross entropy of replayed episodes": ("loss/replay",),
        "Samples with a hint": ("kl/hinted",),
        "KL from the start": ("kl/start",),
        "Gradient norm": ("grad/norm",),
        "Tokens at a clip": ("clip/share", "clip/low", "clip/high"),
        "Ratio": ("ratio/min", "ratio/max"),
        "Advantage": ("advantage/mean", "advantage/std", "advantage/min", "advantage/max"),
        "Learning rate": ("lr",),
    },
    "Agreement of sampler and trainer": {
        "Mismatch of logprobs": ("mismatch/mean", "mismatch/max"),
        "KL of sampler and trainer": ("mismatch/kl",),
        "Effective share of samples": ("mismatch/effective_share",),
        "Correction": ("correction/mean", "correction/bounded"),
        "Check on fixed prompts": ("logprob_check/difference", "logprob_check/moved"),
    },
    "Time and tokens": {
        "Seconds": ("time/step_s", "time/rollout_s", "time/learner_s", "time/*_s"),
        "Tokens per second": ("time/tokens_per_s", "time/learner_tokens_per_s"),
        "Memory": (MEMORY,),
        "Model FLOPs utilisation": ("time/mfu",),
        "Tokens": (
            "tokens/sampled",
            "tokens/trained",
            "tokens/skipped",
            "tokens/echo",
            "tokens/replay",
            "tokens/computed",
        ),
    },
}
OTHER = "Others"
NO_CURVES = re.compile(r"step|stage|(environment/.+/)?episodes/count|time/matrix_tflops")


class Panel(TypedDict):
    section: str
    title: str
    names: list[str]


def panels_of(names: Iterable[str]) -> list[Panel]:
    """Put every metric of a run into one panel; unknown ones into a panel of their kind."""
    left = dict.fromkeys(name for name in sorted(names) if not NO_CURVES.fullmatch(name))
    exact = {name for panels in SECTIONS.values() for wanted in panels.values() for name in wanted}
    panels = []
    for section, titles in SECTIONS.items():
        for title, wanted in titles.items():
            found = [name for each in wanted for name in _matching(each, left, exact)]
            for name in found:
                left.pop(name, None)
            if found:
                panels.append(Panel(section=section, title=title, names=found))
    others: dict[str, list[str]] = {}
    for name in left:
        kind, _, _ = name.rpartition("/") if name.startswith(ENVIRONMENT) else name.partition("/")
        others.setdefault(kind, []).append(name)
    panels += [Panel(section=OTHER, title=title, names=found) for title, found in others.items()]
    return panels


def _matching(wanted: str, left: Iterable[str], exact: set[str]) -> list[str]:
    if "*" not in wanted:
        return [wanted] if wanted in left else []
    before, _, after = wanted.partition("*")
    return [
        name
        for name in left
        if name.startswith(before) and name.endswith(after) and name not in exact
    ]
