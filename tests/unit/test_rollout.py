"""Playing episodes and collecting groups on a fake host. Trap numbers: tests/README.md."""

import asyncio
import dataclasses
import random
from dataclasses import replace

import pytest
from fakes import (
    FakeHost,
    LengthsEngine,
    RecordingEngine,
    all_episodes,
    collect,
    local_engine,
    plain_sample,
    play,
    rollout_context,
    run_config,
    sampled,
    tiny_policy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from openenv_pipe.config.schema import OpenAIEngineConfig
from openenv_pipe.engines import TextReply
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import (
    ConfigError,
    FailureError,
    ServerFullError,
    SessionClosedError,
    SessionTimeoutError,
    StepRejectedError,
)
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rollout.collector import collect_groups, episode_seed
from openenv_pipe.rollout.metrics import summarise_groups
from openenv_pipe.runs.episodes import read_episodes, write_episodes
from openenv_pipe.runs.transcript import transcript
from openenv_pipe.types import Finish, Status

CHAT = ChatFormat(build_tokenizer())


class NoChat:
    """A policy without a chat template, for `collect` with an engine that takes messages."""

    chat = None


class MessageEngine(ScriptedEngine):
    """An engine that takes messages and reports the token counts in `usage`: (prompt,
    completion)."""

    capabilities = OpenAIEngineConfig.capabilities

    def __init__(self, *usage):
        self.usage = usage
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        prompt, completion = self.usage[min(request.turn, len(self.usage) - 1)]
        return TextReply(text="ab", num_prompt_tokens=prompt, num_completion_tokens=completion)


class FilteredEngine(MessageEngine):
    """Its provider withholds the first reply."""

    async def generate(self, request):
        reply = await super().generate(request)
        return reply if request.turn else replace(reply, text="", finish=Finish.FILTERED)


async def test_a_reply_that_a_filter_withholds_is_unusable_and_says_so():
    (group,) = await collect_messages(FilteredEngine((9, 3)), {"env.max_turns": 2})
    first, second = group.episodes[0].turns
    assert "content filter withheld" in first.unusable and not first.steps
    assert second.unusable is None and len(second.steps) == 1


async def collect_messages(engine, changes):
    """Collect one episode that only a limit ends; the environment's text is the step's number."""
    host = FakeHost(lambda seed, number, action: StepResult({"text": str(number)}, 0.5, False))
    options = {"host": host, "config": run_config(changes), "num_tasks": 1, "group_size": 1}
    return await collect(NoChat(), engine=engine, **options)


class ChatOnly:
    """A policy that has only a chat template, for `collect` with another engine."""

    chat = CHAT


def scripted(*replies):
    """Return an engine that gives these replies, one per observation, and then repeats the last
    one."""

    def policy(observations, draw):
        return replies[min(len(observations), len(replies)) - 1]

    return ScriptedEngine(policy)


async def collect_scripted(*replies, **options):
    engine = scripted(*replies)
    return all_episodes(await collect(ChatOnly(), engine=engine, **options))


# --- traps 1 and 8: ids -------------------------------------------------------------------------


async def test_the_ids_trained_on_are_the_ids_sampled():
    """Trap 1: also where decoding loses information, because random bytes are seldom UTF-8."""
    policy = tiny_policy(ends=True)
    engine = RecordingEngine(local_engine(policy))
    groups = await collect(policy, engine=engine)
    num_lossy = 0
    for number, episode in enumerate(all_episodes(groups)):
        ids, mask, logprobs = [], [], []
        for request, completion in engine.calls[number]:
            new_ids = request.prompt_ids[len(ids) :]
            assert request.prompt_ids == ids + new_ids
            ids += [*new_ids, *completion.token_ids]
            mask += [False] * len(new_ids) + [True] * len(completion.token_ids)
            logprobs += [0.0] * len(new_ids) + completion.logprobs
        sample = plain_sample(episode)
        assert (sample.token_ids, sample.loss_mask, sample.logprobs) == (ids, mask, logprobs)
        for turn in episode.turns:
            again = CHAT.reply_ids(turn.reply)
            num_lossy += again[: len(turn.completion_ids)] != turn.completion_ids
    assert num_lossy > 3


async def test_the_whole_conversation_is_the_templates():
    """Trap 2: prompts and replies in order equal the template applied to all messages."""
    (episode,) = await collect_scripted("abc", "d", num_tasks=1, group_size=1)
    ids = plain_sample(episode).token_ids
    text = "<|user|>0<|assistant|>abc<|end|><|user|>1: <|assistant|>d<|end|>"
    assert ids == build_tokenizer().encode(text, add_special_tokens=False)


# --- trap 19: the end token ---------------------------------------------------------------------


async def test_the_end_token_has_loss_once_in_each_completion_that_it_ended():
    """Trap 19: after a truncated reply, the end token is part of the next prompt."""
    policy = tiny_policy(ends=True)
    config = run_config({"env.max_reply_tokens": 4})
    finishes = set()
    for episode in all_episodes(await collect(policy, config=config)):
        sample = plain_sample(episode)
        chosen = [id for id, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
        stops = [turn.finish is Finish.STOP for turn in episode.turns]
        assert chosen.count(policy.chat.ends.usual) == sum(stops)
        for turn, following in zip(episode.turns, episode.turns[1:], strict=False):
            cut = turn.finish is Finish.LENGTH
            assert following.prompt_ids.count(policy.chat.ends.usual) == cut
        finishes |= {turn.finish for turn in episode.turns}
    assert finishes == {Finish.STOP, Finish.LENGTH}


# --- trap 20: limits ----------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40), st.integers(1, 120), st.booleans()
)
def test_no_limit_is_ever_passed(seed, max_turns, max_reply, max_episode, long_observations):
    """Trap 20: the limits, replies and observations are random."""
    config = run_config(
        {
            "env.max_turns": max_turns,
            "env.max_reply_tokens": max_reply,
            "env.max_episode_tokens": max_episode,
        }
    )

    def talk(task_seed, number, action):
        result = play(task_seed, number, action)
        length = random.Random(f"{seed}/{task_seed}/{number}").randrange(60)
        text = "x" * length if long_observations else "x"
        return StepResult({"text": text}, result.reward, result.done)

    engine = LengthsEngine(CHAT.ends.usual, seed)
    groups = asyncio.run(collect(ChatOnly(), engine=engine, host=FakeHost(talk), config=config))
    for episode in all_episodes(groups):
        check_limits(episode, max_turns, max_reply, max_episode)


def check_limits(episode, max_turns, max_reply, max_episode):
    assert episode.num_tokens <= max_episode
    assert not episode.turns or episode.num_tokens == len(plain_sample(episode).token_ids)
    assert len(episode.turns) <= max_turns
    used = 0
    for turn in episode.turns:
        used += len(turn.prompt_ids)
        room = min(max_reply, max_episode - used)
        used += len(turn.completion_ids)
        assert 1 <= len(turn.completion_ids) <= room
        ended = turn.completion_ids[-1] == CHAT.ends.usual
        assert turn.finish is (Finish.STOP if ended else Finish.LENGTH)
        assert ended or len(turn.completion_ids) == room
    cut = any(turn.finish is Finish.LENGTH and turn.completion_ids[1:] for turn in episode.turns)
    assert episode.truncated == (cut or episode.status is not Status.DONE)
    done = len(episode.turns) == 2 + episode.task.seed % 3
    if episode.status is Status.TURN_LIMIT:
        assert len(episode.turns) == max_turns
    assert (episode.status is Status.DONE) == done


@pytest.mark.parametrize(
    ("changes", "status", "num_turns", "truncated"),
    [
        ({}, Status.DONE, 2, False),
        ({"env.max_turns": 1}, Status.TURN_LIMIT, 1, True),
        ({"env.max_turns": 2}, Status.DONE, 2, False),
        ({"env.max_reply_tokens": 2}, Status.DONE, 2, True),
        ({"env.max_reply_tokens": 1}, Status.DONE, 2, False),
        ({"env.max_episode_tokens": 7}, Status.TOKEN_LIMIT, 1, True),
        ({"env.max_episode_tokens": 3}, Status.TOKEN_LIMIT, 0, True),
        ({"env.max_episode_tokens": 4}, Status.TOKEN_LIMIT, 0, True),
        ({"env.max_episode_tokens": 5}, Status.TOKEN_LIMIT, 1, True),
    ],
    ids=[
        "none",
        "turns",
        "turns that suffice",
        "reply",
        "one token",
        "episode",
        "prompt",
        "one",
        "two",
    ],
)
async def test_status_and_truncation(changes, status, num_turns, truncated):
    """Trap 20. Prompt <|user|>0<|assistant|> and reply abc<|end|>: seven tokens."""
    config = run_config(changes)
    (episode,) = await collect_scripted("abc", config=config, num_tasks=1, group_size=1)
    assert (episode.status, len(episode.turns), episode.truncated) == (status, num_turns, truncated)
    assert episode.error is None


async def test_an_environment_may_be_done_at_reset():
    host = FakeHost(lambda seed, number, action: StepResult({"text": ""}, None, done=True))
    (episode,) = await collect_scripted("a", host=host, num_tasks=1, group_size=1)
    assert (episode.status, episode.turns) == (Status.DONE, [])


async def test_a_reward_that_is_null_counts_as_zero():
    host = FakeHost(lambda seed, number, action: StepResult({"text": ""}, None, done=number == 1))
    (episode,) = await collect_scripted("a", host=host, num_tasks=1, group_size=1)
    assert episode.turns[0].reward == 0.0


async def test_long_observations_are_cut_to_their_beginning_and_end():
    """Whatever the engine takes: token ids, or messages, of which a token is about four bytes."""
    long = StepResult({"text": f"start {'x' * 500} end"}, 0.5, False)
    host = FakeHost(lambda seed, number, action: long)
    changes = {"env.max_observation_tokens": 20}
    (episode,) = await collect_scripted(
        "a", host=host, config=run_config(changes), num_tasks=1, group_size=1
    )
    text = CHAT.reply_text(episode.turns[1].prompt_ids)
    assert "start xxxx" in text and "xxxxxx end<|assistant|>" in text
    assert "[490 tokens left out]" in text
    engine = MessageEngine((30, 4))
    await collect(
        NoChat(), engine=engine, host=host, config=run_config(changes), num_tasks=1, group_size=1
    )
    content = engine.requests[1].messages[-1]["content"]
    assert content.startswith("start xxxx") and content.endswith("xxxx end")
    assert "[430 characters left out]" in content


# --- trap 21: errors are recorded as data --------------------------------------------------------


def failing(error, *, seed=None, number=None):
    """Return a host whose environments raise: all, or those of a seed, or at a step."""

    def answer(task_seed, step, action):
        if seed in (None, task_seed) and number in (None, step):
            raise error
        return play(task_seed, step, action)

    return FakeHost(answer)


def letters_only():
    values = run_config().env.adapter.model_dump() | {"pattern": "^(?P<text>[a-z]+)$"}
    return run_config({"env.adapter": values, "env.max_episode_tokens": 500})


async def test_a_malformed_reply_goes_back_to_the_model():
    """Trap 21: the reply costs a turn and reaches no environment; the episode goes on."""
    steps = []

    def count(seed, number, action):
        steps.append(number)
        return play(seed, number, action)

    (episode,) = await collect_scripted(
        "7!", host=FakeHost(count), config=letters_only(), num_tasks=1, group_size=1
    )
    assert steps == [0]
    assert episode.status is Status.TURN_LIMIT
    assert len(episode.turns) == 4
    for turn in episode.turns:
        assert turn.unusable is not None
        assert turn.steps == []
        assert turn.reward == 0.0
    text = CHAT.reply_text(episode.turns[1].prompt_ids)
    assert text == f"<|user|>? {episode.turns[0].unusable}<|assistant|>"


@pytest.mark.parametrize("code", ["VALIDATION_ERROR", "INVALID_JSON"])
async def test_an_action_that_the_environment_finds_invalid_goes_back_too(code):
    """Trap 21: it counts as the model's error, and the session stays usable. An action that no
    server could read has the code INVALID_JSON."""

    host = failing(StepRejectedError(code, "text is too short"), number=1)
    for episode in await collect_scripted("a", host=host, num_tasks=3):
        assert episode.status is Status.DONE
        assert "text is too short" in episode.turns[0].unusable
        assert "text is too short" in CHAT.reply_text(episode.turns[1].prompt_ids)
        assert episode.turns[1].unusable is None


async def test_an_exception_of_a_step_may_be_the_models_mistake():
    host = failing(StepRejectedError("EXECUTION_ERROR", "7 is not a valid Action"), number=1)
    config = run_config({"env.step_exception": "unusable"})
    for episode in await collect_scripted("a", host=host, config=config):
        assert episode.status is Status.DONE
        assert "7 is not a valid Action" in episode.turns[0].unusable
        assert "7 is not a valid Action" in CHAT.reply_text(episode.turns[1].prompt_ids)


ERRORS = [
    StepRejectedError("EXECUTION_ERROR", "division by zero"),
    SessionClosedError("server died"),
    SessionTimeoutError("no answer"),
    ServerFullError("4 of 4 in use"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", [0, 1, 2])
async def test_a_session_that_fails_ends_its_episode_and_no_other(error, step):
    """Trap 21: the episode has status ERROR and the cause; all others play as usual."""

    policy = tiny_policy(ends=True)
    groups = await collect(policy, host=failing(error, seed=1, number=step))
    healthy = await collect(policy)
    assert [episode.failed for episode in all_episodes(groups)] == [False] * 2 + [True] * 2 + [
        False
    ] * 4
    for episode in groups[1].episodes:
        assert episode.error == f"{type(error).__name__}: {error}"
        assert groups[1].scored == []
    del groups[1], healthy[1]
    assert [ids for ids, _ in sampled(groups)] == [ids for ids, _ in sampled(healthy)]


async def test_failed_episodes_are_counted_and_left_out_of_the_means():
    """Trap 14."""
    host, engine = failing(SessionClosedError("server died"), seed=1), scripted("abc")
    groups = await collect(ChatOnly(), engine=engine, host=host, num_tasks=2)
    for episode in groups[0].episodes:
        episode.reward = 3.0
    metrics = summarise_groups(groups)
    assert (metrics["episodes/count"], metrics["episodes/failed"]) == (4, 2)
    assert (metrics["reward/mean"], metrics["reward/std"]) == (3.0, 0.0)


async def test_episodes_without_an_answer_in_time_are_counted():
    host = failing(SessionTimeoutError("no answer to step within 5 s"), seed=1)
    groups = await collect(ChatOnly(), engine=scripted("abc"), host=host, num_tasks=2)
    assert summarise_groups(groups)["episodes/timed_out"] == 2
    assert "episodes/timed_out" not in summarise_groups(groups[:1])


async def test_a_summary_of_nothing_but_failures_has_no_means():
    host = failing(SessionClosedError("server died"))
    groups = await collect(ChatOnly(), engine=scripted("a"), host=host)
    assert "reward/mean" not in summarise_groups(groups)


async def test_a_template_that_does_not_fit_the_observation_ends_the_rollout_batch():
    """This is an error of the configuration, not of an episode."""
    host = FakeHost(lambda seed, number, action: StepResult({"words": ""}, None, done=False))
    with pytest.raises(ConfigError, match="text"):
        await collect_scripted("a", host=host)


# --- trap 24: seeds -----------------------------------------------------------------------------


def test_seeds_differ_by_run_label_group_and_member():
    """Trap 24."""
    seeds = {
        episode_seed(run, label, group, member)
        for run in range(3)
        for label in ("step 1", "step 2", "step 11", "eval")
        for group in range(12)
        for member in range(12)
    }
    assert len(seeds) == 3 * 4 * 12 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_never_changes():
    """Trap 24: old runs are reproducible only if their seeds stay the same."""
    assert episode_seed(0, "step 1", 0, 0) == 3504037343114523722


async def test_members_of_a_group_sample_different_tokens_from_one_prompt():
    """Trap 24."""
    policy = tiny_policy()
    (group,) = await collect(policy, num_tasks=1, group_size=6)
    assert len({tuple(episode.turns[0].prompt_ids) for episode in group.episodes}) == 1
    assert len({tuple(episode.turns[0].completion_ids) for episode in group.episodes}) == 6
    assert len({episode.task.seed for episode in group.episodes}) == 1


@pytest.mark.parametrize("change", [{"seed": 1}, {"label": "step 2"}])
async def test_another_run_or_step_samples_other_tokens(change):
    """Trap 24."""
    policy = tiny_policy()
    first = sampled(await collect(policy, num_tasks=1))
    assert sampled(await collect(policy, num_tasks=1)) == first
    assert sampled(await collect(policy, num_tasks=1, **change)) != first


# --- collecting groups ---------------------------------------------------------------------------


async def test_groups_come_in_the_order_of_their_tasks_with_ids_of_their_own():
    """Trap 15."""
    host = FakeHost(order=random.Random(0))
    groups = await collect(ChatOnly(), engine=scripted("a"), host=host, num_tasks=5, group_size=3)
    assert [group.task.id for group in groups] == [f"train/{index}" for index in range(5)]
    assert [group.id for group in groups] == [f"step 1/{index}" for index in range(5)]
    for group in groups:
        assert [episode.member for episode in group.episodes] == [0, 1, 2]
        assert all(episode.task == group.task for episode in group.episodes)


@pytest.mark.parametrize(("capacity", "max_episodes"), [(3, 64), (64, 2), (1, 1)])
async def test_no_more_episodes_play_at_once_than_there_is_room_for(capacity, max_episodes):
    playing, most = 0, 0

    class CountingHost(FakeHost):
        def session(self):
            nonlocal playing, most
            playing += 1
            most = max(most, playing)
            return super().session()

    def leave(seed, number, action):
        nonlocal playing
        result = play(seed, number, action)
        playing -= result.done
        return result

    engine = scripted("a")
    engine.max_episodes = max_episodes
    host = CountingHost(leave, capacity=capacity, order=random.Random(0))
    groups = await collect(ChatOnly(), engine=engine, host=host, num_tasks=5)
    assert all(episode.status is Status.DONE for episode in all_episodes(groups))
    assert most == min(capacity, max_episodes)


async def test_scripted_policies_see_all_observations_so_far_and_the_opening():
    seen, told = [], []

    def policy(observations, draw, opening):
        seen.append([observation["text"] for observation in observations])
        told.append([message["content"] for message in opening.messages])
        return "a"

    engine = ScriptedEngine(policy)
    await collect(ChatOnly(), engine=engine, num_tasks=1, group_size=1)
    assert seen == [["0"], ["0", "1: "]]
    assert told == [["0"], ["0"]]


async def test_an_engine_that_takes_messages_is_given_all_and_no_ids_are_made_up(tmp_path):
    engine = MessageEngine((30, 4), (33, 2), (90, 5))
    groups = await collect_messages(engine, {"env.max_turns": 3})
    (episode,) = all_episodes(groups)
    contents = [[each["content"] for each in request.messages] for request in engine.requests]
    assert contents == [["0"], ["0", "ab", "1"], ["0", "ab", "1", "ab", "2"]]
    assert [turn.messages for turn in episode.turns] == [
        request.messages[-1:] for request in engine.requests
    ]
    assert {turn.reply for turn in episode.turns} == {"ab"}
    ids = [(*turn.prompt_ids, *turn.completion_ids, *turn.logprobs) for turn in episode.turns]
    assert ids == [(), (), ()]
    # The second prompt is shorter than the first with its reply, because the reply's reasoning is
    # dropped.
    counts = [(turn.num_prompt_tokens, turn.num_completion_tokens) for turn in episode.turns]
    assert counts == [(30, 4), (0, 2), (54, 5)]
    assert episode.num_tokens == 95
    assert episode.prompt_lengths == [30, 34, 90]  # the second is too long by the reasoning
    assert summarise_groups(groups)["reply/tokens_mean"] == 11 / 3

    write_episodes(tmp_path / "episodes.jsonl.gz", groups)
    (again,) = all_episodes(read_episodes(tmp_path / "episodes.jsonl.gz"))
    assert again.turns == episode.turns
    assert "llm ab" in transcript(again)


async def test_tokens_that_an_endpoint_does_not_report_are_estimated_and_bound_an_episode():
    engine = MessageEngine((None, None))
    limits = {"env.max_turns": 100, "env.max_episode_tokens": 90, "env.max_reply_tokens": 80}
    groups = await collect_messages(engine, limits)
    (episode,) = all_episodes(groups)
    # [{"role":"user","content":"0"}] has 31 bytes, and [{"content":"ab"}] has 18.
    counts = [(turn.num_prompt_tokens, turn.num_completion_tokens) for turn in episode.turns]
    assert counts == [(8, 5)] * 6 + [(8, 4)]
    assert (episode.status, episode.num_tokens) == (Status.TOKEN_LIMIT, 90)
    assert [request.max_tokens for request in engine.requests] == [80, 69, 56, 43, 30, 17, 4]


async def test_nothing_is_trained_on_a_turn_without_token_ids():
    groups = await collect_messages(MessageEngine((9, 9)), {"env.max_turns": 1})
    with pytest.raises(AssertionError, match="token ids"):
        plain_sample(all_episodes(groups)[0])


async def test_a_scripted_reply_is_cut_at_its_limit():
    """Trap 20."""
    config = run_config({"env.max_reply_tokens": 2})
    (episode,) = await collect_scripted("abc", config=config, num_tasks=1, group_size=1)
    assert [turn.reply for turn in episode.turns] == ["ab", "ab"]
    assert {turn.finish for turn in episode.turns} == {Finish.LENGTH}


class StoppedScorer:
    """A scorer whose task ends as if it had been cancelled, as user code once could do."""

    def __init__(self, how):
        self.how = how

    async def score(self, group):
        if self.how == "cancels its task":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        raise asyncio.CancelledError

    def accept(self, groups):
        """Accept everything."""


@pytest.mark.parametrize("how", ["raises CancelledError", "cancels its task"])
async def test_a_group_that_was_not_scored_is_an_error(how):
    """A TaskGroup says nothing of a task that ends so, and its episodes kept the reward 0."""
    config, policy = run_config(), tiny_policy(ends=True)
    context = rollout_context(config, FakeHost(), chat=policy.chat, engine=local_engine(policy))
    context = dataclasses.replace(context, scorer=StoppedScorer(how))
    with pytest.raises(FailureError, match=r"although nothing (cancelled it|stopped the run)"):
        await collect_groups(
            context, [context.splits.train[0]], group_size=2, temperature=1.0, seed=0, label="x"
        )
