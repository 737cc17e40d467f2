"""The model card (README.md) of an exported model: what it is, its origin, and how to use it.

It contains only what the run's files say, so no licence.
"""

from pathlib import Path
from typing import Any

import yaml

from openenv_pipe.config.schema import HubModelConfig, RunConfig
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.markdown import interval_text, table


def model_card(folder: RunFolder, checkpoint: Path, name: str, *, sees_images: bool = False) -> str:
    """Return Markdown with the hub's metadata on top. `name` is the name of the model's folder."""
    config = folder.written_config
    sections = [
        _metadata(config, sees_images),
        f"# {name}",
        _origin(folder, config, checkpoint),
        _results(folder),
        _use(config, name, sees_images),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _metadata(config: RunConfig, sees_images: bool) -> str:
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if sees_images else "text-generation",
        "tags": ["openenv", "openenv-pipe", "reinforcement-learning", config.trainer.loss.type],
    }
    if isinstance(config.model, HubModelConfig) and _is_of_hub(config.model):
        values["base_model"] = config.model.path
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _origin(folder: RunFolder, config: RunConfig, checkpoint: Path) -> str:
    model, trainer, record = config.model, config.trainer, folder.record
    if isinstance(model, HubModelConfig):
        revision = f" at revision `{model.revision}`" if model.revision else ""
        base = f"`{model.path}`{revision}"
    else:
        base = f"a tiny Qwen3 with random weights (seed {model.seed})"
    how = f"LoRA of rank {model.lora.rank}, merged" if model.lora.rank else "full training"
    if model.quantization != "none":
        how += f" into weights that were {model.quantization}, written out"
    rows = [
        ["environment", ", ".join(f"`{name}`" for name in (config.env.name, *config.beside))],
        ["base model", base],
        ["training", f"{trainer.loss.title}, {how}, group size {trainer.group_size}"],
        ["checkpoint", f"`{checkpoint.name}`"],
        ["run", f"`{record.id}`, configuration sha256 `{record.config_digest[:16]}`"],
        ["openenv-pipe", record.version],
    ]
    return (
        "Trained on an [OpenEnv](https://github.com/huggingface/OpenEnv) environment by "
        f"openenv-pipe.\n\n{table(['', ''], rows)}"
    )


def _results(folder: RunFolder) -> str:
    reports = read_reports(folder.path)
    if not reports:
        return ""
    rows = [
        [
            name,
            interval_text(report.success, percent=True),
            interval_text(report.reward),
            f"{report.num_scored_tasks} of {report.num_tasks}",
            str(report.samples_per_task),
            "" if report.temperature is None else f"{report.temperature:g}",
        ]
        for name, report in reports.items()
    ]
    titles = ["evaluation", "success", "reward", "tasks scored", "samples each", "temperature"]
    confidence = folder.written_config.eval.confidence
    return f"{table(titles, rows)}\n\nMeans over the scored tasks with {confidence:.0%} intervals."


def _use(config: RunConfig, name: str, sees_images: bool) -> str:
    dtype = config.model.dtype
    model_class = "AutoModelForImageTextToText" if sees_images else "AutoModelForCausalLM"
    return f"""```python
from transformers import {model_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}", dtype="{dtype}")
prompt = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "..."}}], add_generation_prompt=True, return_tensors="pt"
)
```"""


def _is_of_hub(model: HubModelConfig) -> bool:
    """True for a base model with an id such as Qwen/Qwen3-0.6B, false for a local folder."""
    return (
        not Path(model.path).expanduser().is_dir()
        and model.path.count("/") == 1
        and not model.path.startswith((".", "/", "~"))
    )
