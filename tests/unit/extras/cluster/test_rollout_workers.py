"""Rollout workers that are lost at unfortunate moments, in a cluster that is a fake."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import FakeHost, run_config

from openenv_pipe.config.compose import compose
from openenv_pipe.engines.base import Completion, TokenRequest
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.environments.adapters import build_adapter
from openenv_pipe.errors import HostError, SessionError
from openenv_pipe.extras.cluster import remote_worker
from openenv_pipe.extras.cluster import worker as worker_module
from openenv_pipe.extras.cluster import workers as module
from openenv_pipe.extras.cluster.nodes import WorkerLostError
from openenv_pipe.extras.cluster.remote_worker import EpisodeReplies
from openenv_pipe.extras.cluster.worker import ReplyRequest
from openenv_pipe.extras.cluster.workers import RolloutWorkers
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.rollout import episode as episode_module
from openenv_pipe.rollout.context import EpisodeSpec
from openenv_pipe.rollout.episode import LocalRunner
from openenv_pipe.types import Finish, Status, Task
from tests.fake_rollout_workers import FakeNodes, FakePlacedProcess

LIMIT_S = 30.0  # for what takes milliseconds
CHAT = ChatFormat(build_tokenizer())
TASK = Task(id="t", split="train", index=0, seed=0)


class Engine:
    """Samples one token, which names the length of the prompt. A reply waits for `may_reply`."""

    capabilities = None

    def __init__(self) -> None:
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        self.num_asked = 0

    async def generate(self, request):
        self.num_asked += 1
        await self.may_reply.wait()
        return Completion(
            token_ids=[1000 + len(request.prompt_ids)],
            logprobs=[0.0],
            finish=Finish.STOP,
            policy_versions=[0],
        )


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Return a function that makes the workers of a cluster."""

    def make(cluster, *overrides):
        async def connected(_):
            return cluster

        monkeypatch.setattr(module, "connected", connected)
        monkeypatch.setattr(remote_worker, "REASON_LIMIT_S", 0.1)
        given = ["conf=smoke", "cluster=ray", "cluster.rollout_workers=1", *overrides]
        return RolloutWorkers(compose(given).config, tmp_path)

    return make


async def play(workers, engine=None, number=0):
    spec = EpisodeSpec(task=TASK, seed=0, temperature=1.0, number=number)
    async with asyncio.timeout(LIMIT_S):
        return await workers.play(SimpleNamespace(engine=engine or Engine()), spec)


class RealWorker(worker_module.RolloutWorker):
    @property
    def channel(self):
        """The connection, which ends with the worker's process."""
        return self._channel


class RealWorkers(FakeNodes):
    """Places real workers, in this process."""

    def place(self, _, *arguments, num_cpus, name):
        process = FakePlacedProcess(self, len(self.processes), name)
        process.worker = RealWorker(*arguments)
        self.processes.append(process)
        return process


class ServerlessHost(FakeHost):
    access = None

    def facts(self):
        return {}


def seen(observations, draw):
    return f"seen {len(observations)}"


class FailsAtTheSecondTurn(ScriptedEngine):
    """Raises what the session of an episode may raise, for example from a policy that asks it."""

    async def generate(self, request):
        if request.turn == 1:
            raise SessionError("no second reply")
        return await super().generate(request)


async def test_a_worker_returns_the_episode_that_this_process_would_have_played(make, monkeypatch):
    adapter = build_adapter(run_config().env.adapter)

    async def adapter_for(*_):
        return adapter

    monkeypatch.setattr(worker_module, "build_host", lambda *_: ServerlessHost())
    monkeypatch.setattr(episode_module, "adapter_for", adapter_for)
    workers = make(RealWorkers(), "cluster.max_restarts=0")
    await workers.start()
    await workers.prepare(CHAT)
    loop, env = LocalRunner(FakeHost(), adapter), compose(["conf=smoke"]).config.env
    for engine in (ScriptedEngine(seen), FailsAtTheSecondTurn(seen)):
        context = SimpleNamespace(env=env, chat=CHAT, engine=engine)
        spec = EpisodeSpec(task=TASK, seed=3, temperature=1.0, number=0, member=2)
        async with asyncio.timeout(LIMIT_S):
            here, there = [await each.play(context, spec) for each in (loop, workers)]
        assert here.turns
        assert replace(there, duration_s=here.duration_s) == here
    assert here.status is Status.ERROR
    await workers.close()


class Greetless(FakeNodes):
    """The connections of workers carry no key, from a moment on."""

    sends_key = False

    async def on_connect(self, worker, offer):
        if self.sends_key:
            await super().on_connect(worker, offer)


async def test_a_worker_that_sends_no_key_is_lost_and_replaced_within_the_budget(make, monkeypatch):
    cluster = Greetless()
    cluster.sends_key = True
    workers = make(cluster, "cluster.max_restarts=2")
    await workers.start()
    cluster.sends_key = False
    monkeypatch.setattr(remote_worker, "CONNECT_LIMIT_S", 0.5)
    cluster.processes[0].lose()
    with pytest.raises(HostError, match=r"sent no key.*max_restarts=2"):
        await play(workers)
    await workers.close()


async def test_the_first_worker_that_sends_no_key_ends_the_start_in_words(make, monkeypatch):
    monkeypatch.setattr(remote_worker, "CONNECT_LIMIT_S", 0.5)
    workers = make(Greetless())
    with pytest.raises(WorkerLostError, match="RAY_USE_TLS has to be the same"):
        await workers.start()
    await workers.close()


class LosesNext(FakeNodes):
    """Loses one worker while it starts, if it is told to."""

    loses_next = False

    async def on_start(self, worker):
        if self.loses_next:
            self.loses_next = False
            self.processes[-1].lose()
            await asyncio.Event().wait()


async def test_a_replacement_that_is_lost_while_it_starts_is_replaced(make):
    cluster = LosesNext()
    workers = make(cluster, "cluster.max_restarts=3")
    await workers.start()
    cluster.loses_next = True
    cluster.processes[0].lose()
    await play(workers)
    assert len(cluster.processes) == 3
    await workers.close()


async def test_a_worker_that_is_lost_before_the_first_episode_is_replaced(make):
    cluster = FakeNodes()
    workers = make(cluster, "cluster.rollout_workers=2")
    await workers.start()
    cluster.processes[0].lose()
    async with asyncio.timeout(LIMIT_S):
        await workers.prepare(None)
        assert await workers.open_splits(None) == "the splits"
    await workers.close()


async def test_deaths_of_a_lost_workers_servers_still_count(make):
    cluster = FakeNodes()
    workers = make(cluster)
    await workers.start()
    cluster.processes[0].worker.num_deaths = 2
    await play(workers)
    assert workers.num_deaths == 2
    cluster.processes[0].lose()
    await play(workers, number=1)
    assert workers.num_deaths == 3  # with the worker's own
    await workers.close()


class SecondIsLate(FakeNodes):
    """The second worker starts when the first one has, and fails if it is told to."""

    may_fail: asyncio.Event

    async def on_start(self, worker):
        if worker.index == 1:
            await self.may_fail.wait()
            raise HostError("no room")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_start_that_ends_early_ends_the_workers_that_have_started(make, is_cancelled):
    cluster = SecondIsLate()
    cluster.may_fail = asyncio.Event()
    workers = make(cluster, "cluster.rollout_workers=2")
    starting = asyncio.create_task(workers.start())
    async with asyncio.timeout(LIMIT_S):
        while not (cluster.processes and cluster.processes[0].worker.channel):
            await asyncio.sleep(0.01)
    if is_cancelled:
        starting.cancel()
    else:
        cluster.may_fail.set()
    (error,) = await asyncio.gather(starting, return_exceptions=True)
    assert isinstance(error, asyncio.CancelledError if is_cancelled else HostError)
    await workers.close()
    assert [process.is_killed for process in cluster.processes] == [True, True]


async def test_a_question_of_a_lost_worker_does_not_change_the_conversation(make, monkeypatch):
    """Two workers are lost in turn. The second one asks something else, and is lost before its
    answer. The third one asks as the first did, and gets the replies to its own prompts."""
    cluster = FakeNodes()
    cluster.is_silent = True
    workers = make(cluster, "cluster.max_restarts=9")
    await workers.start()
    engine = Engine()
    asked, answered = [], []
    reply = EpisodeReplies.reply

    async def recorded(replies, request):
        asked.append(request)
        answered.append(await reply(replies, request))
        return answered[-1]

    monkeypatch.setattr(EpisodeReplies, "reply", recorded)
    playing = asyncio.create_task(play(workers, engine))

    async def until(condition):
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def worker(number):
        await until(lambda: len(cluster.processes) > number)
        found = cluster.processes[number].worker
        await until(lambda: found.played)
        return found

    async def ask(worker, turn, *prompt_ids, waits_for=answered):
        num_known = len(waits_for)
        request = TokenRequest(
            episode=0, turn=turn, max_tokens=4, temperature=1.0, seed=0, prompt_ids=list(prompt_ids)
        )
        worker.report(ReplyRequest(play=worker.played[-1], request=request))
        await until(lambda: len(waits_for) > num_known)

    first = await worker(0)
    await ask(first, 0, 1, 2)
    engine.may_reply.clear()
    await ask(first, 1, 1, 2, 1002, 3, waits_for=asked)
    await until(lambda: engine.num_asked == 2)
    cluster.processes[0].lose()
    second = await worker(1)
    await ask(second, 0, 1, 2)
    await ask(second, 1, 1, 2, 1002, 9, 9, waits_for=asked)
    cluster.processes[1].lose()
    third = await worker(2)
    engine.may_reply.set()
    await ask(third, 0, 1, 2)
    await ask(third, 1, 1, 2, 1002, 3)
    await ask(third, 2, 1, 2, 1002, 3, 1004, 4)
    assert [each.token_ids for each in answered[-3:]] == [[1002], [1004], [1006]]
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await workers.close()


class Headless(FakeNodes):
    """The head is lost as soon as it is told to; then workers do not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = asyncio.Event()

    async def watch_head(self):
        await self.is_lost.wait()
        for process in self.processes:
            process.worker.close = asyncio.Event().wait
        return HostError("the head is lost")


async def test_without_the_head_the_end_does_not_wait_for_workers(make, monkeypatch):
    """Ray ends the process soon, and until then the run has to record its end."""
    monkeypatch.setattr(module, "CLOSE_LIMIT_S", 10 * LIMIT_S)
    monkeypatch.setattr(module, "LOST_CLOSE_LIMIT_S", 0.1)
    cluster = Headless()
    cluster.is_silent = True
    workers = make(cluster)
    await workers.start()
    playing = asyncio.create_task(play(workers))
    cluster.is_lost.set()
    with pytest.raises(HostError, match="the head is lost"):
        await playing
    async with asyncio.timeout(LIMIT_S):
        await workers.close()


class Unanswering(FakeNodes):
    """The first worker lives and serves, but answers no questions."""

    async def on_start(self, worker):
        if len(self.processes) == 1:

            async def fail(*_):
                raise WorkerLostError("rollout worker 0 is lost: ActorUnavailableError")

            worker.open_splits = worker.prepare = fail


@pytest.mark.parametrize("question", ["open_splits", "prepare"])
async def test_a_worker_that_does_not_answer_is_ended_and_replaced(make, question):
    cluster = Unanswering()
    workers = make(cluster)
    await workers.start()
    async with asyncio.timeout(LIMIT_S):
        if question == "open_splits":
            assert await workers.open_splits(None) == "the splits"
        else:
            await workers.prepare(None)
            while len(cluster.processes) < 2:
                await asyncio.sleep(0.01)
        assert (await play(workers)).status is Status.DONE
    assert cluster.processes[0].is_killed
    assert not cluster.processes[1].is_killed
    await workers.close()
