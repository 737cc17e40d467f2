"""Score the tokens of an episode by a checkpoint: what else it would write, and how likely.

It is a program that the viewer starts for one episode (`web/scoring.py`), with one line of JSON in
and one out. So it can be ended at any time, and its memory is free afterwards.

Shape letters: N sampled tokens of a sample, R some of them, H hidden size, V vocabulary, K the most
probable tokens.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.errors import ConfigError, PipeError, RunFolderError
from openenv_pipe.extras.viewer.episodes.index import file_of
from openenv_pipe.extras.viewer.episodes.query import TRAIN
from openenv_pipe.extras.viewer.web.tokens import start_of_training
from openenv_pipe.learner.seeding import prepare_thread
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.load import load_policy, select_device
from openenv_pipe.models.teacher import ELEMENTS
from openenv_pipe.runs.episodes import read_recorded_episodes
from openenv_pipe.runs.evals import during_by_name, read_reports
from openenv_pipe.runs.find import find_model
from openenv_pipe.system.process import usable_cores
from openenv_pipe.types import Episode, Sample

NUM_ALTERNATIVES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredTokens:
    """What a policy says of sampled tokens, in their order."""

    logprob: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)  # KL(policy || start), in nats
    # Of the most probable tokens in each place, the first one's first: id and probability.
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class ScoringPolicy:
    """Scores sampled tokens by a checkpoint, with its KL from the policy before training."""

    def __init__(self, config: RunConfig, scored: Path | None, start: Path | None) -> None:
        """scored, start: checkpoints; None: the untrained weights. Raises ConfigError."""
        first, second = (None, start) if scored is None else (start, scored)
        self._policy = load_policy(
            config.model,
            seed=config.seed,
            device=select_device(config.device),
            checkpoint=first,
            max_tokens=config.max_episode_tokens,
        )
        check_forward(self._policy, config.max_episode_tokens)
        self._is_start = scored == start
        self._is_reference = scored is None  # Then the policy has the weights of the start.
        if not self._is_start:
            assert second is not None
            self._policy.keep_reference()
            self._policy.load_model(second)

    def _as_scored(self, is_scored: bool) -> AbstractContextManager[Any]:
        if self._is_start or is_scored != self._is_reference:
            return nullcontext()
        return self._policy.as_reference()

    @torch.no_grad()
    def score(self, sample: Sample, temperature: float) -> ScoredTokens:
        policy, scored = self._policy, ScoredTokens()
        batch = pack([sample], share=False, device=policy.device)
        hidden_NH = []
        for is_scored in (True, False):
            with self._as_scored(is_scored):
                hidden_NH.append(policy.predictors_hidden(batch).index_select(0, batch.places))
        targets_N = batch.targets.index_select(0, batch.places)
        num_rows = max(1, ELEMENTS // policy.model.get_input_embeddings().num_embeddings)
        parts = zip(*(each.split(num_rows) for each in (*hidden_NH, targets_N)), strict=True)
        for ours_RH, theirs_RH, targets_R in parts:
            ours_RV = self._logprobs(ours_RH, temperature, is_scored=True)
            theirs_RV = self._logprobs(theirs_RH, temperature, is_scored=False)
            top_RK = ours_RV.topk(min(NUM_ALTERNATIVES, ours_RV.shape[1]), dim=-1)
            scored.logprob.extend(ours_RV.gather(1, targets_R[:, None])[:, 0].tolist())
            scored.kl.extend((ours_RV.exp() * (ours_RV - theirs_RV)).sum(dim=-1).tolist())
            rows = zip(top_RK.indices.tolist(), top_RK.values.exp().tolist(), strict=True)
            scored.top.extend([list(zip(ids, shares, strict=True)) for ids, shares in rows])
        return scored

    def _logprobs(
        self, hidden_RH: torch.Tensor, temperature: float, *, is_scored: bool
    ) -> torch.Tensor:
        with self._as_scored(is_scored):
            logits_RV = self._policy.logits(hidden_RH)
        return torch.log_softmax(logits_RV.float() / temperature, dim=-1)


def score_episode(
    policy: ScoringPolicy, group: str, episode: Episode, temperature: float
) -> dict[str, list[Any]]:
    """Return columns with a value for each token of an episode, as `web.tokens.tokens_of` has.

    A token that no turn of the agent sampled has null.
    """
    by_turn: dict[int, Iterator[tuple[Any, ...]]] = {}
    for sample in episode_samples(group, episode, [0.0] * len(episode.turns)):
        if not any(sample.loss_mask):
            continue
        scored = policy.score(sample, temperature)
        values = zip(scored.logprob, scored.kl, scored.top, strict=True)
        by_turn.update(dict.fromkeys(sample.trained_turns, values))
    columns: dict[str, list[Any]] = {"scored": [], "kl": [], "top": []}
    for number, turn in enumerate(episode.turns):
        unknown = [(None, None, None)]
        rows = unknown * len(turn.prompt_ids)
        for _ in turn.completion_ids:
            rows.append(next(by_turn[number]) if number in by_turn else unknown[0])
        for row in rows:
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    return columns


def temperature_of(folder: Path, config: RunConfig, source: str, step: int | None) -> float:
    if source == TRAIN:
        return config.trainer.temperature if step else 1.0
    label = source.removeprefix("eval/")
    reports = {each.label: each for each in during_by_name(folder).values()} | read_reports(folder)
    # Greedy decoding records logprobs at temperature 1.
    return (reports[label].temperature if label in reports else None) or 1.0


def answer(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Score the episode that is asked for. Raises PipeError and OSError."""
    path = Path(wanted["path"])
    source, step, line = wanted["source"], wanted["step"], wanted["line"]
    word = f"{path}@{wanted['checkpoint']}"
    model = find_model(word, trust=wanted["trust"], secrets_of=["model"])
    if not model.config.engine.capabilities.needs_tokenizer:
        raise ConfigError("the model of this run is behind an endpoint, and has no weights here")
    found = read_recorded_episodes(file_of(path, source, step), {line})
    if not found:
        raise RunFolderError(f"{path} has no episode of {source}, step {step}, in line {line}")
    config = model.config
    prepare_thread(config.num_threads or len(usable_cores()))
    start = start_of_training(model.folder)
    policy = ScoringPolicy(config, model.checkpoint, start)
    temperature = temperature_of(path, config, source, step)
    return {
        **score_episode(policy, found[0].group, found[0].episode, temperature),
        "by": model.label,
        "start": start.name if start else "untrained",
        "temperature": temperature,
    }


def _end_with_the_viewer() -> None:
    """Wait until the viewer, however it ends, closes the pipe, and end the process."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    signal.alarm(wanted["limit_s"])  # ends the process whatever it is doing
    threading.Thread(target=_end_with_the_viewer, daemon=True).start()
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    try:
        found = answer(wanted)
    except (PipeError, OSError) as error:
        found = {"error": str(error)}
    json.dump(found, output)
    output.close()


if __name__ == "__main__":
    main()
