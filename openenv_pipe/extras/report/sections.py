"""Parts of a run's report: its environment, model, parts of the reward, signal, and clients."""

from collections.abc import Mapping, Sequence
from typing import Any

from openenv_pipe.config.schema import (
    HubModelConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TaskSetConfig,
)
from openenv_pipe.reports.alarm import WINDOW, ends_of, mean_of
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import BASELINE
from openenv_pipe.runs.metrics import ENVIRONMENT
from openenv_pipe.system.markdown import UNKNOWN, percent_text, table
from openenv_pipe.system.untrusted_text import code_span, for_markdown

REWARD = "reward/"
REWARD_MEAN = f"{REWARD}mean"
END_SHARE = 0.1  # fraction of the steps that counts as the first, or as the last ones
LOST_EPISODES = {
    "clients/failed": "failed at their clients",
    "clients/lost": "were lost with their clients",
    "clients/late": "were not done when the time of their group was over",
}

Records = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


def environment_rows(config: RunConfig) -> dict[str, str]:
    """Return the rows of the environment and its tasks by title; none for a run on data alone."""
    env = config.env
    if not config.host.has_environment:
        if not config.agent.plays_on_demand:
            return {"tasks": "those that clients bring"}
        if not config.trainer.steps:
            return {}
    turns = "one turn" if env.max_turns == 1 else f"{env.max_turns} turns"
    return {
        "environment": f"{for_markdown(env.name)}, at most {turns}",
        "train tasks": _tasks(env.tasks.train),
        "eval tasks": _tasks(env.tasks.eval),
    }


def _tasks(tasks: TaskSetConfig) -> str:
    keywords = ", ".join(code_span(f"{name}={value}") for name, value in tasks.reset.items())
    return f"{for_markdown(tasks.title)}{f', reset with {keywords}' if keywords else ''}"


def model_rows(config: RunConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows by their titles. facts: of the run's record."""
    rows = {"model": _model(config.model, facts), **_forward(config, facts)}
    if facts.get("history") == "rerender":
        rows["prompts"] = "rendered anew by the chat template (model.history=rerender)"
    return rows


def _model(model: ModelConfig, facts: Mapping[str, Any]) -> str:
    if isinstance(model, HubModelConfig):
        name = for_markdown(f"{model.path}{f' at {model.revision}' if model.revision else ''}")
        if substitute := facts.get("weights_from"):
            name += f" (weights of {for_markdown(str(substitute))})"
    else:
        name = f"tiny Qwen3 with random weights, {model.num_layers} layers of {model.hidden_size}"
    tuning = f"LoRA of rank {model.lora.rank}" if model.lora.rank else "full training"
    if model.quantization != "none":
        tuning += f" on {model.quantization} weights"
    size = facts.get("num_parameters")
    return f"{name}{f', {size:,} parameters' if isinstance(size, int) else ''}, {tuning}"


def _forward(config: RunConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """Say how the model was trained and sampled, and why not in a faster way; nothing for a run
    that found out neither."""
    found = facts.get("forward")
    if not isinstance(found, dict):
        return {}
    text = f"trained in {found.get('learner')} rows"
    if config.engine.samples_in_process:
        text += f", {found.get('sampler')} sampling"
    left_out = found.get("left_out")
    reasons = left_out.items() if isinstance(left_out, dict) else ()
    why = "; ".join(f"not {name}: {reason}" for name, reason in reasons)
    return {"forward passes": for_markdown(f"{text} ({why})" if why else text)}


def baselines_text(reports: Mapping[str, EvalReport]) -> str:
    """Say in a sentence how the scripted policies did on the tasks of evaluation."""
    found = [
        f"{for_markdown(label.removeprefix(BASELINE))} {percent_text(report.success.mean)}"
        for label, report in reports.items()
        if label.startswith(BASELINE) and report.success is not None
    ]
    return f"Success of the baselines: {', '.join(found)}." if found else ""


def environments_table(config: RunConfig, records: Records) -> str:
    """Return how training went in each of several environments; nothing for one alone."""
    steps = [record for record in records if record.get("stage") == "grpo"]
    if not config.beside or not steps:
        return ""
    num_shown = max(1, round(END_SHARE * len(steps)))
    rows = []
    for name in (config.env.name, *config.beside):
        own = [_of_environment(name, step) for step in steps]
        ends = (own[:num_shown], own[-num_shown:])
        weight = config.beside[name].weight if name in config.beside else 1.0
        num_episodes = sum(step.get("episodes/count", 0) for step in own)
        means = [_mean(key, end) for key in ("success/rate", REWARD_MEAN) for end in ends]
        rows.append([for_markdown(name), f"{weight:g}", f"{num_episodes:g}", *means])
    measures = ("success, first steps", "last", "reward, first steps", "last")
    titles = ["environment", "weight", "episodes", *measures]
    return "## Environments\n\n" + table(titles, rows)


def parts_tables(config: RunConfig, records: Records) -> str:
    """Return the tables of all environments' rewards. Empty before the first step of GRPO."""
    if not config.beside:
        return _parts_table("Reward by parts", config.reward, records)
    tables = []
    for env, each in config.environments.items():
        name = env or each.env.name
        own = [_of_environment(name, record) for record in records]
        tables.append(_parts_table(f"Reward by parts: {for_markdown(name)}", each.reward, own))
    return "\n\n".join(filter(None, tables))


def _of_environment(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's own metrics of a step, by the names that they have in other runs."""
    prefix = f"{ENVIRONMENT}/{name}/"
    own = {key.removeprefix(prefix): record[key] for key in record if key.startswith(prefix)}
    return {"stage": record.get("stage"), **own}


def _parts_table(title: str, config: RewardConfig, records: Records) -> str:
    """Return a table with a row for each term of the reward and each of its parts."""
    steps = [record for record in records if record.get("stage") == "grpo"]
    names = dict.fromkeys(key for step in steps for key in step if key.startswith(REWARD))
    names.pop("reward/std", None)
    if not names:
        return ""
    num_shown = max(1, round(END_SHARE * len(steps)))
    rows = [
        [
            for_markdown(name.removeprefix(REWARD)) if name != REWARD_MEAN else "**all**",
            _role(config, name.removeprefix(REWARD)),
            _mean(name, steps[:num_shown]),
            _mean(name, steps[-num_shown:]),
        ]
        for name in sorted(names, key=lambda name: (name == REWARD_MEAN, name))
    ]
    noun = "step" if num_shown == 1 else f"{num_shown} steps"
    titles = ["part of the reward", "counts", f"first {noun}", f"last {noun}"]
    return f"## {title}\n\n" + table(titles, rows)


def _role(config: RewardConfig, name: str) -> str:
    """Say how a term counts in the reward; empty for the parts of a term."""
    if name not in config.terms:
        return ""
    kinds = [each.type for each in config.transforms.get(name, [])]
    weight = config.terms[name].weight
    counts = "multiplies" if "multiply" in kinds else f"× {weight:g}" if weight else "metric only"
    before = ", ".join(kind.replace("_", " ") for kind in kinds if kind != "multiply")
    return f"{counts}, after {before}" if before else counts


def _mean(name: str, steps: Records) -> str:
    mean = mean_of(steps, name)
    return UNKNOWN if mean is None else f"{mean:.3f}"


def signal_text(records: Records) -> str:
    """Say how many groups had a signal, and what each cost in episodes (OpenEnv, RFC 013).

    Empty before the first step of GRPO.
    """
    steps = [record for record in records if record.get("stage") == "grpo"]
    if not steps:
        return ""
    text = f"**Learning signal:** {_costs(steps)}"
    num_last = round(END_SHARE * len(steps))
    if num_last > 1:
        text += f"; in the last {num_last} steps, {_costs(steps[-num_last:])}"
    return f"{text}."


def _costs(steps: Records) -> str:
    num_signals = _sum(steps, "groups/trained")
    num_groups = num_signals + _sum(steps, "groups/skipped")
    text = f"{num_signals:,} of {num_groups:,} groups had a signal"
    if not num_signals:
        return text
    num_episodes, num_tokens = _sum(steps, "episodes/count"), _sum(steps, "tokens/sampled")
    return (
        f"{text}, one per {num_episodes / num_signals:.1f} sampled episodes, or per "
        f"{num_tokens / num_signals:,.0f} sampled tokens"
    )


def _sum(steps: Records, key: str) -> int:
    return sum(step.get(key) or 0 for step in steps)


def clients_rewards(records: Records) -> str:
    """Compare the rewards of the first steps with those of the last, for want of an evaluation."""
    steps = [record for record in records if record.get("stage") == "grpo"]
    first, last = ends_of(steps, REWARD_MEAN)
    if first is None or last is None:
        return "There is no result, because clients play no evaluations, and few steps are done."
    return (
        f"Clients play no evaluations. The mean training reward went **{first:.3f} → "
        f"{last:.3f}**, from the first {WINDOW} steps to the last {WINDOW}."
    )


def clients_text(records: Records) -> str:
    """Say how many episodes clients did not play to their end, and how many groups were dropped.

    Empty if no clients play.
    """
    steps = [record for record in records if record.get("clients/lost") is not None]
    if not steps:
        return ""
    counts = {text: sum(step[name] for step in steps) for name, text in LOST_EPISODES.items()}
    lost = ", ".join(f"{count} {text}" for text, count in counts.items() if count)
    num_played = sum(record.get("episodes/count") or 0 for record in records)
    num_dropped = sum(step["groups/dropped"] for step in steps)
    return (
        f"**Episodes of clients:** of {num_played}, {lost or 'none was lost'}. Groups that were "
        f"left with fewer than two episodes taught nothing: {num_dropped}."
    )
