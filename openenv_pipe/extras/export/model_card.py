"""The model card (README.md) of an exported model: what it is, its origin, and how to use it.

It contains only what the run's files say, so no licence.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.config.schema import HubModelConfig, RunConfig
from openenv_pipe.reports.eval_table import changes_text, intervals_text
from openenv_pipe.runs.checkpoints import WARM_START_END
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import GREEDY, STAGES, during_by_name, read_reports
from openenv_pipe.runs.find import AT_START, START
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.markdown import interval_text, table
from openenv_pipe.system.untrusted_text import for_markdown, visible

WARM_START = STAGES[1]  # the label of the run's own evaluation after it


def model_card(
    folder: RunFolder,
    checkpoint: str,
    target: Path,
    *,
    step: int | None = None,
    prompt: str | None = None,
    sees_images: bool = False,
) -> str:
    """Return Markdown with the hub's metadata on top.

    checkpoint: its name; `start`: the model before training.
    target: the model's folder.
    step: the checkpoint's, of GRPO; its evaluations are shown beside that of the start.
    prompt: what the model saw first in an episode, with its control tokens.
    """
    config = folder.written_config
    sections = [
        _metadata(config, checkpoint, step, sees_images),
        f"# {target.name}",
        _origin(folder, config, checkpoint, step),
        _results(folder, checkpoint, step),
        _use(config, target, prompt, sees_images),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _metadata(config: RunConfig, checkpoint: str, step: int | None, sees_images: bool) -> str:
    training = [] if checkpoint == START else ["reinforcement-learning", config.trainer.loss.type]
    if training and step == 0:
        training = ["sft"]
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if sees_images else "text-generation",
        "tags": ["openenv", "openenv-pipe", *training],
    }
    if isinstance(config.model, HubModelConfig) and _is_of_hub(config.model):
        values["base_model"] = config.model.path
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _origin(folder: RunFolder, config: RunConfig, checkpoint: str, step: int | None) -> str:
    model, record = config.model, folder.record
    if isinstance(model, HubModelConfig):
        revision = f" at revision `{model.revision}`" if model.revision else ""
        base = f"`{model.path}`{revision}"
        if substitute := folder.record.facts.get("weights_from"):
            base += f", whose weights are those of {for_markdown(str(substitute))}"
    else:
        base = f"a tiny Qwen3 with random weights (seed {model.seed})"
    how = f"LoRA of rank {model.lora.rank}, merged" if model.lora.rank else "full training"
    if model.quantization != "none":
        how += f" into dequantized {model.quantization} weights"
    training = _training(config, checkpoint, step, how)
    rows = [
        ["environment", ", ".join(f"`{name}`" for name in (config.env.name, *config.beside))],
        ["base model", base],
        *([["training", training]] if training else []),
        ["checkpoint", f"`{checkpoint}`"],
        ["run", f"`{record.id}`, configuration sha256 `{record.config_digest[:16]}`"],
        ["openenv-pipe", record.version],
    ]
    where = "an [OpenEnv](https://github.com/huggingface/OpenEnv) environment"
    if checkpoint == START:
        origin = f"The model, before training, of a run on {where}"
    elif step == 0:
        has_environment = config.host.has_environment
        origin = f"Trained with supervision{f' for {where}' if has_environment else ''}"
    else:
        origin = f"Trained on {where}"
    return f"{origin} by openenv-pipe.\n\n{table(['', ''], rows)}"


def _training(config: RunConfig, checkpoint: str, step: int | None, how: str) -> str:
    """Say what has trained a checkpoint's weights, and how; empty for those before training."""
    if checkpoint == START:
        return ""
    trainer, warm = config.trainer, config.trainer.warm_start
    if step != 0:
        training = f"{trainer.loss.title}, {how}, group size {trainer.group_size}"
        after = f"{warm.steps} supervised steps on {for_markdown(warm.source.title)}"
        return f"{training}, after {after}" if warm.steps else training
    if not warm.steps:  # of a fork from the end of another run's warm start
        return f"supervised, {how}"
    # A checkpoint within the warm start is named after its step.
    num_steps = warm.steps if checkpoint == WARM_START_END.name else int(checkpoint[-6:])
    return f"supervised, {num_steps} steps on {for_markdown(warm.source.title)}, {how}"


def _results(folder: RunFolder, checkpoint: str, step: int | None) -> str:
    """Return what was measured of these weights, and of those at the run's start."""
    missing = (
        "This checkpoint was not evaluated. To evaluate it: `openenv-pipe eval "
        f"{folder.record.id}@{checkpoint}`."
    )
    during = {report.label: report for report in during_by_name(folder.path).values()}
    reports = {
        name: report
        for name, report in (during | read_reports(folder.path)).items()
        if _is_of_start(report) or _is_of(report, checkpoint, step)
    }
    if not reports:
        return missing
    rows = [
        [
            f"at the start (`{name}`)" if _is_of_start(report) else name,
            interval_text(report.success, percent=True),
            interval_text(report.reward),
            f"{report.num_scored_tasks} of {report.num_tasks}",
            str(report.samples_per_task),
            "" if report.temperature is None else f"{report.temperature:g}",
        ]
        for name, report in reports.items()
    ]
    titles = ["evaluation", "success", "reward", "tasks scored", "samples each", "temperature"]
    intervals = for_markdown(intervals_text(reports, folder.written_config))
    text = f"{table(titles, rows)}\n\nMeans over the scored tasks with {intervals}."
    is_missing = checkpoint != START and all(map(_is_of_start, reports.values()))
    warnings = [
        f"**Warning:** {name}: {for_markdown(changes)}."
        for name, report in reports.items()
        if (changes := changes_text(report))
    ]
    return "\n\n".join([f"{text} {missing}" if is_missing else text, *warnings])


def _is_of_start(report: EvalReport) -> bool:
    """Return whether a report is that of the run's beginning, in any of its environments."""
    return _stage(report) == START


def _is_of(report: EvalReport, checkpoint: str, step: int | None) -> bool:
    """Return whether a report is of a checkpoint's weights.

    At step 0 of GRPO there may be three: before training, within the warm start, and after it.
    """
    if step != 0 or report.step != 0:
        return report.step == step
    stage = _stage(report)
    if stage == WARM_START:
        return checkpoint == WARM_START_END.name
    # What `eval` plays is named after its checkpoint, and the agent if it is not the run's own.
    name = AT_START if checkpoint == START else checkpoint
    return stage == name or stage.startswith(f"{name}_")


def _stage(report: EvalReport) -> str:
    """Return a report's label without its environment, and as if it were not greedy."""
    return report.label.partition(".")[0].removesuffix(GREEDY)


def _use(config: RunConfig, target: Path, prompt: str | None, sees_images: bool) -> str:
    """Return Python code that samples one reply, greedily."""
    model_class = "AutoModelForImageTextToText" if sees_images else "AutoModelForCausalLM"
    told = "The prompt is the first one of an episode."
    if prompt is None:
        told = "Write a message of your own into the prompt."
        code = """tokenizer.apply_chat_template(
    [{"role": "user", "content": "..."}], add_generation_prompt=True, tokenize=False
)"""
    else:
        code = visible(json.dumps(prompt, ensure_ascii=False))
    where = json.dumps(str(target))
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", code))])
    return f"""{told}

{fence}python
from transformers import {model_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({where})
model = {model_class}.from_pretrained({where}, dtype="{config.model.dtype}")
prompt = {code}
inputs = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens={config.env.max_reply_tokens}, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
{fence}"""


def _is_of_hub(model: HubModelConfig) -> bool:
    """True for a base model with an id such as Qwen/Qwen3-0.6B, false for a local folder."""
    return (
        not Path(model.path).expanduser().is_dir()
        and model.path.count("/") == 1
        and not model.path.startswith((".", "/", "~"))
    )
