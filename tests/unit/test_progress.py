"""The progress of a run: plain lines in files, one live line on terminals."""

import asyncio
import re
from io import StringIO

import pytest
import run_samples

from openenv_pipe.cli.progress import LiveProgress, build_progress
from openenv_pipe.system.progress import (
    LineProgress,
    StagePace,
    clock,
    long_phase,
    reporting_long_waits,
)


class _Terminal(StringIO):
    def isatty(self):
        return True


def _play(progress):
    progress.stage("warm_start", 1)
    progress.advance({"step": 1, "stage": "warm_start", "loss/supervised": 1.5, "lr": 0.1})
    progress.stage("grpo", 150)
    progress.note("eval [start]: 31%")
    for step in (12, 13):
        progress.advance(run_samples.record(step))
    progress.close()


def test_plain_progress_is_exactly_one_line_a_step():
    stream = StringIO()
    _play(build_progress(stream))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "warm_start 1/1 loss 1.500 left 0:00"
    assert lines[1] == "eval [start]: 31%"
    pattern = r"grpo 12/150 reward 0\.259 success 0\.26 tokens/s 5210 left \d+:\d\d"
    assert re.fullmatch(pattern, lines[2])


def test_the_phases_of_a_start_are_shown_at_their_beginning():
    lines: list[str] = []
    progress = LineProgress(lines.append)
    with progress.phase("loading the libraries"):
        assert lines == ["loading the libraries"]
    terminal = _Terminal()
    live = LiveProgress(terminal, 80)
    with live.phase("starting the servers"):
        with live.phase("loading the model"):
            live._live.refresh()
        assert "loading the model · 0:0" in terminal.getvalue()
        live._live.refresh()
    live.close()
    assert "starting the servers · 0:0" in terminal.getvalue()


def test_no_time_is_left_while_nothing_moves(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    pace = StagePace("grpo", 10)
    assert pace.left() == "no step for 0:00"
    now_s = 10.0
    pace.advance(1)
    assert pace.left() == "left 1:30"
    now_s = 39.0
    assert pace.left() == "left 1:30"
    now_s = 41.0
    assert pace.left() == "no step for 0:31"
    pace.advance(2)
    assert pace.left().startswith("left")


@pytest.mark.usefixtures("virtual_time")
async def test_a_long_wait_is_told_and_a_short_one_is_not():
    told: list[str] = []
    async with reporting_long_waits("waiting for the servers", told.append):
        await asyncio.sleep(19)
    assert told == []
    async with reporting_long_waits("waiting for the servers", told.append):
        await asyncio.sleep(90)
    waits = ("0:20", "0:40", "1:20")
    assert told == [f"waiting for the servers, for {wait} so far" for wait in waits]


@pytest.mark.usefixtures("virtual_time")
async def test_a_long_phase_says_how_many_episodes_are_finished():
    lines: list[str] = []
    async with long_phase(LineProgress(lines.append), "evaluating start") as count:
        count.total = 64
        for _ in range(3):
            await asyncio.sleep(100)
            count.finished += 12
    first, *_, last = lines[1:]
    assert first == "still evaluating start, for 0:20 so far: 0 of 64 episodes are finished"
    assert last == "still evaluating start, for 4:40 so far: 24 of 64 episodes are finished"


@pytest.mark.usefixtures("virtual_time")
async def test_a_long_phase_is_said_again_and_its_silence_is_bounded():
    lines: list[str] = []
    async with long_phase(LineProgress(lines.append), "evaluating start"):
        await asyncio.sleep(30)
        assert lines == ["evaluating start", "still evaluating start, for 0:20 so far"]
        await asyncio.sleep(3570)
    assert 30 <= len(lines) <= 36


async def test_a_terminal_shows_the_episodes_of_a_phase_as_a_bar():
    terminal = _Terminal()
    live = LiveProgress(terminal, 80)
    async with long_phase(live, "evaluating start") as count:
        count.total, count.finished = 64, 48
        for _ in range(2):
            live._live.refresh()
        shown = terminal.getvalue()
        bar = live._live.tasks[live._phase_bar]
        assert (bar.completed, bar.total) == (48, 64)
        live.remind("still evaluating start")
    with live.phase("writing the report"):
        live._live.refresh()
        assert (bar.completed, bar.total) == (0, None), "no episodes are played"
    live.close()
    assert "evaluating start · 48/64 episodes · 0:0" in shown
    assert "still" not in terminal.getvalue()


def test_values_that_are_missing_are_left_out():
    lines: list[str] = []
    progress = LineProgress(lines.append)
    progress.stage("grpo", 2)
    progress.advance({"step": 2, "stage": "grpo", "reward/mean": None})
    assert lines == ["grpo 2/2 left 0:00"]


@pytest.mark.parametrize("width", [8, 30, 80, 200])
def test_live_progress_survives_any_width_and_keeps_notes(width):
    terminal = _Terminal()
    _play(LiveProgress(terminal, width))
    shown = terminal.getvalue()
    assert "eval" in shown and "grpo" in shown
    if width >= 80:
        assert "eval [start]: 31%" in shown and "13/150" in shown


@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_a_narrow_terminal_gets_a_bar_and_whole_numbers(width):
    terminal = _Terminal()
    _play(LiveProgress(terminal, width))
    shown = terminal.getvalue()
    assert "━━━━" in shown and "13/150" in shown and "…" not in shown
    for number in re.findall(r"reward [^ ·\x1b]*|success [^ ·\x1b]*", shown):
        assert re.fullmatch(r"reward \d\.\d{3}|success \d\.\d\d", number.strip())


def test_closing_before_any_stage_is_fine():
    LiveProgress(_Terminal()).close()


def test_terminals_get_the_live_line_and_files_the_plain_one():
    assert isinstance(build_progress(_Terminal()), LiveProgress)
    assert isinstance(build_progress(StringIO()), LineProgress)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (192, "3:12"), (59.7, "1:00"), (3765, "1:02:45")],
)
def test_durations_read_like_a_clock(seconds, text):
    assert clock(seconds) == text
