"""The plots of a report, made of metrics and eval reports. Gaps in the data stay gaps.

matplotlib is imported inside the functions, because its import takes longer than all of `--help`.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy

from openenv_pipe.extras.report.sections import Records
from openenv_pipe.runs.eval_report import EvalReport
from openenv_pipe.runs.evals import read_during, read_stages
from openenv_pipe.runs.folder import RunFolder
from openenv_pipe.runs.metrics import read_metrics
from openenv_pipe.system.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GREEN, ORANGE, GREY = "#2f6db5", "#2b8a5b", "#d9772b", "#8a8f98"
INK = "#2b2f36"
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c5c9cf",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eceef1",
    "xtick.color": "#6b7078",
    "ytick.color": "#6b7078",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
LOSS_PANELS = {
    "Entropy (nats a token)": {"loss/entropy": BLUE},
    "KL to the reference (nats a token)": {"loss/kl": GREEN},
    "Cross entropy beside the policy's loss": {"loss/echo": BLUE, "loss/replay": GREEN},
    "Gradient norm before clipping": {"grad/norm": ORANGE},
    "|logprob of trainer − of sampler|": {"mismatch/mean": BLUE, "mismatch/max": ORANGE},
    "Share of tokens at a clip": {"clip/low": BLUE, "clip/high": ORANGE},
}
DPI = 150
WARM_START_WIDTH = 0.75  # relative to a GRPO panel
SMOOTHED_SHARE = 0.08  # width of the smoothing window as a fraction of all steps


def learning_curves(folder: RunFolder) -> bytes | None:
    """Return the learning curves of a run as it is now, as a PNG; None without anything to plot.

    Raises RunFolderError: A file of the run is damaged.
    """
    records = read_metrics(folder.metrics_path)
    reports = [*read_stages(folder.path).values(), *read_during(folder.path)]
    with TemporaryDirectory() as place:
        path = Path(place) / "learning_curves.png"
        steps = folder.written_config.trainer.steps
        return path.read_bytes() if draw_learning_curves(path, records, reports, steps) else None


def draw_learning_curves(
    path: Path, records: Records, reports: Sequence[EvalReport], num_steps: int
) -> bool:
    """Plot the warm start's loss, then reward and success over GRPO steps with evaluations.

    reports: of the stages and during training; num_steps: of GRPO when the run is complete.
    Returns False, and writes no file, if there is nothing to plot.
    """
    warm, grpo = _of_stage(records, "warm_start"), _of_stage(records, "grpo")
    widths = [WARM_START_WIDTH] * bool(warm) + [1.0, 1.0] * bool(grpo or reports)
    if not widths:
        return False
    with canvas(path, 1, widths) as axes:
        if warm:
            _draw_series(axes[0], warm, "loss/supervised", ORANGE, label="")
            _label(axes[0], "Warm start: supervised loss", "warm start step")
        if grpo or reports:
            reward, success = axes[-2:]
            _draw_series(reward, grpo, "reward/mean", BLUE, label="train episodes")
            _draw_series(success, grpo, "success/rate", GREEN, label="train episodes")
            _label(reward, "Reward", "GRPO step")
            _label(success, "Success rate", "GRPO step")
            last_step = grpo[-1]["step"] if grpo else 0
            width = max(num_steps, last_step, 1)
            for axis, measure in ((reward, "reward"), (success, "success")):
                _draw_eval_points(axis, reports, measure)
                axis.set_xlim(-0.04 * width, 1.04 * width)
            success.set_ylim(-0.04, 1.04)
            if reward.get_legend_handles_labels()[0]:
                reward.legend(loc="best")
    return True


def draw_losses(path: Path, records: Records) -> bool:
    """Plot what explains a flat reward: entropy, KL, gradient norm, mismatch, clipping.

    Metrics that were always zero get no panel, such as the KL without a reference. Returns False,
    and writes no file, if no GRPO step has any of them.
    """
    grpo = _of_stage(records, "grpo")
    panels = {
        title: lines
        for title, lines in LOSS_PANELS.items()
        if any(record.get(key) for record in grpo for key in lines)
    }
    if not panels:
        return False
    num_columns = min(len(panels), 2)
    num_rows = -(-len(panels) // num_columns)
    with canvas(path, num_rows, [1.0] * num_columns) as axes:
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for key, colour in lines.items():
                _draw_series(axis, grpo, key, colour, label=key.partition("/")[2])
            _label(axis, title, "GRPO step")
            if len(lines) > 1:
                axis.legend(loc="best")
                if all(record.get(key) for record in grpo for key in lines):
                    axis.set_yscale("log")  # Mean and max differ by orders of magnitude.
        for axis in axes[len(panels) :]:
            axis.remove()
    return True


def smooth(values: numpy.ndarray, window: int) -> numpy.ndarray:
    """Compute the centred moving mean, over fewer values at the ends. [N] -> [N]"""
    kernel = numpy.ones(window)
    counts = numpy.convolve(numpy.ones(len(values)), kernel, mode="full")
    sums = numpy.convolve(values, kernel, mode="full")
    start = (window - 1) // 2
    return (sums / counts)[start : start + len(values)]


def _draw_series(axis: "Axes", records: Records, key: str, colour: str, label: str) -> None:
    points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    if not points:
        return
    steps, values = numpy.array(points, dtype=float).T
    window = max(1, round(len(values) * SMOOTHED_SHARE)) | 1  # odd, so that it is centred
    if window > 1:
        axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1.0)
    marker = "o" if len(values) == 1 else None
    axis.plot(
        steps, smooth(values, window), color=colour, linewidth=1.9, label=label, marker=marker
    )


def _draw_eval_points(axis: "Axes", reports: Sequence[EvalReport], measure: str) -> None:
    """Plot eval means with their intervals at the steps that trained the model."""
    looks = {
        "start": (GREY, "s", "eval: start"),
        "warm_start": (ORANGE, "^", "eval: after warm start"),
        "trained": (INK, "o", "eval: trained"),
    }
    during = (INK, ".", "eval: during training")
    labelled = set()
    for report in reports:
        interval = getattr(report, measure)
        if interval is None or report.step is None:
            continue
        colour, marker, label = looks.get(report.label, during)
        low, high = (interval.mean if x is None else x for x in (interval.low, interval.high))
        bars = [[interval.mean - low], [high - interval.mean]]
        axis.errorbar(
            [report.step], [interval.mean], yerr=bars, fmt=marker, color=colour,
            label=None if label in labelled else label,
            markersize=5.5, capsize=3.5, elinewidth=1.4, zorder=3, clip_on=False,
        )  # fmt: skip
        labelled.add(label)


@contextmanager
def canvas(path: Path, num_rows: int, width_ratios: Sequence[float]) -> "Iterator[list[Axes]]":
    """Yield panels to draw on, row by row; write them to `path` at the end of the block.

    Needs no display, leaves matplotlib's global state alone, and writes no date into the PNG.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Numbers near the largest float overflow while they are scaled, and are drawn at the border.
    with matplotlib.rc_context(STYLE), numpy.errstate(over="ignore", invalid="ignore"):
        figure = Figure(figsize=(4.2 * sum(width_ratios), 3.1 * num_rows), layout="constrained")
        axes = figure.subplots(
            num_rows, len(width_ratios), squeeze=False, width_ratios=width_ratios
        )
        yield list(axes.flat)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=DPI, metadata={"Software": None})
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, image.getvalue())


def _label(axis: "Axes", title: str, x_label: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(x_label)
    axis.locator_params(axis="x", integer=True)


def _of_stage(records: Records, stage: str) -> Records:
    return [record for record in records if record.get("stage") == stage]
