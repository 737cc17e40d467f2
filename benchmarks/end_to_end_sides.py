"""The trainings that `end_to_end.py` compares, each in its own process.

All train the same model on the same game (`end_to_end_games.py`) with the same settings: short
replies to what the game says, and a reward that differs between the episodes of most groups. `ours`
is `openenv_pipe.train` with an environment server. The others are TRL's GRPOTrainer with a function
of ours that plays: `trl` generates each reply with transformers' `generate` from the whole
conversation, `trl-cached` keeps the keys and values of a conversation from turn to turn. TRL plays
the same game inside its own process, without a server.

A step of the training begins when the process reads a line, and the process answers each with a
line of JSON.
"""

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from end_to_end_games import GAMES, GameOf

NUM_TASKS, GROUP_SIZE = 8, 8
LR = 1e-5


def memory_mb(name: str) -> float:
    """Return this process's memory: VmRSS is the current value, VmHWM the peak since the reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) / 1024


class Steps:
    """Answers for each step, and waits until the next one is asked for."""

    def __init__(self) -> None:
        """The memory until now, with the libraries loaded, does not count."""
        gc.collect()
        self._start_mb = memory_mb("VmRSS")

    def begin(self) -> None:
        """Wait for a line. Raises EOFError when the benchmark is over."""
        if not sys.stdin.readline():
            raise EOFError
        Path("/proc/self/clear_refs").write_text("5")  # This resets VmHWM.
        self._started, self._worked = time.perf_counter(), time.process_time()

    def end(self, rollout_s: float, num_sampled: int) -> None:
        answer = {
            "step_s": time.perf_counter() - self._started,
            "cpu_s": time.process_time() - self._worked,
            "rollout_s": rollout_s,
            "num_sampled": num_sampled,
            "memory_mb": memory_mb("VmHWM") - self._start_mb,
        }
        print(json.dumps(answer), file=OUTPUT, flush=True)


def train_ours(
    game: GameOf, model: str, precision: str, runs_dir: str, overrides: Sequence[str]
) -> None:
    import openenv_pipe.pipeline.run  # noqa: F401 (loads torch and transformers)
    from openenv_pipe import train

    steps = Steps()

    def on_step(run: Any, metrics: Any) -> str | None:
        steps.end(metrics["time/rollout_s"], round(metrics["tokens/sampled"]))
        try:
            steps.begin()
        except EOFError:
            return "the benchmark is over"
        return None

    steps.begin()
    train(
        *("conf=wordle", "reward=env", "trainer=grpo"),
        *(f"model={model}", f"model.autocast={precision}"),
        *game.overrides,
        f"env.max_turns={game.num_turns}",
        f"env.max_reply_tokens={game.max_reply}",
        f"env.max_episode_tokens={game.max_tokens}",
        *([f"model.max_length={game.max_tokens}"] if model == "tiny" else []),
        f"+reward.terms.benchmark={game.term}",
        *(f"trainer.tasks_per_step={NUM_TASKS}", f"trainer.group_size={GROUP_SIZE}"),
        *(f"trainer.optimizer.lr={LR}", "trainer.optimizer.type=adamw"),
        *("trainer.optimizer.schedule=constant", "trainer.optimizer.lr_warmup_steps=0"),
        *("trainer.steps=100000", "trainer.checkpoint.every=100000", "trainer.warm_start.steps=0"),
        *("eval.num_tasks=1", "eval.baselines=false", f"runs_dir={runs_dir}", "device=cpu"),
        *overrides,
        callbacks=[on_step],
    )


def model_and_tokenizer(name: str) -> tuple[Any, Any]:
    """Return what TRL trains, with weights in float32: the tiny model or a pretrained one."""
    from learner_sides import build_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from openenv_pipe.config.compose import compose
    from openenv_pipe.models.hub import model_source
    from openenv_pipe.models.tiny import build_tokenizer

    if name == "tiny":
        shape = {"hidden": 128, "intermediate": 1024, "layers": 2, "heads": 4, "kv_heads": 4}
        model = build_model(shape | {"head_size": 32, "vocabulary": 261})
        return model, build_tokenizer()
    folder = model_source(compose(["conf=smoke", f"model={name}"]).config.model)
    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        AutoTokenizer.from_pretrained(folder),
    )


def train_trl(
    game: GameOf, model_name: str, precision: str, output: str, *, is_cached: bool
) -> None:
    from datasets import Dataset
    from end_to_end_trl import Rollout
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps = Steps()
    rollout = Rollout(game, is_cached=is_cached)
    model, tokenizer = model_and_tokenizer(model_name)
    # All activations of a larger model would not fit into memory.
    num_parts = 1 if model_name == "tiny" else 8

    class Answers(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end(rollout.seconds, rollout.num_sampled)

    messages = [
        {"role": "system", "content": game.system},
        {"role": "user", "content": game.first},
    ]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda replies, **_: [game.reward(each) for each in replies],
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": [messages] * 10_000}),
        callbacks=[Answers()],
        args=GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=NUM_TASKS * GROUP_SIZE // num_parts,
            gradient_accumulation_steps=num_parts,
            num_generations=GROUP_SIZE,
            max_completion_length=game.max_tokens,
            max_steps=100_000,
            learning_rate=LR,
            lr_scheduler_type="constant",
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            bf16=precision == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            seed=0,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    OUTPUT, sys.stdout = sys.stdout, sys.stderr  # Libraries print to stdout.
    side, game_name, number, model_name, precision, folder, *others = sys.argv[1:]
    try:
        if side == "ours":
            train_ours(GAMES[game_name](int(number)), model_name, precision, folder, others)
        else:
            is_cached = side == "trl-cached"
            game = GAMES[game_name](int(number))
            train_trl(game, model_name, precision, folder, is_cached=is_cached)
    except EOFError:
        pass
