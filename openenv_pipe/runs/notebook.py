"""What a notebook shows of a run: metrics, evaluations and episodes as tables and data frames."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Any

from openenv_pipe.algorithms.credit import trained_turns
from openenv_pipe.runs.episodes import RecordedEpisode, as_groups
from openenv_pipe.runs.eval_difference import ReportDifference
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.system.intervals import Interval
from openenv_pipe.system.untrusted_text import for_people, shortened
from openenv_pipe.types import Episode, Group

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_SHOWN = 20  # episodes; the data frame has all
MAX_TEXT = 60  # characters of a cell


class Metrics(list[dict[str, Any]]):
    """The records of metrics.jsonl, one per step; docs/metrics.md says what each key means."""

    def to_pandas(self) -> "DataFrame":
        """A data frame with one row per step. Raises ModuleNotFoundError without pandas."""
        return data_frame(self)


class Episodes(list[Group]):
    """Groups of episodes, shown as one line for each episode."""

    def __init__(self, recorded: Sequence[RecordedEpisode], step: int | None) -> None:
        """step: the GRPO step that learned from the episodes, or whose weights were evaluated;
        None: no run has trained the model."""
        super().__init__(as_groups(recorded))
        self._step = step
        self._advantages = {
            (each.group, each.episode.member): _mean_advantage(each) for each in recorded
        }

    def to_pandas(self) -> "DataFrame":
        """A data frame with one row per episode. Raises ModuleNotFoundError without pandas.

        Columns: `step`, `group`, `task`, the reset keywords, `label.NAME` for each of the task's
        labels, `reply` (the last one), `reward`, `success`, `status`, `advantage`. A reset keyword
        that has the name of another column is `reset.NAME`. The reward is missing where an episode
        failed or has none, and the advantage where the episode was not trained on; it is the mean
        over the episode's trained turns.
        """
        return data_frame(
            {
                "step": self._step,
                "group": group.id,
                **_cells(each),
                "advantage": self._advantages[group.id, each.member],
            }
            for group in self
            for each in group.episodes
        )

    def __repr__(self) -> str:
        rows = [" | ".join(row.values()) for row in self._rows()]
        return "\n".join([*rows, *self._more()])

    def _repr_html_(self) -> str:
        rows = self._rows()
        titles = list(dict.fromkeys(title for row in rows for title in row))
        cells = [[row.get(title, "") for title in titles] for row in rows]
        return "".join([_table(titles, cells), *(f"<p>{more}</p>" for more in self._more())])

    def _rows(self) -> list[dict[str, str]]:
        episodes = [each for group in self for each in group.episodes]
        return [
            {title: _text(value) for title, value in _cells(each).items()}
            for each in episodes[:MAX_SHOWN]
        ]

    def _more(self) -> list[str]:
        num_more = sum(len(group.episodes) for group in self) - MAX_SHOWN
        return [f"and {num_more} more; to_pandas() has all"] if num_more > 0 else []


class EvalReports(dict[str, EvalReport]):
    """Evaluations by name, shown as one line each, and in a notebook as a table."""

    def __init__(
        self,
        reports: Iterable[tuple[str, EvalReport]] = (),
        differences: Mapping[str, ReportDifference] | None = None,
    ) -> None:
        """differences: by name, how reports differ from the first one, paired by task."""
        super().__init__(reports)
        self.differences = dict(differences or {})

    def __missing__(self, name: str) -> EvalReport:
        raise KeyError(f"no evaluation {name!r}; there is: {', '.join(self) or 'none yet'}")

    def to_pandas(self) -> "DataFrame":
        """A data frame with one row per evaluation. Raises ModuleNotFoundError without pandas.

        Columns: `label`, `step` (of GRPO; missing if no run has trained the model), `success`,
        `success low`, `success high` (the interval; missing if too few tasks were scored), the same
        of `reward`, `tasks`, `tasks scored`, `samples` (of a task), `temperature` (missing for a
        scripted policy) and `model`. With `differences` also those of `success difference` and
        `reward difference`: to the first evaluation, on the tasks that both have.
        """
        frame = data_frame(self._record(name) for name in self)
        return frame.astype({"step": "Int64", "temperature": float}) if self else frame

    def _record(self, name: str) -> dict[str, Any]:
        report, change = self[name], self.differences.get(name)
        record = {
            "label": name,
            "step": report.step,
            **_numbers("success", report.success),
            **_numbers("reward", report.reward),
            "tasks": report.num_tasks,
            "tasks scored": report.num_scored_tasks,
            "samples": report.samples_per_task,
            "temperature": report.temperature,
            "model": report.model,
        }
        if self.differences:
            record |= _numbers("success difference", change.success if change else None)
            record |= _numbers("reward difference", change.reward if change else None)
        return record

    def __repr__(self) -> str:
        lines = []
        for name, report in self.items():
            success, reward = _intervals(report, "")
            line = f"{name}: success {success}, reward {reward}, {report.played}"
            if name in self.differences:
                success, reward = _intervals(self.differences[name], "+")
                line += f"; paired with the first, success {success}, reward {reward}"
            lines.append(line)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self:
            return ""
        titles = ["evaluation", "success", "reward", "tasks scored", "samples"]
        if self.differences:
            titles += ["success, less the first's", "reward, less the first's"]
        rows = [
            [
                name,
                *_intervals(report, ""),
                f"{report.num_scored_tasks} of {report.num_tasks}",
                str(report.samples_per_task),
                *(_intervals(self.differences.get(name), "+") if self.differences else ()),
            ]
            for name, report in self.items()
        ]
        return _table(titles, rows)


def data_frame(records: Iterable[Mapping[str, Any]]) -> "DataFrame":
    """Return a data frame with a row for each record. Raises ModuleNotFoundError without pandas."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_pandas needs the package pandas: pip install pandas; "
            "without it, this is a list of Python objects",
            name="pandas",
        ) from error
    return pandas.DataFrame.from_records(list(records))


def _cells(episode: Episode) -> dict[str, Any]:
    """Return an episode's cells in a table, by the titles of the columns."""
    task = episode.task
    labels = {f"label.{name}": label for name, label in task.labels.items()}
    cells = {
        "reply": episode.turns[-1].reply if episode.turns else "",
        "reward": episode.reward if episode.is_scored else None,
        "success": episode.success,
        "status": str(episode.status),
    }
    own = {"step", "group", "task", *labels, *cells, "advantage"}
    keywords = {
        f"reset.{name}" if name in own else name: value for name, value in task.reset.items()
    }
    return {"task": task.id, **keywords, **labels, **cells}


def _mean_advantage(recorded: RecordedEpisode) -> float | None:
    """Return the mean over the turns that were trained; None if none was."""
    trained = set(trained_turns(recorded.episode))
    values = [each for turn, each in enumerate(recorded.advantages or ()) if turn in trained]
    return fmean(values) if values else None


def _text(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return " ".join(for_people(shortened(text.strip(), MAX_TEXT)).split())


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [("th", titles), *(("td", row) for row in rows)]
    shown = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in lines)
    return f"<table>{''.join(f'<tr>{cells}</tr>' for cells in shown)}</table>"


def _intervals(of: EvalReport | ReportDifference | None, sign: str) -> tuple[str, str]:
    """Return the success and the reward. sign: "+" shows that of a positive number, too."""
    if of is None:
        return "", ""
    return _shown(of.success, f"{sign}.1%"), _shown(of.reward, f"{sign}.3f")


def _numbers(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Return a mean and the limits of its interval as columns of a data frame."""
    return {
        name: interval.mean if interval else None,
        f"{name} low": interval.low if interval else None,
        f"{name} high": interval.high if interval else None,
    }


def _shown(interval: Interval | None, form: str) -> str:
    if interval is None:
        return "–"
    if interval.low is None or interval.high is None:
        return format(interval.mean, form)
    return f"{interval.mean:{form}} ({interval.low:{form}} to {interval.high:{form}})"
