"""What `env check` concludes from played episodes; its integration test uses real servers."""

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import run_samples
from fakes import run_config

from openenv_pipe.commands.findings import Result
from openenv_pipe.commands.recorded_play import PlayedEpisode
from openenv_pipe.config.compose import compose
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import ConfigError, StepRejectedError
from openenv_pipe.extras.lab.check.leaks import leak_lines
from openenv_pipe.extras.lab.check.learning import learning_line
from openenv_pipe.extras.lab.check.protocol import PROBES, first_text
from openenv_pipe.extras.lab.check.rewards import (
    best_play,
    constant_line,
    ends_line,
    reward_lines,
    silence_line,
)
from openenv_pipe.extras.lab.check.seeds import same_seed_line
from openenv_pipe.extras.lab.check.sessions import growth_line
from openenv_pipe.extras.lab.check.tasks import probe_tasks, tasks_line
from openenv_pipe.extras.lab.check.validation import judge_pin, read_report
from openenv_pipe.runs.eval_report import EvalReport, summarise
from openenv_pipe.types import Task

MIB = 2**20
SMOKE = compose(["conf=smoke"]).config
TASK = Task(id="train/0", split="train", index=0, seed=0)
RESET = StepResult({}, None, done=False)

# --- leaks -------------------------------------------------------------------------------------


def played(*observations: dict, action: str = "x", states: tuple = ()) -> PlayedEpisode:
    """Return an episode with these observations, which ends with the last one."""
    last = len(observations) - 1
    results = [
        StepResult(observation, 0.0, done=place == last)
        for place, observation in enumerate(observations)
    ]
    return PlayedEpisode(
        task=TASK, results=results, actions=[{"text": action}] * last, states=list(states)
    )


@pytest.mark.parametrize(("rewarded", "expected"), [("right", Result.WARN), ("none", Result.OK)])
def test_other_actions_than_the_last_are_tried_after_the_end(rewarded, expected):
    """Only the right answer earns again, and the episode ended with a wrong one."""

    async def play(*_):
        return played({}, {}, action="wrong")

    async def step(action, _):
        return StepResult({}, 1.0 if action["text"] == rewarded else 0.0, done=True)

    def choose(_, generator):
        return {"text": generator.choice(["wrong", "right"])}, None

    subject = SimpleNamespace(
        play=play,
        best=None,
        choosers={"random": choose},
        env=SimpleNamespace(step_timeout_s=1.0, max_turns=1),
    )
    probe = PROBES["step after done"](subject, SimpleNamespace(step=step))
    assert asyncio.run(probe)[0] is expected


ANSWERS = ["crane", "drone", "about", "lemon"]


def leaks(plays: list[PlayedEpisode]) -> Result:
    return {line.name: line.result for line in leak_lines(plays)}["leaks"]


def test_an_answer_that_stands_in_an_earlier_observation_or_state():
    end = [{"answer": answer} for answer in ANSWERS]
    shown = [played({"answer": "", "tip": f"<{each['answer']}>"}, each) for each in end]
    assert leaks(shown) is Result.FAIL
    kept = [played({}, each, states=({"deep": [{"word": each["answer"]}]},)) for each in end]
    assert leaks(kept) is Result.FAIL
    hidden = [played({"answer": "", "tip": "cranes"}, each) for each in end]
    assert leaks(hidden) is Result.OK


def test_a_list_is_told_before_if_all_of_it_is():
    """Of a dealer's cards, one lies open from the beginning."""
    hands = [["S2", "H7"], ["C9", "D4"], ["S3", "C5"], ["H8", "D6"]]
    one = [played({"cards": [], "open": hand[1]}, {"cards": hand}) for hand in hands]
    assert leaks(one) is Result.OK
    both = [played({"cards": [], "open": " ".join(hand)}, {"cards": hand}) for hand in hands]
    assert leaks(both) is Result.FAIL


def test_words_of_the_question_are_no_answer():
    ends = [{"answer": answer, "subject": answer[::-1]} for answer in ANSWERS]
    asked = [played({"question": f"the {each['subject']}?"}, each) for each in ends]
    assert leaks(asked) is Result.OK
    told = [played({"question": f"the {each['answer']}?"}, each) for each in ends]
    assert leaks(told) is Result.FAIL


def test_clocks_make_no_task_another_one():
    def line(field):
        plays, again = ([played({"text": "a", field: n}, {"text": "b"})] for n in (1, 2))
        return same_seed_line(plays, again)

    assert line("execution_time").result is Result.OK
    assert "except for the clocks execution_time" in line("execution_time").text
    assert line("times_table").result is Result.FAIL
    one, other = played({"text": "a"}, {"text": "b"}), played({"text": "a"})
    assert same_seed_line([one], [other]).result is Result.FAIL


def test_times_in_a_text_are_clocks():
    now = datetime.now(UTC)

    def differ(*texts):
        one, other = ([played({"text": text}, {"text": "b"})] for text in texts)
        return same_seed_line(one, other).result

    assert differ(f"It is {now}", f"It is {now + timedelta(seconds=9)}") is Result.OK
    assert differ("ran in 0.0012 s", "ran in 1.3 s") is Result.OK
    assert differ(str(now.timestamp()), str(now.timestamp() + 5)) is Result.OK
    assert differ("born 1970-01-01", "born 1980-01-01") is Result.FAIL
    assert differ("call 1234567890", "call 2234567890") is Result.FAIL
    camel = [[played({"runTime": n}, {})] for n in (1, 2)]
    assert same_seed_line(*camel).result is Result.OK


def test_clocks_ids_and_frequent_values_are_no_leaks():
    """A score that is mostly 1, with a 1 in every text, and fields that end with a measurement."""
    scores = [*[1] * 16, 2, 3, 4, 5]
    frequent = [played({"text": "turn 1 of 4"}, {"score": score}) for score in scores]
    assert leaks(frequent) is Result.OK
    for field in ("execution_time", "elapsedMs", "episode_id"):
        plays = [
            played({"text": "go"}, {field: 0.5 + n}, states=({"note": f"{0.5 + n}"},))
            for n in range(8)
        ]
        assert leaks(plays) is Result.WARN, f"{field}: nothing is left to search for"
    now = datetime.now(UTC)
    moments = [(now + timedelta(seconds=n)).isoformat() for n in range(8)]
    clocks = [played({"text": each}, {"ended": each}) for each in moments]
    assert leaks(clocks) is Result.WARN
    told = [played({"text": f"<{score}>"}, {"score": score}) for score in scores]
    assert leaks(told) is Result.FAIL


def each_alone(*texts: str, end: str = "b") -> list[list[PlayedEpisode]]:
    """Return tasks that begin with these texts, with one episode of each."""
    return [[played({"text": text}, {"text": end})] for text in texts]


def test_tasks_are_told_apart_by_what_reset_answers():
    hidden = [[played({"text": "a"}, {"text": str(number)})] for number in range(3)]
    assert tasks_line(hidden).result is Result.OK
    assert "begin with the same observation" in tasks_line(hidden).text
    assert tasks_line(each_alone("0", "1", "2")).measured == {"tasks": 3, "distinct": 3}


def test_tasks_that_answer_alike_are_the_same_only_where_more_than_random_actions_played():
    alike = each_alone("a", "a", "a")
    line = tasks_line(alike)
    assert line.result is Result.WARN
    assert "could not be told whether they differ; pass --policy" in line.text
    assert "reset seems" not in line.text
    twice = [[*each, *each] for each in alike]
    line = tasks_line(twice, policies=["random", "baseline expert"])
    assert line.result is Result.WARN
    assert "alike (random, baseline expert): reset seems to use neither" in line.text
    repeated = [played({"text": "a"}, {"text": end}) for end in ("lost", "won", "lost")]
    line = tasks_line(twice, policies=["random", "scripted"], repeated=repeated)
    assert line.result is Result.OK
    assert "best episode are answered in 2 ways in 3 tasks" in line.text


def test_baselines_play_until_all_tasks_are_told_apart():
    """Random actions are answered alike, one baseline cannot play, the next one tells."""
    train = [TASK, replace(TASK, id="train/1", index=1)]
    read: list[str] = []

    async def read_policy(path: str) -> str:
        read.append(path)
        if path == "m:broken":
            raise ConfigError("no such module")
        return path

    async def play_alike(tasks, chooser):
        ends = [str(task.index) if chooser == "m:expert" else "no" for task in tasks]
        return [played({"text": "go"}, {"text": end}) for end in ends]

    baselines = {"broken": "m:broken", "expert": "m:expert", "unneeded": "m:unneeded"}
    subject = SimpleNamespace(
        tasks=train,
        eval_tasks=train,
        choosers={"random": "random"},
        env=run_config({"env.baselines": baselines}).env,
        read_policy=read_policy,
        play_alike=play_alike,
        repeated=[],
    )

    async def found():
        return [line async for line in probe_tasks(subject)]

    broken, line = asyncio.run(found())
    assert (broken.name, broken.result) == ("baseline broken", Result.WARN)
    assert (line.result, line.measured) == (Result.OK, {"tasks": 2, "distinct": 2})
    assert read == ["m:broken", "m:expert"]


def test_what_the_agent_wrote_and_what_is_always_shown_is_no_leak():
    choices = [played({"choices": ANSWERS}, {"answer": answer}) for answer in ANSWERS]
    assert leaks(choices) is Result.OK
    guessed = [
        played({}, {"board": [answer]}, {"board": [answer], "answer": answer}, action=answer)
        for answer in ANSWERS
    ]
    assert leaks(guessed) is Result.WARN, "all that the end reveals was guessed"


def test_a_field_whose_name_tells_is_pointed_at():
    lines = list(leak_lines([played({"metadata": {"solution": "a"}}, {})]))
    assert [(line.name, line.result) for line in lines] == [
        ("leaks", Result.WARN),
        ("fields", Result.WARN),
    ]
    assert lines[0].text.startswith("not tested: the end of 1 episodes reveals nothing")
    assert "observation.metadata.solution" in lines[1].text


# --- protocol ----------------------------------------------------------------------------------


def test_fields_of_a_reset_that_are_not_shown_are_named():
    first = StepResult({"turn": 0, "hint": "", "left": 4, "metadata": {"a": 1}}, None, done=False)
    assert first_text(first) == (
        '4 fields, reward None: {"turn":0,"left":4}; not shown, as empty or bookkeeping: hint, '
        "metadata"
    )
    assert first_text(StepResult({"text": "go"}, 0.5, done=False)) == (
        '1 fields, reward 0.5: {"text":"go"}'
    )


# --- rewards -----------------------------------------------------------------------------------


def group(*rewards: float) -> list[PlayedEpisode]:
    """Return episodes of one task with these total rewards."""
    return [
        PlayedEpisode(task=TASK, results=[RESET, StepResult({}, reward, done=True)])
        for reward in rewards
    ]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"random": [group(0, 0), group(0, 1)]}, Result.OK),
        ({"random": [group(0, 0)] * 15 + [group(0, 1)]}, Result.WARN),
        ({"random": [group(0, 0)], "scripted": [group(1, 0.5)]}, Result.OK),
        ({"random": [group(0, 0)], "scripted": [group(1, 1)]}, Result.WARN),
        ({"random": [group(0, 0), group(1, 1)]}, Result.WARN),
        ({"random": [group(0, 0), group(0, 0)]}, Result.WARN),
        ({"random": [group(0.5, 0.5), group(0.5, 0.5)]}, Result.FAIL),
        ({"random": [group(0, 0)], "scripted": [group(0, 0)]}, Result.FAIL),
        ({"random": []}, Result.WARN),
    ],
)
def test_what_can_be_learned_from_groups(groups, expected):
    lines = list(reward_lines(groups, success_reward=1.0))
    assert (lines[-1].name, lines[-1].result) == ("learnable", expected)


def test_rewards_are_summed_up():
    (summary, _) = reward_lines({"random": [group(0.0, 1.0), group(0.5, 0.5)]}, success_reward=1.0)
    assert summary.measured == {
        "episodes": 4,
        "lowest": 0.0,
        "highest": 1.0,
        "mean": 0.5,
        "success": 0.25,
        "std_in_group": 0.25,
        "flat_groups": 0.5,
    }


def acting(*actions: str, reward: float | None = 1.0, done: bool = True) -> PlayedEpisode:
    """Return an episode of these actions, rewarded at its end."""
    results = [StepResult({}, None, done=False) for _ in actions]
    return PlayedEpisode(
        task=TASK,
        results=[*results, StepResult({}, reward, done=done)],
        actions=[{"text": action} for action in actions],
    )


def test_actions_that_do_not_look_at_the_task():
    low, high = acting("a", reward=0.0), acting("b")
    assert best_play({"random": [[low, high]]}, 1.0) is high
    assert best_play({"random": [[low, high]]}, 2.0) is None, "more can be earned than was seen"
    assert best_play({"random": [[low]], "scripted": [[high]]}, 2.0) is high
    assert best_play({"random": [[high, high]]}, 1.0) is None, "nothing to learn is another line"
    line = constant_line(high, [high] * 3)
    assert line.result is Result.WARN
    assert "one action that does not look at the task earns everything" in line.text
    assert '{"text":"b"}' in line.text
    assert "2 actions that do not look" in constant_line(acting("a", "b"), [high] * 3).text
    assert constant_line(high, [high, low, high]).result is Result.OK
    assert constant_line(high, [high]).result is Result.OK, "one task says nothing"


def test_episodes_that_never_end_are_a_warning():
    line = ends_line([acting("a", done=False)] * 4, max_turns=8)
    assert (line.name, line.result) == ("ends", Result.WARN)
    assert "no episode ends by itself: all 4 ran to env.max_turns=8" in line.text
    assert ends_line([acting("a"), acting("a", done=False)], 8).result is Result.OK
    assert ends_line([], 8) is None


def test_a_reward_that_is_always_null_is_said():
    groups = {"random": [[acting("a", reward=None), acting("b", reward=None)]]}
    (*_, line) = reward_lines(groups, success_reward=1.0)
    assert (line.result, "always null" in line.text) == (Result.WARN, True)


def test_never_acting_is_compared_with_acting_at_random():
    line = silence_line([group(-1.0, -0.8)], silence=0.0)
    assert (line.name, line.result) == ("never acting", Result.WARN)
    assert "reward.terms.unusable.weight=-1" in line.text
    assert silence_line([group(-1.0, -0.8)], silence=-4.0).result is Result.OK
    assert silence_line([group(0.0, 0.0)], silence=0.0).result is Result.OK
    assert silence_line([], silence=0.0) is None


def test_failed_episodes_are_counted_and_left_out():
    """An action that raises on the server fails the episode here as it does in training."""
    failed = group(5.0, 0.0)
    failed[0].failure = StepRejectedError("EXECUTION_ERROR", "7 is not a valid Action")
    found, summary, _ = reward_lines({"random": [failed, group(0.0, 1.0)]}, success_reward=1.0)
    assert (found.name, found.result) == ("episodes, random", Result.WARN)
    assert "1 of 4 episodes failed" in found.text and "env.step_exception=unusable" in found.text
    assert (summary.measured["episodes"], summary.measured["highest"]) == (3, 1.0)


# --- memory ------------------------------------------------------------------------------------


def grown(per_episode: float, noise: float, num_samples: int = 50) -> Result:
    """Return the result for a server of 100 MiB with this growth, sampled every 20 episodes."""
    draw = random.Random(0)
    samples = [
        (20 * number, round(100 * MIB + 20 * number * per_episode + draw.gauss(0.0, noise)))
        for number in range(num_samples)
    ]
    return growth_line(samples).result


def test_growth_is_told_from_noise():
    assert grown(0.0, MIB) is Result.OK
    assert grown(100.0, MIB / 8) is Result.OK
    assert grown(5_000.0, MIB) is Result.WARN
    assert grown(50_000.0, MIB) is Result.FAIL
    assert grown(50_000.0, 0.0, num_samples=3) is Result.OK


def test_a_cache_that_fills_up_is_no_leak():
    samples = [(number, 100 * MIB + min(number, 10) * MIB) for number in range(1, 51)]
    assert growth_line(samples).result is Result.OK


def test_an_environment_that_a_model_judges_has_to_name_it():
    assert judge_pin({}) is None
    assert judge_pin({"capabilities": {"llm_judged": False}, "judge": None}) is None
    judged = {"capabilities": {"llm_judged": True}}
    pin = {"model": "m", "version": "2026-01"}
    results = [judge_pin({**judged, **more}).result for more in ({}, {"judge": {"model": "m"}})]
    assert results == [Result.FAIL] * 2
    assert judge_pin({**judged, "judge": pin}).result is Result.OK


def test_reports_of_openenvs_own_validation_are_shown():
    """The forms of openenv 0.10's reports, of a package and of a server."""
    results = [
        {"check_id": "static.manifest", "status": "fail", "evidence": ["manifest: no judge"]},
        {"check_id": "static.layout", "status": "pass", "evidence": ["fine"]},
    ]
    line = read_report("package", {"results": results})
    assert (line.result, line.text) == (Result.WARN, "static.manifest: manifest: no judge")
    assert line.measured == {"checks": 2, "problems": 1}
    criteria = [{"description": "GET /health", "passed": True, "actual": {"status_code": 200}}]
    assert read_report("server", {"criteria": criteria}).result is Result.OK
    criteria[0]["passed"] = False
    assert "GET /health: got" in read_report("server", {"criteria": criteria}).text
    assert read_report("server", "it wrote no report").result is Result.WARN
    assert read_report("server", {}).result is Result.WARN


@pytest.mark.parametrize(("gain", "result"), [(1.0, Result.OK), (0.0, Result.WARN)])
def test_learning_is_proven_by_what_training_adds_to_the_start(gain, result):
    def report(label: str, reward: float) -> EvalReport:
        episodes = [run_samples.episode(random.Random(n), n, 0, False) for n in range(12)]
        for each in episodes:
            each.reward = reward
        facts = {"reward": SMOKE.reward, "model": "tiny", "step": None, "temperature": 1.0}
        return summarise(label, episodes, SMOKE.eval, 0, **facts)

    evals = {"start": report("start", 0.25), "trained": report("trained", 0.25 + gain)}
    line = learning_line(evals, SMOKE.eval, num_steps=40)
    assert line.result is result
    assert line.measured["reward_start"] == 0.25
    assert line.measured["reward_added"] == gain
    assert "in 40 steps: reward 0.250" in line.text
