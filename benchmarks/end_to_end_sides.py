"""The trainings that `end_to_end.py` compares, each in its own process.

All train the same model on the same game (`end_to_end_games.py`) with the same settings: six
replies of at most 16 tokens to what the game says, and a reward that differs between the episodes
of every group. `ours` is `openenv_pipe.train` with an environment server. The others are TRL's
GRPOTrainer with a function of ours that plays: `trl` generates each reply with transformers'
`generate` from the whole conversation, `trl-cached` keeps the keys and values of a conversation
from turn to turn. TRL plays the same game inside its own process, without a server.

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

from end_to_end_games import GAMES

NUM_TURNS, MAX_REPLY = 6, 16
NUM_TASKS, GROUP_SIZE = 8, 8
SYSTEM = "Guess a word of five letters."
LR = 1e-5


def variety(replies: Sequence[str]) -> float:
    """The reward: how many different characters the replies have."""
    return len(set("".join(replies))) / 100


def episode_variety(episode: Any) -> float:
    return variety([turn.reply for turn in episode.turns])


def system_text(prompt_tokens: int) -> str:
    """Return the first message, lengthened to about so many tokens; one character is one token."""
    return (SYSTEM + " " * prompt_tokens)[: max(len(SYSTEM), prompt_tokens)]


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


def train_ours(game_name: str, prompt_tokens: int, runs_dir: str, overrides: Sequence[str]) -> None:
    import openenv_pipe.pipeline.run  # noqa: F401 (loads torch and transformers)
    from openenv_pipe import train

    game = GAMES[game_name]
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
        *("conf=wordle", "reward=env", "trainer=grpo", "model.autocast=float32"),
        *game.overrides(system_text(prompt_tokens)),
        f"env.max_turns={NUM_TURNS}",
        f"env.max_reply_tokens={MAX_REPLY}",
        f"env.max_episode_tokens={game.max_tokens}",
        f"model.max_length={game.max_tokens}",
        "+reward.terms.variety={type: python, target: end_to_end_sides:episode_variety, "
        "weight: 1.0, per_turn: false, use: sum, keywords: {}}",
        *(f"trainer.tasks_per_step={NUM_TASKS}", f"trainer.group_size={GROUP_SIZE}"),
        *(f"trainer.optimizer.lr={LR}", "trainer.optimizer.type=adamw"),
        *("trainer.optimizer.schedule=constant", "trainer.optimizer.lr_warmup_steps=0"),
        *("trainer.steps=100000", "trainer.checkpoint.every=100000", "trainer.warm_start.steps=0"),
        *("eval.num_tasks=1", "eval.baselines=false", f"runs_dir={runs_dir}", "device=cpu"),
        *overrides,
        callbacks=[on_step],
    )


def train_trl(game_name: str, prompt_tokens: int, output: str, *, is_cached: bool) -> None:
    from datasets import Dataset
    from end_to_end_trl import Rollout
    from learner_sides import build_model
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from openenv_pipe.models.tiny import build_tokenizer

    game = GAMES[game_name]
    steps = Steps()
    rollout = Rollout(game, is_cached=is_cached)

    class Answers(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            steps.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end(rollout.seconds, rollout.num_sampled)

    shape = {"hidden": 128, "intermediate": 1024, "layers": 2, "heads": 4, "kv_heads": 4}
    messages = [
        {"role": "system", "content": system_text(prompt_tokens)},
        {"role": "user", "content": game.first},
    ]
    trainer = GRPOTrainer(
        model=build_model(shape | {"head_size": 32, "vocabulary": 261}),
        processing_class=build_tokenizer(),
        reward_funcs=lambda replies, **_: [variety(each) for each in replies],
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": [messages] * 10_000}),
        callbacks=[Answers()],
        args=GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=NUM_TASKS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=game.max_tokens,
            max_steps=100_000,
            learning_rate=LR,
            lr_scheduler_type="constant",
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            bf16=False,
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
    side, game_name, num_tokens, folder, *others = sys.argv[1:]
    try:
        if side == "ours":
            train_ours(game_name, int(num_tokens), folder, others)
        else:
            train_trl(game_name, int(num_tokens), folder, is_cached=side == "trl-cached")
    except EOFError:
        pass
