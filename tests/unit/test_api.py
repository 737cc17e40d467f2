"""The Python API without training: imports, reading a run, callbacks, and requests to stop."""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import run_samples
import torch
from IPython.core.interactiveshell import InteractiveShell

import openenv_pipe
from openenv_pipe import Run, compose, evaluate, open_run, reproduce, rescore, train
from openenv_pipe.algorithms.advantages import GroupAdvantages
from openenv_pipe.commands.api import in_thread
from openenv_pipe.config.compose import amend
from openenv_pipe.errors import ConfigError, FailureError, HostError, RunFolderError, SessionError
from openenv_pipe.pipeline.callbacks import STOPPED, Callbacks
from openenv_pipe.runs.episodes import episodes_path, write_episodes
from openenv_pipe.runs.eval_difference import compare_reports
from openenv_pipe.runs.metrics import MetricsFile
from openenv_pipe.runs.notebook import EvalReports
from openenv_pipe.system.progress import LineProgress
from openenv_pipe.system.stop_request import StopRequest
from openenv_pipe.types import Status, TurnRole


@pytest.fixture
def folder(tmp_path):
    made = run_samples.create(tmp_path)
    metrics = MetricsFile(made.metrics_path)
    for step in (1, 2):
        metrics.append(run_samples.record(step))
    metrics.close()
    return made


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, openenv_pipe\n"
        "heavy = {'torch', 'transformers', 'hydra', 'numpy', 'pydantic', 'typer', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert set(openenv_pipe.__all__) <= set(dir(openenv_pipe))\n"
        "run = openenv_pipe.open_run\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_threads_of_torch_sleep_while_they_wait_unless_the_user_says_otherwise():
    code = "import os, openenv_pipe; openenv_pipe.train; print(os.environ['OMP_WAIT_POLICY'])"
    for given, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        others = {k: value for k, value in os.environ.items() if k != "OMP_WAIT_POLICY"}
        env = others if given is None else others | {"OMP_WAIT_POLICY": given}
        command = [sys.executable, "-c", code]
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        assert found.stdout.strip() == expected


def test_every_name_of_the_api_exists():
    for name in openenv_pipe.__all__:
        assert callable(getattr(openenv_pipe, name))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        openenv_pipe.trian  # noqa: B018


def test_compose_returns_the_configuration():
    assert compose("conf=echo", "trainer.steps=7").trainer.steps == 7
    with pytest.raises(ConfigError, match=r"trainer\.steps"):
        compose("conf=echo", "trainer.stpes=7")


def test_a_run_is_opened_by_its_folder_its_id_and_as_the_latest(folder):
    runs_dir = folder.path.parents[1]
    for name in (folder.path, str(folder.path), folder.record.id, "latest"):
        run = open_run(name, runs_dir)
        assert (run.path.resolve(), run.id) == (folder.path.resolve(), folder.record.id)
    with pytest.raises(RunFolderError, match="no folder"):
        open_run("nothing/0001", runs_dir)


def test_a_run_shows_what_its_folder_has_at_that_moment(folder):
    run = Run(folder.path)
    assert (run.status, run.cause) == ("running", None)
    assert [record["step"] for record in run.metrics] == [1, 2]
    assert run.config == folder.written_config
    for missing in (lambda: run.report, lambda: run.episodes(1), run.checkpoint):
        with pytest.raises(RunFolderError):
            missing()
    folder.finish("finished", cause="enough")
    (folder.path / "report.md").write_text("# It")
    assert (run.status, run.cause) == ("finished", "enough")
    assert run.report.read_text() == "# It"


def test_a_notebook_shows_evaluations_and_curves(folder, tmp_path):
    empty = Run(run_samples.create(tmp_path / "other").path)
    assert empty._repr_html_() == "<p><b>smoke/0001</b> running</p>"
    run = Run(folder.path)
    curves = [run._repr_html_().removeprefix("<p><b>smoke/0001</b> running</p>")]
    assert re.fullmatch(r'<img alt="learning curves" src="data:image/png;base64,[^"]+">', curves[0])
    run_samples.evaluate(folder, "trained", 0.6)
    shown = run._repr_html_()
    success = run.evals["trained"].success
    assert f"<td>trained</td><td>{success.mean:.1%} ({success.low:.1%} to" in shown
    assert "<th>tasks scored</th><th>samples</th>" in shown
    assert "<td>10 of 10</td><td>1</td>" in shown
    curves.append(shown[shown.index("<img") :])
    assert curves[1].startswith(curves[0][:50]) and curves[1] != curves[0]
    assert not (folder.path / "plots" / "learning_curves.png").exists()


def test_evaluations_are_shown_with_their_paired_differences_to_the_first(folder):
    for label, mean in (("start", 0.2), ("trained", 0.6)):
        run_samples.evaluate(folder, label, mean)
    found = Run(folder.path).evals
    config = folder.written_config
    change = compare_reports(found["start"], found["trained"], config.eval, config.seed)
    shown = EvalReports(found.items(), {"trained": change})
    first, second = repr(shown).splitlines()
    success = change.success
    expected = f"success +40.0% ({success.low:+.1%} to {success.high:+.1%})"
    assert first.endswith("), 10 of 10 tasks scored, 1 sample each")
    assert "paired" not in first and f"; paired with the first, {expected}, reward +" in second
    html = shown._repr_html_()
    assert "<th>success, less the first&#x27;s</th>" in html and f"<td>{expected[8:]}</td>" in html
    assert "less the first" not in found._repr_html_()
    row = shown.to_pandas().iloc[1]
    assert (row["success difference"], row["success difference low"]) == (
        success.mean,
        success.low,
    )


def test_evaluations_become_a_data_frame_with_their_tasks(folder):
    assert len(Run(folder.path).evals.to_pandas()) == 0
    run_samples.save(folder, "trained", run_samples.eval_episodes(num_tasks=4, samples=2), step=2)
    run_samples.evaluate(folder, "start", 0.2, num_failed=4)
    run_samples.evaluate(folder, "baseline_random", 0.2, step=None)
    evals = Run(folder.path).evals
    frame = evals.to_pandas().set_index("label")
    numbers = frame.loc[["trained", "start"], ["step", "tasks", "tasks scored", "samples"]]
    assert numbers.to_numpy().tolist() == [[2, 4, 4, 2], [0, 10, 6, 1]]
    success = evals["trained"].success
    assert frame.loc["trained", ["success", "success low", "success high"]].tolist() == [
        *(success.mean, success.low, success.high)
    ]
    assert math.isnan(frame["success low"]["start"])  # too few tasks were scored
    assert frame["step"].isna().tolist() == [False, False, True]
    assert frame["temperature"].tolist() == [1.0] * 3
    assert "start: success 33.3%, reward" in repr(evals)
    assert "6 of 10 tasks scored, 1 sample each" in repr(evals)


def test_evaluations_are_in_the_order_of_their_steps(folder):
    during = ("during_000002", "during_000001", "during_000001.echo")
    for label in ("baseline_random", "trained", *during, "start"):
        step = int(label.partition(".")[0][-1]) if label.startswith("during") else None
        run_samples.evaluate(folder, label, 0.5, step=step)
    labels = ["start", "during_000001", "during_000001.echo", "during_000002"]
    labels += ["trained", "baseline_random"]
    evals = Run(folder.path).evals
    assert list(evals) == labels
    assert [line.partition(":")[0] for line in repr(evals).splitlines()] == labels


def test_episodes_are_those_of_a_step_or_of_an_evaluation(folder):
    run_samples.evaluate(folder, "trained", 0.5)
    for mean in (0.2, 0.8):  # the second one is of a resumed run, which has played other episodes
        run_samples.evaluate(folder, "during_000001", mean, step=1)
    run = Run(folder.path)
    label = next(each for each in run.evals if each.startswith("during"))
    successes = [group.episodes[0].success for group in run.episodes(label)]
    assert sum(successes) / len(successes) == run.evals[label].success.mean == 0.8
    played = [each.task.id for each in run.episodes("trained")]
    assert played == [each.task for each in run.evals["trained"].tasks]
    for wrong in ("train", 7, 2.5, ["trained"]):
        with pytest.raises(
            RunFolderError, match=f"no episodes of {re.escape(repr(wrong))}; .* trained"
        ):
            run.episodes(wrong)


@pytest.mark.parametrize("made", [numpy.int64, numpy.array, torch.tensor])
def test_steps_may_be_whole_numbers_of_numpy_or_torch(tmp_path, made):
    folder = run_samples.create(tmp_path / "runs")
    run_samples.train(folder)
    run = Run(folder.path)
    assert run.episodes(made(2)) == run.episodes(2)
    with pytest.raises(RunFolderError, match="has no checkpoint"):
        run.checkpoint(made(2))
    found = rescore(run, "reward=usable", output=tmp_path / "again", step=made(2))
    assert [path.name for path in (found.output / "episodes").iterdir()] == ["step_000002.jsonl.gz"]


@pytest.mark.parametrize("wrong", [0, 2.0, "2"])
def test_steps_that_are_no_whole_number_are_rejected(folder, wrong):
    for call in (partial(rescore, step=wrong), partial(reproduce, steps=wrong)):
        with pytest.raises(ConfigError, match=r"steps?=.*: expected a whole number from 1 on"):
            call(folder.path)


def test_what_reproduce_allows_is_a_list(folder):
    with pytest.raises(RunFolderError, match=r"from Python as a list: allow=\[\"code\"\]"):
        reproduce(folder.path, allow="code")


def test_an_evaluation_that_is_not_there_names_those_that_are(folder):
    run_samples.evaluate(folder, "trained", 0.5)
    with pytest.raises(KeyError, match=r"no evaluation 'train'; there is: trained"):
        Run(folder.path).evals["train"]


def test_episodes_are_shown_by_their_questions_and_replies_and_not_by_token_ids(folder):
    groups = run_samples.groups(num_groups=9, size=3)
    for group in groups:
        group.task = replace(group.task, reset={"question": "<b>2+2</b>", "reward": "r" * 90})
        for each in group.episodes:
            each.task = group.task
    groups[0].episodes[0].status = Status.ERROR
    write_episodes(episodes_path(folder.path, 1), groups)
    episodes = Run(folder.path).episodes(1)
    frame = episodes.to_pandas()
    columns = ["task", "question", "reset.reward", "reply", "reward", "success", "status"]
    assert [*frame] == ["step", "group", *columns, "advantage"] and frame["advantage"].isna().all()
    assert len(frame) == 27 and math.isnan(frame["reward"][0])
    wrong = frame[~frame["success"]]
    assert 0 < len(wrong) < 27 and set(wrong["question"]) == {"<b>2+2</b>"}
    lines = repr(episodes).splitlines()
    assert len(lines) == 21 and lines[-1] == "and 7 more; to_pandas() has all"
    assert lines[1].startswith("eval/0 | <b>2+2</b> | rrr") and len(lines[1]) < 250
    html = episodes._repr_html_()
    assert html.startswith("<table><tr><th>task</th>") and html.count("<tr>") == 21
    assert "&lt;b&gt;2+2" in html and "<b>" not in html
    assert "prompt_ids" not in repr(episodes[0]) and "question" in repr(episodes[0])


def test_a_data_frame_of_episodes_has_the_labels_the_step_and_the_advantages(folder):
    groups = run_samples.groups(num_groups=2, size=2)
    for group, kind in zip(groups, ("sum", "product"), strict=True):
        reset = {"label.kind": 1, "step": 7, "kind": "hard"}
        group.task = replace(group.task, labels={"kind": kind}, reset=reset)
        for each in group.episodes:
            each.task = group.task
    groups[0].episodes[1].turns[0].role = TurnRole.AUXILIARY
    values = {0: [1.0, 1.0, 1.0], 1: [9.0, -2.0, -1.0]}
    learned = GroupAdvantages(group=groups[0], compared=groups[0].episodes, by_member=values)
    write_episodes(episodes_path(folder.path, 1), groups, [learned])
    frame = Run(folder.path).episodes(1).to_pandas()
    assert frame.groupby("label.kind")["success"].count().to_dict() == {"product": 2, "sum": 2}
    assert set(frame["step"]) == {1} and set(frame["reset.step"]) == {7}
    assert set(frame["kind"]) == {"hard"} and set(frame["reset.label.kind"]) == {1}
    assert [*frame["group"]] == ["1/0", "1/0", "1/1", "1/1"]
    assert [*frame["advantage"]][:2] == [1.0, -1.5] and frame["advantage"][2:].isna().all()
    run_samples.evaluate(folder, "trained", 0.5, step=2)
    assert set(Run(folder.path).episodes("trained").to_pandas()["step"]) == {2}


def test_the_first_messages_are_those_of_the_adapter(tmp_path):
    system = "Answer with one word."
    changed = amend(
        run_samples.config(tmp_path),
        [
            f"env.adapter.system={system}",
            "env.adapter.first='Message: {{ question }}'",
            "env.adapter.examples=[{user: 'Message: hello', reply: greeting}]",
        ],
    )
    run = Run(run_samples.create(tmp_path, changed).path)
    assert run.messages({"question": "I paid twice"}) == [
        {"role": "system", "content": system},
        {"role": "user", "content": "Message: hello"},
        {"role": "assistant", "content": "greeting"},
        {"role": "user", "content": "Message: I paid twice"},
    ]
    with pytest.raises(ConfigError, match="'question' is undefined; it has text"):
        asyncio.run(_in_a_loop(lambda: run.messages({"text": "I paid twice"})))


@pytest.mark.parametrize("wrong", ["text", ["a"], None, 3])
def test_an_observation_of_another_type_is_rejected_with_an_example(folder, wrong):
    message = f"{re.escape(repr(wrong))} is no observation: expected a dictionary"
    with pytest.raises(ConfigError, match=message):
        Run(folder.path).messages(wrong)


def test_the_cells_of_the_page_write_their_files_into_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    cells = re.findall(r"```\n([!%].*?)```", page, re.DOTALL)
    for cell in cells:
        InteractiveShell.instance().run_cell(cell).raise_error()
    for name in ("conf/conf/my_sums.yaml", "my_rewards.py"):
        assert (tmp_path / name).is_file()


async def _in_a_loop(call):
    return call()


@pytest.mark.parametrize(
    "words",
    [["conf=email_search"], ["conf=echo", "env/adapter=json", "~env.adapter.pattern"]],
)
def test_adapters_that_ask_the_server_make_no_messages_without_it(tmp_path, words):
    changed = compose(*words, f"runs_dir={tmp_path}", "env.name=echo")
    with pytest.raises(ConfigError, match=r"env.adapter.type=\w+ builds its first messages from"):
        Run(run_samples.create(tmp_path, changed).path).messages(
            {"question": "Who?", "instructions": "Find it."}
        )


@pytest.mark.parametrize(
    ("function", "words", "keys", "call"),
    [
        (train, [], {"conf": "messages"}, 'train("conf=messages")'),
        (train, ["conf=echo"], {"steps": 10}, 'train("conf=echo", "trainer.steps=10")'),
        (
            evaluate,
            ["wordle/0007"],
            {"num_tasks": 5},
            'evaluate("wordle/0007", "eval.num_tasks=5")',
        ),
        (compose, ["conf=echo"], {"nonsense": 1}, 'compose("conf=echo", "nonsense=1")'),
    ],
)
def test_keys_as_keywords_are_rejected_with_the_call_to_write(function, words, keys, call):
    with pytest.raises(ConfigError) as caught:
        function(*words, **keys)
    assert str(caught.value).endswith(f"write {call}")


@pytest.mark.parametrize(
    ("words", "named", "message"),
    [
        ([{"conf": "echo"}], {}, "not a Run, a string or a path"),
        (["conf=echo"], {"callbacks": lambda run, metrics: None}, "expected a list"),
        (["conf=echo"], {"callbacks": [1]}, "1 is neither a function"),
        (["conf=echo"], {"on_progress": True}, "expected a function that takes a line"),
    ],
)
def test_arguments_of_another_type_are_rejected_before_there_is_a_run(
    tmp_path, words, named, message
):
    with pytest.raises(ConfigError, match=message):
        train(*words, f"runs_dir={tmp_path}/runs", **named)
    assert not (tmp_path / "runs").exists()


def test_metrics_become_a_data_frame_where_pandas_is(folder, monkeypatch):
    metrics = Run(folder.path).metrics
    frame = metrics.to_pandas()
    assert list(frame["step"]) == [1, 2]
    assert frame["reward/mean"].tolist() == [each["reward/mean"] for each in metrics]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        metrics.to_pandas()


class Recorder:
    def __init__(self, answer):
        self.answer = answer
        self.calls = []

    def on_step(self, run, metrics):
        self.calls.append((run, metrics))
        return self.answer


METRICS = {"stage": "grpo", "step": 3}


def call_back(callbacks, metrics):
    return asyncio.run(Callbacks(callbacks).call("run", metrics))


def test_callbacks_are_functions_or_objects_and_may_give_a_reason_to_stop():
    silent, asking = Recorder(None), Recorder("it is good")
    assert call_back([silent, lambda run, metrics: None], METRICS) is None
    reason = call_back([silent, asking, lambda *_: "it is late"], METRICS)
    assert reason == f"{STOPPED} after grpo step 3: it is good; it is late"
    assert silent.calls == [("run", METRICS)] * 2


def test_a_callback_that_returns_something_else_is_an_error():
    with pytest.raises(ConfigError, match=r"returned 0\.5; expected None"):
        call_back([lambda *_: 0.5], METRICS)


def raiser(error):
    def on_step(run, metrics):
        raise error

    return on_step


def test_an_exception_of_a_callback_is_raised_as_it_is():
    with pytest.raises(LookupError, match="pruned"):
        call_back([raiser(LookupError("pruned"))], METRICS)


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), SystemExit(0), KeyboardInterrupt(), StopIteration()]
)
def test_a_callback_cannot_end_the_run_without_an_error(error):
    with pytest.raises(ConfigError, match=f"the callback .*raised {type(error).__name__}"):
        call_back([raiser(error)], METRICS)


def test_a_callback_changes_nothing_that_others_see():
    metrics = dict(METRICS)
    call_back([lambda run, seen: seen.clear()], metrics)
    assert metrics == METRICS


@pytest.mark.parametrize("early", [True, False])
def test_a_request_from_another_thread_ends_the_work_which_may_save(early):
    stop, begun, saved = StopRequest(), threading.Event(), []

    async def work():
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            saved.append("all")

    if early:
        stop.make()
    else:
        threading.Thread(target=lambda: begun.wait() and stop.make()).start()
    with pytest.raises(KeyboardInterrupt):
        stop.run(work())
    assert saved == ["all"]
    stop.make()  # after the end it asks for nothing


def test_work_that_nobody_stops_returns_its_result():
    async def work():
        return 3

    assert StopRequest().run(work()) == 3


def test_an_error_in_the_configuration_is_raised_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean trainer"):
        train("conf=echo", "trainer.stpes=1")
    with pytest.raises(ConfigError, match="give one of them"):
        train(resume="latest", fork="latest")
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_that_comes_too_late_to_stop_the_work_is_raised_after_it():
    """A loop over several trainings ends where a person interrupts it."""
    notes, finished = [], []
    control = SimpleNamespace(stop=StopRequest(), progress=LineProgress(notes.append))

    def is_waiting_for_the_result():
        frame = sys._current_frames()[threading.main_thread().ident]
        outer = frame.f_back
        return frame.f_code.co_name == "wait" and outer.f_code.co_name == "result"

    def work():
        while not is_waiting_for_the_result():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        while not control.stop.is_made:
            time.sleep(0.001)
        finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        in_thread(work, control)
    assert finished and notes == ["stopping and saving; repeat to stop without saving"]


def test_a_notebook_shows_an_interrupt_as_one_line():
    def work():
        raise KeyboardInterrupt('wordle/0007 was interrupted; to continue: train(resume="wordle")')

    with pytest.raises(KeyboardInterrupt) as caught:
        in_thread(work, SimpleNamespace(stop=StopRequest()))
    shell = InteractiveShell.instance()
    shown = []
    shell._showtraceback = lambda kind, value, lines: shown.extend(lines)
    shell.showtraceback((caught.type, caught.value, caught.tb))
    assert shown == [f"KeyboardInterrupt: {caught.value}"]
    assert "train(resume=" in shown[0]


@pytest.mark.parametrize("kind", [ConfigError, RunFolderError, HostError, SessionError])
def test_a_notebook_shows_an_error_as_its_message(kind):
    assert kind("what is wrong")._render_traceback_() == [f"{kind.__name__}: what is wrong"]


def test_a_notebook_shows_what_caused_a_failure():
    with pytest.raises(FailureError) as caught:
        try:
            raise ZeroDivisionError("in code of the user")
        except ZeroDivisionError as error:
            raise FailureError("a part failed") from error
    *told, last = caught.value._render_traceback_()
    assert "ZeroDivisionError: in code of the user" in "".join(told)
    assert last == "FailureError: a part failed"


def test_an_error_of_the_api_has_no_secret(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "tok-0123456789")

    def work():
        raise HostError("rejected tok-0123456789")

    with pytest.raises(HostError, match=r"^rejected <hidden: MY_TOKEN>$"):
        in_thread(work, SimpleNamespace())
