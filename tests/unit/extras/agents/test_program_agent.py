"""Programs in the place of the pipeline's loop: real processes on a fake host."""

import asyncio
import dataclasses
import os
import re

import psutil
import pytest
from fakes import collect, local_engine, play, tiny_policy
from programs import CLIENT, RepliesEngine, agent_config, play_episodes, programs_context, two_steps

from openenv_pipe.algorithms.samples import episode_samples
from openenv_pipe.config.compose import compose
from openenv_pipe.engines.openai import OpenAIEngine
from openenv_pipe.environments.client.protocol import StepResult
from openenv_pipe.errors import ConfigError, EngineError, RequestRejectedError, SessionClosedError
from openenv_pipe.extras.agents.programs import settling
from openenv_pipe.extras.agents.programs.program import check_program
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.messages import split_tools
from openenv_pipe.models.tiny import ASSISTANT, build_tokenizer
from openenv_pipe.rollout.metrics import summarise_groups
from openenv_pipe.runs.episodes import read_episodes, write_episodes
from openenv_pipe.runs.transcript import transcript
from openenv_pipe.types import CUT_BY_REQUEST, Finish, Group, Status, TurnRole, Usage, path_to

CHAT = ChatFormat(build_tokenizer())
# The pipeline's loop, as a program: what `collect` plays.
LOOP = """
messages = task["messages"]
while True:
    reply = ask(messages)
    result = step(text=reply["content"])
    if result.get("done", True):
        break
    messages += [reply, user(result["observation"]["text"])]
"""


async def play_script(script, tmp_path, *replies, options=None, **agent):
    """Play one episode with a program and, without another, an engine that gives `replies`."""
    engine = RepliesEngine(CHAT, *(replies or ("yes",)))
    parts = {"chat": CHAT, "engine": engine, **(options or {})}
    async with programs_context(agent_config(script, **agent), tmp_path, **parts) as rollout:
        (episode,) = await play_episodes(rollout)
    return episode, parts["engine"]


async def test_a_program_that_plays_as_the_loop_gives_the_loops_episodes(tmp_path):
    """The same ids, logprobs, links and steps: also of replies that are not UTF-8."""
    policy = tiny_policy(ends=True)
    plain = await collect(policy, num_tasks=2)
    context = programs_context(
        agent_config(LOOP, max_calls=4),
        tmp_path,
        chat=policy.chat,
        engine=local_engine(policy),
        play=play,
        changes={"env.max_episode_tokens": 120},
    )
    async with context as rollout:
        episodes = await play_episodes(rollout, num_tasks=2, group_size=2)
    assert [each.turns for each in episodes] == [
        each.turns for group in plain for each in group.episodes
    ]
    assert sum(map(len, (turn.completion_ids for e in episodes for turn in e.turns))) > 20


async def test_a_reply_that_its_own_request_cuts_off_is_noted_shown_and_counted(tmp_path):
    """One that a limit of the run cuts off is only shown."""
    policy, counts = tiny_policy(), list[object]()
    for limit in ("max_tokens=3", "max_tokens=1000", ""):
        options = {"chat": policy.chat, "changes": {"env.max_reply_tokens": 6}}
        options["engine"] = local_engine(policy)
        episode, _ = await play_script(f"ask([user('a')], {limit})", tmp_path, options=options)
        num_tokens = 3 if limit == "max_tokens=3" else 6
        assert f"       cut off after {num_tokens} tokens" in transcript(episode).splitlines()
        group = Group(id="1", task=episode.task, episodes=[episode])
        counts.append((episode.notes, summarise_groups([group]).get("episodes/cut_by_request")))
    assert counts == [([CUT_BY_REQUEST], 1), ([], None), ([], None)]


# --- the graph of calls -------------------------------------------------------------------------

MANY_CALLS = """
tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
main = [user("find two words")]
first = ask(main, tools=tools)
assert [call["function"]["name"] for call in first["tool_calls"]] == ["look_up", "look_up"]
main += [first] + [
    {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}
    for call in first["tool_calls"]
]
ask(main, tools=tools)
better = ask(main, tools=tools)
sub = [{"role": "system", "content": "You help."}, user("a part")]
sub += [ask(sub, tools=tools), user("more")]
ask(sub, tools=tools)
ask([user("a title for this")])
main += [better, user("go on")]
ask(main, tools=tools)
ask([user("so far: two words")], tools=tools)
"""
TWO_CALLS = (
    '<tool_call>{"name": "look_up","arguments": {"word": "sky"}}</tool_call>'
    '<tool_call>{"name": "look_up", "arguments": {"word":"sea"}}</tool_call>'
)


async def test_the_calls_of_a_program_are_linked_and_have_roles(tmp_path):
    """Each has the engine's ids and logprobs."""
    replies = (TWO_CALLS, "draft", "better", "part", "rest", "title", "end", "compacted")
    episode, engine = await play_script(MANY_CALLS, tmp_path, *replies)
    assert (episode.status, episode.error) == (Status.ANSWERED, None), episode.output
    assert [turn.reply for turn in episode.turns] == list(replies)
    assert episode.parents == [None, 0, 0, None, 3, None, 2, None]
    agent, retry, auxiliary = TurnRole.AGENT, TurnRole.RETRY, TurnRole.AUXILIARY
    assert [turn.role for turn in episode.turns] == [
        *(agent, retry, agent, agent, agent, auxiliary, agent, agent)
    ]
    samples = episode_samples("group", episode, [1.0] * 8)
    trained = [[1, 2, 6], [3, 4], [7]]  # the last turn of each path, and those before it
    ends = [0, 0, 0]
    for index, path in enumerate(trained):
        (sample,) = [each for each in samples if ends_with(each, engine.completions[path[-1]])]
        ids = [place for place, is_trained in enumerate(sample.loss_mask) if is_trained]
        ends[index] = len(ids)
        assert sample.token_ids == engine.prompts[path[-1]] + engine.completions[path[-1]].token_ids
    lengths = [len(each.token_ids) for each in engine.completions]
    assert ends == [lengths[0] + lengths[2] + lengths[6], lengths[3] + lengths[4], lengths[7]]
    assert len(samples) == 3
    for index, (turn, completion) in enumerate(zip(episode.turns, engine.completions, strict=True)):
        *before, _ = (episode.turns[place] for place in path_to(index, episode.parents))
        ids = [token for each in before for token in each.prompt_ids + each.completion_ids]
        assert ids + turn.prompt_ids == engine.prompts[index]
        assert (turn.completion_ids, turn.logprobs) == (completion.token_ids, completion.logprobs)
        assert turn.policy_versions == [3]


def ends_with(sample, completion):
    return sample.token_ids[-len(completion.token_ids) :] == completion.token_ids


# --- the environment ----------------------------------------------------------------------------


async def test_steps_belong_to_the_call_before_them(tmp_path):
    script = "ask([user('a')]); step(text='one'); ask([user('b')]); print(step(text='two'))"
    episode, _ = await play_script(script, tmp_path)
    assert episode.status is Status.DONE
    assert [[step.action for step in turn.steps] for turn in episode.turns] == [
        [{"text": "one"}],
        [{"text": "two"}],
    ]
    assert [turn.reward for turn in episode.turns] == [0.5, 0.5]
    assert "'done': True" in episode.output


OPENENV_CLIENT = """
import asyncio
from openenv.core.generic_client import GenericEnvClient

async def main():
    async with GenericEnvClient(base_url=os.environ["OPENENV_URL"]) as env:
        print((await env.reset(seed=1)).observation)
        ask([user("a")])
        result = await env.step({"text": "one"})
        print(result.observation, result.reward, result.done)

asyncio.run(main())
"""
MCP_CLIENT = """
import asyncio
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

async def main():
    url = os.environ["OPENENV_URL"] + "/mcp"
    async with streamablehttp_client(url) as (read, write, _), ClientSession(read, write) as env:
        await env.initialize()
        print([tool.name for tool in (await env.list_tools()).tools])
        ask([user("a")])
        for text in "one", "two", "three":
            result = await env.call_tool("step", {"text": text})
            print([part.text for part in result.content], result.isError)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("script", "printed", "status"),
    [
        (OPENENV_CLIENT, ["{'text': 'seen 0'}", "{'text': 'seen 1'} 0.5 False"], Status.ANSWERED),
        (
            MCP_CLIENT,
            [
                "['step']",
                "['seen 1'] False",
                "['seen 2\\nThe episode is over.'] False",
                "['the episode is over'] True",
            ],
            Status.DONE,
        ),
    ],
    ids=["openenv", "mcp"],
)
async def test_other_clients_take_steps(tmp_path, script, printed, status):
    """The clients of OpenEnv and of MCP themselves, in processes of their own."""
    command = ["{python}", "-W", "ignore", "-c", CLIENT + script]
    # A machine that is busy may take a minute to import OpenEnv's client.
    episode, _ = await play_script("", tmp_path, command=command, timeout_s=400.0)
    assert (episode.status, episode.error) == (status, None), episode.output
    assert episode.output.splitlines() == printed
    assert episode.turns[0].steps[0].action == {"text": "one"}


async def test_a_program_sees_its_task(tmp_path):
    script = """
print(task["messages"], task["observation"], task["max_steps"], sys.argv[1:])
print(post(os.environ["OPENENV_URL"] + "/reset", {}))
assert open(sys.argv[2]).read() == sys.argv[1] and open("more/notes.txt").read() == "of policy"
ask([user("a")])
"""
    command = [*agent_config(script).command, "{prompt}", "{prompt_file}"]
    files = {"more/notes.txt": "of {model}"}
    episode, _ = await play_script("", tmp_path, command=command, files=files)
    assert episode.status is Status.ANSWERED, episode.output
    seen = "[{'role': 'user', 'content': 'seen 0'}] {'text': 'seen 0'} 4 ['seen 0', "
    assert episode.output.startswith(seen)
    assert '"observation":{"text":"seen 0"}' in episode.output


async def test_the_home_of_a_program_is_its_folder(tmp_path, monkeypatch):
    """OpenCode believes PWD about its current folder, and agents look for files where XDG says."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/somewhere")
    script = """
assert os.environ["PWD"] == os.environ["HOME"] == os.getcwd()
print([name for name in os.environ if name.startswith("XDG_")])
ask([user("a")])
"""
    episode, _ = await play_script(script, tmp_path)
    assert (episode.status, episode.output) == (Status.ANSWERED, "[]\n")


PRINT_ALL = "print(os.environ, os.listdir('/proc/self/fd')); ask([user('a')])"


async def test_a_program_gets_no_credential_and_no_open_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://me:pass-word@host/db")
    monkeypatch.setenv("NOBODY_HAS_HEARD_OF_IT", "pass-word")
    monkeypatch.setenv("DSN", "of-this-program")
    with (tmp_path / "private").open("w"):
        episode, _ = await play_script(
            PRINT_ALL, tmp_path, variables={"DSN": None, "MOOD": "merry"}
        )
    assert episode.status is Status.ANSWERED, episode.output
    assert "pass-word" not in episode.output and "'MOOD': 'merry'" in episode.output
    assert "'DSN': '<hidden: DSN>'" in episode.output
    assert "'OPENAI_API_KEY': '<hidden: OPENAI_API_KEY>'" in episode.output
    assert episode.output.rstrip().endswith("['0', '1', '2', '3']")  # 3 is the folder's own


async def test_a_program_that_does_not_start_names_what_it_did_not_get(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "DATABASE_URL": "pass-word"})
    episode, _ = await play_script("os.environ['DATABASE_URL']", tmp_path)
    assert episode.status is Status.PROGRAM_FAILED
    assert "were not passed to it: DATABASE_URL; " in episode.error
    assert "; agent.variables={DATABASE_URL: null} would pass one on" in episode.error
    assert "pass-word" not in episode.error


async def test_the_key_of_a_program_is_in_no_name_and_no_argument(tmp_path, monkeypatch):
    script = """
key = os.environ["OPENAI_API_KEY"]
folder = os.getcwd()
print(any(key[place:place + 6] in folder for place in range(len(key) - 5)))
print([oct(os.stat(each).st_mode)[-3:] for each in (folder, os.path.dirname(folder))])
print(key in open("/proc/self/cmdline").read())
ask([user("a")])
"""
    episode, _ = await play_script(script, tmp_path, files={"config": "{api_key}"})
    assert episode.output.splitlines() == ["False", "['700', '700']", "False"]


@pytest.mark.parametrize("placeholder", ["{api_key}", "{env_url}"])
def test_no_argument_of_a_program_has_its_key(placeholder):
    with pytest.raises(ValueError, match=f"contains {placeholder}.*`ps` would show"):
        agent_config(command=["agent", f"--with={placeholder}"])


async def test_steps_end_with_the_episode_and_its_limit(tmp_path):
    script = "ask([user('a')])\nfor _ in range(4): print(step(text='x'))"
    episode, _ = await play_script(script, tmp_path)
    assert (episode.status, len(episode.turns[0].steps)) == (Status.DONE, 2)
    assert episode.output.count("the episode is over") == 2
    options = {"changes": {"env.max_turns": 1}}
    episode, _ = await play_script(script, tmp_path, options=options)
    assert (episode.status, len(episode.turns[0].steps)) == (Status.TURN_LIMIT, 1)


async def test_a_lost_session_fails_the_episode_and_ends_the_program(tmp_path):
    def play(seed, number, action):
        if number:
            raise SessionClosedError("the server has died")
        return two_steps(seed, number, action)

    script = "ask([user('a')]); step(text='x'); time.sleep(60)"
    episode, _ = await play_script(script, tmp_path, options={"play": play})
    assert (episode.status, len(episode.turns)) == (Status.ERROR, 1)
    assert "the server has died" in episode.error


# --- what programs do ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "status", "error"),
    [
        ("pass", Status.NO_CALLS, "without a call"),
        ("print('bye'); sys.exit(3)", Status.PROGRAM_FAILED, "exit code 3; the end of .* 'bye'"),
        ("ask([user('a')])", Status.ANSWERED, None),
        ("ask([user('a')], tools=[], tool_choice='auto')", Status.ANSWERED, None),
        ("ask([user('a')]); time.sleep(60)", Status.TIME_LIMIT, None),
        ("ask([user('a')]); os.kill(os.getpid(), 9)", Status.PROGRAM_KILLED, "by signal 9"),
        ("ask([user('a')])\nwhile True: print('x' * 9999)", Status.OUTPUT_LIMIT, None),
        ("ask([user('a' * 500)])", Status.TOKEN_LIMIT, None),
        ("for _ in range(1000): ask([user('a')])", Status.TURN_LIMIT, None),
        (
            "ask([user('a')], key='sk-' + 32 * '0')",
            Status.PROGRAM_FAILED,
            "401.*the key is missing or wrong",
        ),
    ],
)
async def test_the_ways_in_which_a_program_ends(tmp_path, script, status, error):
    limits = {"timeout_s": 5.0 if "sleep" in script else 600.0, "max_calls": 4}
    episode, engine = await play_script(script, tmp_path, **limits)
    assert episode.status is status, (episode.status, episode.error, episode.output)
    assert re.search(error, episode.error) if error else episode.error is None
    assert episode.failed == bool(error)
    assert len(episode.turns) == len(engine.prompts) <= 4
    assert len(episode.output) < 9000
    ended = status in (Status.NO_CALLS, Status.ANSWERED, Status.TOKEN_LIMIT, Status.TURN_LIMIT)
    codes = {Status.PROGRAM_KILLED: 128 + 9, Status.PROGRAM_FAILED: 3 if "exit(3)" in script else 1}
    assert episode.exit_code == (0 if ended else codes.get(status))
    assert list((tmp_path / "programs").iterdir()) == []


def printed(episode):
    """The score that a program writes last, and the half of it if it ends with exit code 7."""
    score = float(re.findall(r"^score (\S+)$", episode.output, re.MULTILINE)[-1])
    return score / 2 if episode.exit_code == 7 else score


async def test_a_reward_reads_the_output_and_the_exit_code_of_a_program(tmp_path):
    """Of exit codes that agent.exit_codes names; others are failures, which have no reward."""
    term = {"type": "python", "target": f"{__name__}:printed", "keywords": {}, "use": "sum"}
    term |= {"weight": 1.0, "per_turn": False}
    parts = {"chat": CHAT, "engine": RepliesEngine(CHAT, "yes")}
    parts["changes"] = {"reward.terms": {"printed": term}}
    found = []
    for code in 0, 7, 8:
        script = f"ask([user('a')]); print('score 0.8'); sys.exit({code})"
        agent = agent_config(script, exit_codes=[0, 7])
        async with programs_context(agent, tmp_path, **parts) as rollout:
            (episode,) = await play_episodes(rollout)
            await rollout.scorer.score(Group(id="g", task=episode.task, episodes=[episode]))
        found.append((episode.status, episode.reward))
    failed = (Status.PROGRAM_FAILED, 0.0)
    assert found == [(Status.ANSWERED, 0.8), (Status.ANSWERED, 0.4), failed]


async def test_no_process_of_a_program_is_left(tmp_path):
    script = """
import subprocess
command = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(command, start_new_session=True)
print(child.pid)
ask([user("a")])
"""
    episode, _ = await play_script(script, tmp_path)
    assert episode.status is Status.ANSWERED
    assert not psutil.pid_exists(int(episode.output))


@pytest.mark.parametrize("replies", [("yes", " yes", "no"), (" yes", "yes", "yes")])
async def test_the_model_sees_its_own_replies_however_alike(tmp_path, replies):
    script = """
messages = [user("go")]
for _ in range(3):
    messages += [ask(messages), user("on")]
"""
    episode, engine = await play_script(script, tmp_path, *replies)
    sampled = [completion.token_ids for completion in engine.completions]
    assert all(each == [None, 0, 1][n] for n, each in enumerate(episode.parents))
    for number in (1, 2):
        (before,) = {tuple(engine.prompts[number - 1] + sampled[number - 1])}
        assert tuple(engine.prompts[number][: len(before)]) == before


async def test_the_turns_have_what_the_model_was_shown(tmp_path):
    """The messages of a call that are new, and before the first ones its tools."""
    script = """
tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
messages = [user("go")]
messages += [ask(messages, tools=tools), user("on")]
ask(messages, tools=tools)
"""
    episode, _ = await play_script(script, tmp_path, "yes", "no")
    first, second = episode.turns
    tools, shown = split_tools(first.messages)
    assert [each["function"]["name"] for each in tools] == ["look"]
    assert [each["content"] for each in shown] == ["go"]
    assert [each["content"] for each in second.messages] == ["on"]


async def test_words_of_the_chat_format_that_were_broken_up_are_noted(tmp_path):
    episode, _ = await play_script(f"ask([user('write {ASSISTANT}')])", tmp_path)
    (note,) = episode.notes
    assert note.startswith("words of the chat format")
    assert ASSISTANT not in episode.turns[0].messages[0]["content"]


REJECTED = """
status, text = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {})
print(status, text)
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": []}, "messages has to be a list of at least one message"),
        ("not an object", ""),
    ],
)
async def test_calls_that_were_rejected_are_in_the_episode(tmp_path, body, reason):
    episode, _ = await play_script(REJECTED.replace("{}", repr(body)), tmp_path)
    assert (episode.status, episode.exit_code) == (Status.NO_CALLS, 0), episode.output
    assert f"without an answered call: 1 call was rejected with 400: {reason}" in episode.error
    assert episode.notes == [episode.error.partition("call: ")[2]]


async def test_a_rejected_call_beside_answered_ones_is_noted(tmp_path):
    script = "ask([user('a')])\n" + 2 * REJECTED.replace("{}", "{'messages': []}")
    episode, _ = await play_script(script, tmp_path)
    assert (episode.status, len(episode.turns)) == (Status.ANSWERED, 1)
    (note,) = episode.notes
    assert note.startswith("2 calls were rejected with 400: messages has to be")


async def test_what_was_asked_for_and_not_given_is_noted_once(tmp_path):
    script = """
for _ in range(2):
    ask([user("a")], seed=3, reasoning_effort="low", chat_template_kwargs={"enable_thinking": True},
        parallel_tool_calls=False, logprobs=True, top_p=0.5, temperature=1.0, model="gpt-4o")
"""
    episode, _ = await play_script(script, tmp_path)
    sampling, *ignored, model = episode.notes
    assert "top_p=0.5" in sampling and "'gpt-4o'" in model
    names = ("seed=3", "reasoning_effort='low'", "chat_template_kwargs={'enable_thinking': True}")
    for name, note in zip(names, ignored, strict=True):
        assert note == f"the program asked for {name}, which has no effect here"


@pytest.mark.parametrize("variables", [{}, {"TASK": "{prompt}"}])
async def test_a_prompt_that_no_argument_can_hold_fails_its_episode(tmp_path, variables):
    command = ["{python}", "-c", "pass"] if variables else ["{python}", "-c", "pass", "{prompt}"]
    changes = {"env.max_episode_tokens": 400, "env.max_observation_tokens": None}
    options = {"changes": changes, "play": lambda *_: StepResult({"text": "x" * 200_000}, 0, False)}
    episode, _ = await play_script(
        "", tmp_path, options=options, command=command, variables=variables
    )
    assert episode.status is Status.PROGRAM_FAILED
    assert "name {prompt_file} or {task_file} in the place of {prompt}" in episode.error
    assert list((tmp_path / "programs").glob("*")) == []


async def test_a_prompt_that_is_no_text_reaches_its_program(tmp_path):
    script = "print(ascii(sys.argv[1])); ask([user('a')])"
    options = {"play": lambda *_: StepResult({"text": "-a\ud800\0b"}, 0, False)}
    command = ["{python}", "-S", "-c", CLIENT + script, "{prompt}"]
    episode, _ = await play_script("", tmp_path, options=options, command=command)
    assert (episode.status, episode.output) == (Status.ANSWERED, "'-a?b'\n")


async def test_a_call_whose_program_leaves_is_not_trained(tmp_path):
    """The program asks for a stream, closes the connection when it is sampled, and goes on."""
    left, is_sampled = asyncio.Event(), tmp_path / "is_sampled"

    class Engine(RepliesEngine):
        async def generate(self, request):
            if request.turn == 0:
                is_sampled.touch()
                await asyncio.wait_for(left.wait(), 60)
                await asyncio.sleep(0.1)
            return await super().generate(request)

    def play(seed, number, action):
        if number:
            left.set()
        return two_steps(seed, number, action)

    script = (
        f"is_sampled = {str(is_sampled)!r}"
        + """
parts = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(parts.netloc)
body = json.dumps({"messages": [user("a")], "stream": True})
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
connection.request("POST", parts.path + "/chat/completions", body, headers)
while not os.path.exists(is_sampled): time.sleep(0.05)
connection.close()
step(text="left")
ask([user("b")])
"""
    )
    options = {"engine": Engine(CHAT, "yes"), "play": play}
    episode, _ = await play_script(script, tmp_path, options=options)
    assert [turn.role for turn in episode.turns] == [TurnRole.RETRY, TurnRole.AGENT]


# Eight sub-agents of two calls each, and one that takes a step between them.
AT_ONCE = """
import random, threading
def sub_agent(number):
    sum(range(random.Random(order + number).randrange(300_000)))
    first = ask([user(f"part {number}")])
    if number == 3:
        step(text="one")
    ask([user(f"part {number}"), first, user("go on")])
threads = [threading.Thread(target=sub_agent, args=(number,)) for number in range(8)]
random.Random(order).shuffle(threads)
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


async def test_calls_at_once_are_sampled_together_in_one_order(tmp_path):
    """Whichever of the program's threads is the first, and however long each works before."""
    policy = tiny_policy(ends=True)
    found = []
    for order in range(3):
        context = programs_context(
            agent_config(f"order = {order}\n{AT_ONCE}"),
            tmp_path,
            chat=policy.chat,
            engine=local_engine(policy),
        )
        async with context as rollout:
            episodes = await play_episodes(rollout, group_size=2)
        assert {(each.status, each.error) for each in episodes} == {(Status.ANSWERED, None)}
        found.append([without_times(turn) for each in episodes for turn in each.turns])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 32
    replies = [tuple(turn.completion_ids) for turn in found[0][:8]]
    assert len(set(replies)) > 1, "calls at once have seeds of their own"


def without_times(turn):
    return dataclasses.replace(turn, times_s=[])


async def test_what_a_thread_sent_before_it_sleeps_is_read(monkeypatch):
    """It may run at the first look and sleep at the second without having been switched off in
    between: what it has sent meanwhile may not be read before a third one."""
    looks = [(False, b"7"), (True, b"7"), (True, b"7")]
    threads = (settling._Threads(asleep, {"1": runs}, {"1": 0.0}) for asleep, runs in looks)
    monkeypatch.setattr(settling, "_threads_below", lambda guard_pid: next(threads))
    monkeypatch.setattr(settling, "CAN_TELL", True)
    await settling.wait_until_settled(1, lambda: False)
    assert next(threads, None) is None


async def test_calls_at_once_are_one_round(tmp_path):
    episode, engine = await play_script(f"order = 1\n{AT_ONCE}", tmp_path)
    assert engine.num_concurrent == [8] * 16
    assert episode.parents == [None] * 8 + list(range(8))
    assert [len(turn.steps) for turn in episode.turns].index(1) == 7  # the last call before it


async def test_a_program_that_never_sleeps_is_answered(tmp_path):
    """It is asked for no more calls than it makes while it works for half a second."""
    script = """
import threading
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
for _ in range(2): ask([user("a")])
"""
    episode, _ = await play_script(script, tmp_path, timeout_s=400.0)
    assert (episode.status, len(episode.turns)) == (Status.ANSWERED, 2), episode.output


async def test_the_failure_of_the_engine_ends_the_run(tmp_path):
    class Engine(RepliesEngine):
        async def generate(self, request):
            raise EngineError("no server")

    with pytest.raises(EngineError, match="no server"):
        await play_script("ask([user('a')])", tmp_path, options={"engine": Engine(CHAT, "")})


async def test_episodes_of_programs_are_stored_whole(tmp_path):
    episode, _ = await play_script("print('out'); ask([user('a')], top_p=0.5)", tmp_path)
    path = tmp_path / "episodes.jsonl.gz"
    write_episodes(path, [Group(id="g", task=episode.task, episodes=[episode])])
    (group,) = read_episodes(path)
    assert dataclasses.replace(group.episodes[0], duration_s=episode.duration_s) == episode
    assert (episode.output, episode.exit_code, len(episode.notes)) == ("out\n", 0, 1)
    assert "exit   code 0\noutput out" in transcript(group.episodes[0])


# --- hosted models ------------------------------------------------------------------------------

HOSTED = """
tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
main = [user("find a word")]
first = ask(main, tools=tools, model="gpt-4o", top_p=0.5)
(call,) = first["tool_calls"]
main += [first, {"role": "tool", "tool_call_id": call["id"], "content": "sky"}]
step(text=ask(main, tools=tools)["content"])
ask([user("a title for this")])
"""


class HostedModel:
    """In the place of `ChatClient`: gives answers, and keeps the requests."""

    def __init__(self, *answers):
        self.asked = []
        self._answers = answers

    async def complete(self, body, num_tokens):
        self.asked.append(body)
        answer = self._answers[len(self.asked) - 1]
        if isinstance(answer, Exception):
            raise answer
        finish = answer.get("finish_reason", "stop")
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 3}
        return {"choices": [{"message": answer, "finish_reason": finish}], "usage": usage}


async def play_hosted(script, tmp_path, *answers):
    settings = ("engine=openai", "engine.model=hosted", "engine.api_key=null")
    config = compose(["conf=echo", *settings]).config.engine
    client = HostedModel(*answers)
    options = {"chat": None, "engine": OpenAIEngine(config, client), "level": "text"}
    episode, _ = await play_script(script, tmp_path, options=options)
    return episode, client


async def test_a_hosted_model_plays_by_a_program(tmp_path):
    """It gets messages, calls and tools as they are, and the pipeline's own settings."""
    function = {"name": "look_up", "arguments": "{}"}
    call = {"id": "call_x", "type": "function", "function": function}
    wish = {"content": None, "tool_calls": [call]}
    replies = (wish, {"content": "sky"}, {"content": "A word"})
    episode, client = await play_hosted(HOSTED, tmp_path, *replies)
    assert (episode.status, episode.error) == (Status.ANSWERED, None), episode.output
    first, second, last = client.asked
    assert [body["model"] for body in client.asked] == ["hosted"] * 3
    assert (first["temperature"], "top_p" in first, last.get("tools")) == (1.0, False, None)
    assert second["tools"] == first["tools"]
    assert second["messages"][1]["tool_calls"] == [call]
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "call_x", "content": "sky"}
    assert "top_p=0.5" in episode.notes[0]
    assert episode.parents == [None, 0, None]
    assert [turn.role for turn in episode.turns] == [
        *(TurnRole.AGENT, TurnRole.AGENT, TurnRole.AUXILIARY)
    ]
    assert [turn.usage for turn in episode.turns] == [
        *(Usage(num_prompt_tokens=10, num_completion_tokens=3),),
        *(Usage(num_prompt_tokens=30 - 13, num_completion_tokens=3),),
        *(Usage(num_prompt_tokens=10, num_completion_tokens=3),),
    ]
    assert [len(turn.steps) for turn in episode.turns] == [0, 1, 0]
    assert [turn.reply for turn in episode.turns[1:]] == ["sky", "A word"]
    assert not any(turn.prompt_ids or turn.completion_ids for turn in episode.turns)


async def test_a_field_images_of_a_programs_message_is_its_own(tmp_path):
    """Some clients send one with each message, null or a list. It is no image of observations."""
    script = "ask([{**user('a'), 'images': None}, {**user('b'), 'images': ['aGVsbG8=']}])"
    episode, client = await play_hosted(script, tmp_path, {"content": "sky"})
    assert (episode.status, episode.error) == (Status.ANSWERED, None), episode.output
    assert [each["images"] for each in client.asked[0]["messages"]] == [None, ["aGVsbG8="]]


async def test_a_reply_that_a_filter_withholds_is_noted_and_told_to_the_program(tmp_path):
    script = """
url, body = os.environ["OPENAI_BASE_URL"], {"model": "policy", "messages": [user("a")]}
print(post(url + "/chat/completions", body)[1])
"""
    withheld = {"content": None, "finish_reason": "content_filter"}
    episode, _ = await play_hosted(script, tmp_path, withheld)
    assert '"finish_reason":"content_filter"' in episode.output.replace(" ", "")
    assert episode.notes == ["the provider's content filter withheld the reply, or the rest of it"]
    assert [turn.finish for turn in episode.turns] == [Finish.FILTERED]


async def test_what_a_hosted_model_rejects_is_the_programs_or_ends_the_run(tmp_path):
    rejected = RequestRejectedError("answered 400: too long", 400)
    episode, _ = await play_hosted("ask([user('a')])", tmp_path, rejected)
    assert episode.status is Status.PROGRAM_FAILED
    assert "answered 400: too long" in episode.output
    assert episode.notes == ["1 call was rejected with 400: answered 400: too long"]
    with pytest.raises(RequestRejectedError, match="the key"):
        await play_hosted("ask([user('a')])", tmp_path, RequestRejectedError("the key", 401))


# --- dialects -----------------------------------------------------------------------------------

TWO_CALLS_IN_EACH = """
def send(path, body, **headers):
    parts = urllib.parse.urlsplit(os.environ["ANTHROPIC_BASE_URL"])
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 200, (response.status, text)
    return text

def anthropic(messages, **more):
    body = {"model": "policy", "max_tokens": 99, "messages": messages, **more}
    return send("/v1/messages", body, **{"x-api-key": os.environ["ANTHROPIC_API_KEY"]})

def responses(items, **more):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return send("/v1/responses", {"model": "policy", "input": items, **more}, **key)

def gemini(contents, method="generateContent"):
    key = {"x-goog-api-key": os.environ["GEMINI_API_KEY"]}
    return send("/v1beta/models/policy:" + method, {"contents": contents}, **key)

schema = {"type": "object", "properties": {"word": {"type": "string"}}}
if dialect == "anthropic":
    tools = [{"name": "look_up", "description": "d", "input_schema": schema}]
    content = json.loads(anthropic([user("a")], tools=tools))["content"]
    (call,) = [block for block in content if block["type"] == "tool_use"]
    assert (call["name"], call["input"]) == ("look_up", {"word": "sky"}), call
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "blue"}
    more = [user("a"), {"role": "assistant", "content": content}, user([result])]
    print(anthropic(more, tools=tools, stream=True))
elif dialect == "responses":
    tools = [{"type": "function", "name": "look_up", "parameters": schema}]
    output = json.loads(responses([user("a")], tools=tools))["output"]
    (call,) = [item for item in output if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("look_up", {"word": "sky"}), call
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    print(responses([user("a"), *output, result], tools=tools, stream=True))
else:
    first, second = ({"role": "user", "parts": [{"text": text}]} for text in "ab")
    said = json.loads(gemini([first]))["candidates"][0]["content"]

    print(gemini([first, said, second], "streamGenerateContent?alt=sse"))
"""
ONE_CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "sky"}}</tool_call>'


@pytest.mark.parametrize("dialect", ["anthropic", "responses", "gemini"])
async def test_other_dialects_reach_the_same_model(tmp_path, dialect):
    """The second request repeats the answer to the first and continues it; it asks for a stream."""
    script = f"dialect = {dialect!r}\n{TWO_CALLS_IN_EACH}"
    episode, _ = await play_script(script, tmp_path, ONE_CALL, "it is blue")
    assert (episode.status, episode.error) == (Status.ANSWERED, None), episode.output
    assert episode.parents == [None, 0]
    assert "it is blue" in episode.output and "data: " in episode.output


async def test_tools_in_a_namespace_are_called_by_their_whole_names(tmp_path):
    """Codex sends the tools of its MCP servers so, and knows a call by namespace and name."""
    script = f"""
{TWO_CALLS_IN_EACH.partition("if dialect")[0]}
tools = [{{"type": "namespace", "name": "mcp__env", "description": "d", "tools": [
    {{"type": "function", "name": "look_up", "parameters": schema}}]}}]
output = json.loads(responses([user("a")], tools=tools))["output"]
(call,) = output
assert (call["namespace"], call["name"]) == ("mcp__env", "look_up"), call
result = {{"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}}
for line in responses([user("a"), call, result], tools=tools, stream=True).splitlines():
    event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {{") else {{}}
    items = [event.get("item", {{}}), *event.get("response", {{}}).get("output", [])]
    print(*(item["namespace"] for item in items if item.get("name") == "look_up"))
"""
    whole = ONE_CALL.replace("look_up", "mcp__env__look_up")
    episode, _ = await play_script(script, tmp_path, whole)
    assert (episode.status, episode.error) == (Status.ANSWERED, None), episode.output
    assert episode.output.split() == ["mcp__env"] * 3  # begun, done, and in the whole answer
    assert episode.parents == [None, 0]
    assert [turn.reply for turn in episode.turns] == [whole, whole]


def test_a_script_that_is_nowhere_is_rejected_before_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text("print()")
    ways = {
        "my_agent.py": None,
        "agent.py": {"agent.py": "print()"},
        "{start_folder}/agent.py": None,
        "-m": None,
    }
    for script, files in ways.items():
        config = agent_config("", command=["{python}", script], files=files or {})
        assert check_program(config) == f"a program, {{python}} {script}"
    config = agent_config("", command=["{python}", "my_agnt.py"])
    with pytest.raises(ConfigError, match=r"'my_agnt.py' after .*did you mean my_agent.py\?"):
        check_program(config)
