"""Recorded episodes as data sets of other tools: TRL, verifiers, Harbor, or plain tables."""

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from openenv_pipe import __version__
from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.errors import RunFolderError, TrainingError
from openenv_pipe.extras.viewer.episodes.listing import FoundEpisode
from openenv_pipe.extras.viewer.episodes.verifiers import (
    FILE_NAME,
    messages_of,
    prompt_lengths_of,
    tools_of,
    verifiers_episode,
)
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.system.optional_packages import needed_by
from openenv_pipe.system.secrets import redact
from openenv_pipe.system.untrusted_json import encodable_json
from openenv_pipe.types import Sample, Turn

ExportForm = Literal["parquet", "jsonl", "trl", "verifiers", "atif"]
SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl", "trl": ".jsonl"}
ATIF_VERSION = "ATIF-v1.4"
ROWS_PER_BATCH = 1000  # that are in memory at once
MESSAGE_KEYS = ("role", "content", "name", "calls", "call")  # of messages in parquet
SOURCES = {"system": "system", "assistant": "agent"}  # ATIF's names of roles; others: user
Row = dict[str, Any]


def export_episodes(
    folder: RunFolder, found: Iterable[FoundEpisode], form: ExportForm, output: Path
) -> int:
    """Write episodes to a file, or for `atif` and `verifiers` to a folder; return how many rows.

    Raises ConfigError and RunFolderError.
    """
    if output.exists():
        raise RunFolderError(f"{output} exists already; name another file with --output")
    make = RowMaker(folder)
    rows = (row for each in found for row in make.rows(form, each))
    plain = (encodable_json([row])[0] for row in rows)
    if form == "atif":
        return _write_each(output, plain)
    if form == "verifiers":
        return _write_lines(output / FILE_NAME, plain)
    if form == "parquet":
        return _write_parquet(output, plain)
    return _write_lines(output, plain)


class RowMaker:
    def __init__(self, folder: RunFolder) -> None:
        config = folder.written_config
        self._run = folder.record.id
        self._env = config.env.name
        self._model = str(config.engine.player or config.model.label)

    def rows(self, form: ExportForm, found: FoundEpisode) -> list[Row]:
        match form:
            case "jsonl" | "parquet":
                return self._flat(found)
            case "trl":
                return [self._trl(found)]
            case "verifiers":
                env = found.recorded.episode.task.env or self._env
                return [verifiers_episode(self._run, env, self._model, found)]
            case "atif":
                return [self._atif(found)]

    def _flat(self, found: FoundEpisode) -> list[Row]:
        """Return a row with all of an episode for each sample; `loss_mask` marks trained tokens."""
        episode, group = found.recorded.episode, found.recorded.group
        samples: list[Sample] = []
        if all(turn.usage is None for turn in episode.turns):
            try:
                samples = episode_samples(group, episode, [0.0] * len(episode.turns))
            except TrainingError as error:
                raise RunFolderError(f"an episode of {self._run} is damaged: {error}") from error
        facts = self._all_facts(found)
        if not samples:
            return [{**facts, "sample": 0, "token_ids": [], "loss_mask": [], "logprobs": []}]
        return [
            {
                **facts,
                "sample": number,
                "token_ids": sample.token_ids,
                "loss_mask": [int(chosen) for chosen in sample.loss_mask],
                "logprobs": sample.logprobs,
            }
            for number, sample in enumerate(samples)
        ]

    def _all_facts(self, found: FoundEpisode) -> Row:
        episode = found.recorded.episode
        return {
            **self._facts(found),
            "seed": episode.task.seed,
            "reset": json.dumps(episode.task.reset),
            "error": episode.error,
            "advantages": found.recorded.advantages,
            "messages": [message for message, _ in messages_of(episode, has_calls=True)],
        }

    def _facts(self, found: FoundEpisode) -> Row:
        episode = found.recorded.episode
        return {
            "run": self._run,
            "source": found.entry.source,
            "step": found.entry.step,
            "group": found.recorded.group,
            "member": episode.member,
            "task": episode.task.id,
            "status": str(episode.status),
            "success": episode.success,
            "reward": float(episode.reward),
            "reward_terms": json.dumps(episode.reward_terms),
        }

    def _trl(self, found: FoundEpisode) -> Row:
        episode = found.recorded.episode
        tools = tools_of(episode)
        return {
            "messages": [message for message, _ in messages_of(episode)],
            **({"tools": json.dumps(tools)} if tools else {}),
            "reward": float(episode.reward),
        }

    def _atif(self, found: FoundEpisode) -> Row:
        episode = found.recorded.episode
        prompt_length_of = prompt_lengths_of(episode)
        steps: list[Row] = []
        for message, turn in messages_of(episode):
            source = SOURCES.get(message["role"], "user")
            step: Row = {"step_id": len(steps) + 1, "source": source, "message": message["content"]}
            if turn is not None:
                step |= _agent_step(turn, len(steps) + 1, prompt_length_of[id(turn)])
            steps.append(step)
        return {
            "schema_version": ATIF_VERSION,
            "session_id": f"{self._run}/{found.place}",
            "agent": {"name": "openenv-pipe", "version": __version__, "model_name": self._model},
            "steps": steps,
            "final_metrics": {
                "total_prompt_tokens": sum(episode.prompt_lengths),
                "total_completion_tokens": episode.num_completion_tokens,
                "total_steps": len(steps),
            },
            "extra": self._facts(found),
        }


def _agent_step(turn: Turn, step_id: int, prompt_length: int) -> Row:
    metrics: Row = {
        "prompt_tokens": prompt_length,
        "completion_tokens": turn.num_completion_tokens,
    }
    if turn.completion_ids:
        metrics |= {"completion_token_ids": turn.completion_ids, "logprobs": turn.logprobs}
    found: Row = {"metrics": metrics}
    if not turn.steps:
        return found
    calls, results = [], []
    for number, step in enumerate(turn.steps):
        call_id = f"call_{step_id}_{number}"
        arguments = step.action.get("arguments", step.action)
        calls.append(
            {
                "tool_call_id": call_id,
                "function_name": str(step.action.get("tool_name", "step")),
                "arguments": arguments if isinstance(arguments, dict) else {"value": arguments},
            }
        )
        results.append({"source_call_id": call_id, "content": json.dumps(step.observation)})
    return {**found, "tool_calls": calls, "observation": {"results": results}}


def _write_lines(output: Path, rows: Iterator[Row]) -> int:
    count = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("x", encoding="utf-8") as file:
        for row in rows:
            file.write(_dump(row) + "\n")
            count += 1
    return count


def _write_each(output: Path, rows: Iterator[Row]) -> int:
    """Write each row as a file of its own, as Harbor has them."""
    output.mkdir(parents=True)
    count = 0
    for count, row in enumerate(rows, start=1):
        (output / f"trajectory_{count:06d}.json").write_text(_dump(row) + "\n", encoding="utf-8")
    return count


def _write_parquet(output: Path, rows: Iterator[Row]) -> int:
    with needed_by("--format parquet", "datasets", ", or use --format jsonl"):
        import pyarrow
        from pyarrow import parquet
    schema, count = _parquet_schema(pyarrow), 0
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with parquet.ParquetWriter(output, schema) as writer:
            while batch := list(islice(rows, ROWS_PER_BATCH)):
                _reject_other_keys(batch)
                clean = [json.loads(_dump(row)) for row in batch]
                writer.write_table(pyarrow.Table.from_pylist(clean, schema=schema))
                count += len(batch)
    except BaseException:
        output.unlink(missing_ok=True)
        raise
    return count


def _reject_other_keys(rows: Iterable[Row]) -> None:
    """Raise RunFolderError if a message has a key for which the table has no column."""
    for row in rows:
        others = {key for message in row["messages"] for key in message} - {*MESSAGE_KEYS}
        if others:
            raise RunFolderError(
                f"messages of task {row['task']} have the keys {', '.join(sorted(others))}, which "
                "a table of --format parquet has no column for; use --format jsonl"
            )


def _parquet_schema(pyarrow: Any) -> Any:
    text, number = pyarrow.string(), pyarrow.int64()
    message = pyarrow.struct([(key, text) for key in MESSAGE_KEYS])
    columns = {
        **dict.fromkeys(("run", "source", "group", "task", "status", "reset", "error"), text),
        **dict.fromkeys(("step", "member"), number),
        "seed": pyarrow.uint64(),
        "success": pyarrow.bool_(),
        "reward": pyarrow.float64(),
        "reward_terms": text,
        "advantages": pyarrow.list_(pyarrow.float64()),
        "messages": pyarrow.list_(message),
        "sample": number,
        "token_ids": pyarrow.list_(number),
        "loss_mask": pyarrow.list_(pyarrow.int8()),
        "logprobs": pyarrow.list_(pyarrow.float64()),
    }
    return pyarrow.schema([*columns.items()])


def _dump(row: Row) -> str:
    return redact(json.dumps(row))


def default_output(folder: RunFolder, form: ExportForm) -> Path:
    """Return where an export goes: beside the run folder's own files, numbered if one exists."""
    place = folder.path / "exports"
    names = chain([form], (f"{form}_{number}" for number in range(2, 10**6)))
    candidates = (place / f"{name}{SUFFIXES.get(form, '')}" for name in names)
    return next(path for path in candidates if not path.exists())
