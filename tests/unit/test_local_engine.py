"""The engine `local` in real rollouts on a fake host. Trap numbers: tests/README.md."""

import asyncio
import dataclasses
import gc
import random
import weakref
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest
import torch
from fakes import (
    FakeHost,
    InlineExecutor,
    RecordingEngine,
    all_episodes,
    collect,
    local_engine,
    plain_sample,
    play,
    run_config,
    sampled,
    tiny_policy,
)

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.config.schema import RunConfig
from openenv_pipe.engines import TokenRequest, local
from openenv_pipe.engines.eager import EagerEngine
from openenv_pipe.engines.local import LocalEngine
from openenv_pipe.errors import EngineError, HostError, SessionClosedError
from openenv_pipe.extras.cpu_sampling.fast_forward import FastForward
from openenv_pipe.models import policy as policy_module
from openenv_pipe.models.forward.row_forward import Sampler
from openenv_pipe.pipeline.engines import batch_threads
from openenv_pipe.types import Finish, Status

WAIT_S = 60  # limit for each wait, so that no test hangs


def request(episode, prompt_ids, *, max_tokens=10, temperature=1.0, seed=None):
    return TokenRequest(
        episode=episode,
        turn=0,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=episode if seed is None else seed,
    )


def next_request(before, completion, new_ids, **changes):
    """Return the request of an episode's next turn, whose prompt appends to the one before."""
    return dataclasses.replace(
        before,
        prompt_ids=[*before.prompt_ids, *completion.token_ids, *new_ids],
        num_sampled=before.num_sampled + len(completion.token_ids),
        **changes,
    )


class CountingExecutor(InlineExecutor):
    num_calls = 0

    def submit(self, *args, **options):
        self.num_calls += 1
        return super().submit(*args, **options)


async def generate(engine, requests):
    return await asyncio.gather(*(engine.generate(each) for each in requests))


async def generate_alone(policy, *turns):
    """Return the completions of an episode that is played alone."""
    engine = local_engine(policy)
    engine.begin_rollouts(1, 1)
    return [await engine.generate(turn) for turn in turns]


def trainer_logprobs(policy, episodes, temperature):
    """Return the trainer's and the sampler's logprobs of all sampled tokens."""
    batch = pack([plain_sample(episode) for episode in episodes], share=True)
    with torch.no_grad():
        return policy.logprobs(batch, temperature)[0], batch.logprobs


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
async def test_sampler_and_trainer_agree(temperature, lora_rank):
    """Trap 4, over several turns of different lengths, with a cache kept between turns."""
    policy = tiny_policy(ends=True, lora_rank=lora_rank)
    groups = await collect(policy, temperature=temperature)
    episodes = all_episodes(groups)
    trained, sampler = trainer_logprobs(policy, episodes, temperature)
    assert (trained - sampler).abs().max() < 1e-5
    assert len({episode.num_tokens for episode in episodes}) > 3
    assert max(len(episode.turns) for episode in episodes) == 4
    other, _ = trainer_logprobs(policy, episodes, 1.1)
    # proves that the test would notice a wrong temperature
    assert (other - sampler).abs().max() > 1e-2


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
async def test_sampler_and_trainer_agree_in_bfloat16(temperature, lora_rank):
    """Trap 4: both round alike, so they differ far less than bfloat16 does from float32."""
    policy = tiny_policy(ends=True, lora_rank=lora_rank, autocast="bfloat16")
    episodes = all_episodes(await collect(policy, temperature=temperature))
    trained, sampler = trainer_logprobs(policy, episodes, temperature)
    assert (trained - sampler).abs().mean() < 5e-3
    assert (trained - sampler).abs().max() < 0.1


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_training_at_temperature_zero_is_rejected(temperature):
    """Trap 4."""
    with pytest.raises(ValueError, match=r"trainer\.temperature"):
        run_config({"trainer.temperature": temperature})


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_truncated_distributions_are_rejected(key):
    """Trap 6: their logprobs would belong to another distribution than the trainer's, so no key
    sets them."""
    values = run_config().model_dump()
    values["trainer"][key] = 0.5
    with pytest.raises(ValueError, match=key):
        RunConfig.model_validate(values)


async def test_logprobs_belong_to_the_sampled_ids():
    """Trap 7: each logprob equals that of its token's id in a forward pass over the episode
    alone."""
    policy = tiny_policy(ends=True)
    for episode in all_episodes(await collect(policy)):
        ids = [id for turn in episode.turns for id in turn.prompt_ids + turn.completion_ids]
        with torch.no_grad():
            logprobs = torch.log_softmax(policy.logits(policy.hidden(torch.tensor([ids])))[0], -1)
        start = 0
        for turn in episode.turns:
            start += len(turn.prompt_ids)
            for offset, (id, logprob) in enumerate(
                zip(turn.completion_ids, turn.logprobs, strict=True), start
            ):
                assert logprobs[offset - 1, id].item() == pytest.approx(logprob, abs=1e-5)
            start += len(turn.completion_ids)


@pytest.mark.parametrize("num_threads", [0, 3], ids=["one batch", "batches in threads"])
@pytest.mark.parametrize(
    "limits",
    [{}, {"capacity": 3}, {"max_episodes": 5}, {"max_episodes": 1}],
    ids=["all at once", "few sessions", "small batch", "one by one"],
)
async def test_the_order_of_answers_changes_no_bit(limits, num_threads, monkeypatch):
    """Ids and logprobs are the same in whatever order environments answer and threads decode."""
    monkeypatch.setattr(local, "_BATCH_SIZE", 3)
    monkeypatch.setattr(local, "_NEIGHBOURS", 2)
    policy = tiny_policy(ends=True)

    def fails(seed, number, action):
        if seed == 2 and number == 0:
            raise SessionClosedError("fails at reset")
        if seed == 3 and number == 2:
            raise SessionClosedError("fails at its second step")
        return play(seed, number, action)

    results = []
    for order in (1, 2):
        host = FakeHost(fails, capacity=limits.get("capacity", 64), order=random.Random(order))
        with ThreadPoolExecutor(num_threads or 1) as executor:
            engine = LocalEngine(
                policy,
                max_episodes=limits.get("max_episodes", 64),
                executor=executor,
                batch_executor=executor if num_threads else None,
            )
            groups = await asyncio.wait_for(
                collect(policy, engine=engine, host=host, num_tasks=5), WAIT_S
            )
        assert [e.failed for e in all_episodes(groups)].count(True) == 4
        results.append(sampled(groups))
    assert results[0] == results[1]


async def test_tokens_do_not_depend_on_who_else_plays():
    """An episode's tokens follow from its seed, alone or in a batch; its logprobs agree to 1e-5."""
    policy = tiny_policy(ends=True)
    together = sampled(await collect(policy))
    for max_episodes in (1, 3):
        engine = local_engine(policy, max_episodes=max_episodes)
        apart = sampled(await collect(policy, engine=engine))
        assert [ids for ids, _ in apart] == [ids for ids, _ in together]
        for (_, one), (_, other) in zip(apart, together, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


async def test_the_number_of_threads_changes_no_bit(monkeypatch):
    """The batches of a rollout batch depend on its numbers of episodes only."""
    monkeypatch.setattr(local, "_BATCH_SIZE", 3)
    monkeypatch.setattr(local, "_NEIGHBOURS", 1)
    policy = tiny_policy(ends=True)
    results = []
    for num_threads in (1, 2, 4):
        with ThreadPoolExecutor(num_threads) as executor:
            engine = LocalEngine(
                policy, max_episodes=64, executor=executor, batch_executor=executor
            )
            results.append(sampled(await collect(policy, engine=engine, num_tasks=5)))
            assert engine._num_batches == 4
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(("is_small", "num_at_once", "num_each"), [(True, 4, 1), (False, 2, 2)])
def test_batches_share_the_threads(is_small, num_at_once, num_each, monkeypatch):
    """Each operation of a larger model has several threads, which wait for each other."""
    monkeypatch.setattr(policy_module, "MAX_SMALL", 10**9 if is_small else 0)
    policy = tiny_policy()
    with batch_threads(policy, 4) as executor:
        assert executor._max_workers == num_at_once
        assert executor.submit(torch.get_num_threads).result(WAIT_S) == num_each
    policy.sampler = Sampler.RAGGED
    assert batch_threads(policy, 4) is None


async def test_only_several_batches_are_decoded_at_once():
    """A single batch has all threads, which the other executor has only together."""
    policy = tiny_policy()
    whole, batches = CountingExecutor(), CountingExecutor()
    engine = LocalEngine(policy, max_episodes=64, executor=whole, batch_executor=batches)
    for num_episodes, num_calls in ((63, (1, 0)), (64, (1, 2))):
        engine.begin_rollouts(num_episodes, num_episodes)
        asked = [request(number, [5], max_tokens=1) for number in range(num_episodes)]
        await asyncio.wait_for(generate(engine, asked), WAIT_S)
        assert (whole.num_calls, batches.num_calls) == num_calls


@pytest.mark.parametrize(
    ("limit", "num_batches"), [(0, 1), (1, 1), (63, 1), (64, 2), (256, 2), (257, 3), (512, 4)]
)
def test_batches_are_large_enough_for_products(limit, num_batches):
    assert local._num_batches(limit) == num_batches


async def test_a_batch_does_not_wait_for_the_others(monkeypatch):
    """While environments of one batch answer, the other batch is sampled, if all play at once."""
    monkeypatch.setattr(local, "_BATCH_SIZE", 2)
    monkeypatch.setattr(local, "_NEIGHBOURS", 1)
    policy = tiny_policy()
    executor = InlineExecutor()
    engine = LocalEngine(policy, max_episodes=4, executor=executor, batch_executor=executor)
    engine.begin_rollouts(4, 4)
    even = await asyncio.wait_for(generate(engine, [request(n, [5]) for n in (0, 2)]), WAIT_S)
    assert [len(completion.token_ids) for completion in even] == [10, 10]
    engine.begin_rollouts(5, 4)  # The fifth takes the place of any that ends.
    waiting = asyncio.ensure_future(generate(engine, [request(n, [5]) for n in (0, 2)]))
    await asyncio.sleep(0)
    assert not waiting.done()
    await asyncio.wait_for(generate(engine, [request(n, [5]) for n in (1, 3)]), WAIT_S)
    assert await asyncio.wait_for(waiting, WAIT_S) == even


@pytest.mark.parametrize("in_batches", [False, True])
async def test_very_different_reply_lengths_equal_episodes_played_alone(in_batches, monkeypatch):
    """Rows of short replies leave the batch early and return to it later."""
    monkeypatch.setattr(local, "_BATCH_SIZE", 5)
    monkeypatch.setattr(local, "_NEIGHBOURS", 2)
    policy = tiny_policy()
    if not in_batches:
        policy.sampler = Sampler.RAGGED
    lengths = [1, 100, 2, 3, 40, 1, 20, 5]
    first = [
        request(n, list(range(5, 6 + 3 * n)), max_tokens=length) for n, length in enumerate(lengths)
    ]
    executor = InlineExecutor()
    engine = LocalEngine(
        policy,
        max_episodes=64,
        executor=executor,
        batch_executor=executor if in_batches else None,
    )
    engine.begin_rollouts(8, 8)
    played = [await generate(engine, first)]
    second = [
        next_request(each, completion, [5, 6 + n], max_tokens=1 + lengths[n - 1] // 4)
        for n, (each, completion) in enumerate(zip(first, played[0], strict=True))
    ]
    played.append(await generate(engine, second))
    assert [len(completion.token_ids) for completion in played[0]] == lengths
    for episode in range(8):
        alone = await generate_alone(policy, first[episode], second[episode])
        for completion, expected in zip((turn[episode] for turn in played), alone, strict=True):
            assert completion.token_ids == expected.token_ids
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@pytest.mark.parametrize("max_episodes", [2, 64])
async def test_greedy_takes_the_most_likely_token_every_time(max_episodes):
    policy = tiny_policy(ends=True)
    engine = local_engine(policy, max_episodes=max_episodes)
    groups = await collect(policy, engine=engine, temperature=0.0, num_tasks=3)
    for episode in all_episodes(groups):
        ids: list[int] = []
        for turn in episode.turns:
            ids += turn.prompt_ids
            for token_id in turn.completion_ids:
                with torch.no_grad():
                    logits = policy.logits(policy.hidden(torch.tensor([ids]))[0, -1])
                assert token_id == logits.argmax().item()
                ids.append(token_id)


async def test_equal_seeds_and_prompts_give_equal_tokens_and_others_do_not():
    """Trap 24: token k depends only on (seed, k) and the conversation."""
    policy = tiny_policy()
    engine = local_engine(policy)
    engine.begin_rollouts(3, 3)
    requests = [request(n, [5, 6, 7], seed=seed) for n, seed in enumerate((8, 8, 9))]
    first = await generate(engine, requests)
    assert first[0].token_ids == first[1].token_ids != first[2].token_ids
    second = await generate(
        engine,
        [
            next_request(each, completion, [5, 6, 7])
            for each, completion in zip(requests, first, strict=True)
        ],
    )
    assert second[0].token_ids == second[1].token_ids
    assert second[0].token_ids != first[0].token_ids


async def test_replies_end_with_the_end_token_or_at_their_limit():
    """Trap 20."""
    policy = tiny_policy(ends=True)
    groups = await collect(policy, config=run_config({"env.max_reply_tokens": 3}))
    turns = [turn for episode in all_episodes(groups) for turn in episode.turns]
    for turn in turns:
        ended = turn.completion_ids[-1] == policy.chat.ends.usual
        assert policy.chat.ends.usual not in turn.completion_ids[:-1]
        assert turn.finish is (Finish.STOP if ended else Finish.LENGTH)
        assert ended or len(turn.completion_ids) == 3
    assert {turn.finish for turn in turns} == {Finish.STOP, Finish.LENGTH}


async def test_a_new_rollout_batch_knows_nothing_of_old_weights():
    """Traps 16 and 18: the weights change between collections, while the prompts stay the same."""
    policy = tiny_policy(ends=True)
    engine = local_engine(policy)
    before = await collect(policy, engine=engine)
    draw = torch.Generator().manual_seed(0)
    for parameter in policy.model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)
    await engine.publish(7)
    after = await collect(policy, engine=engine)
    assert sampled(before) != sampled(after)
    trained, sampler = trainer_logprobs(policy, all_episodes(after), 1.0)
    assert (trained - sampler).abs().max() < 1e-5
    for groups, version in ((before, 0), (after, 7)):
        turns = [turn for episode in all_episodes(groups) for turn in episode.turns]
        assert {each for turn in turns for each in turn.policy_versions} == {version}


async def test_all_episodes_may_fail_at_reset():
    def fails(seed, number, action):
        raise SessionClosedError("no")

    groups = await asyncio.wait_for(collect(tiny_policy(), host=FakeHost(fails)), WAIT_S)
    assert {episode.status for episode in all_episodes(groups)} == {Status.ERROR}


@pytest.mark.parametrize("error", [EngineError("out of memory"), RuntimeError("a bug")])
async def test_an_error_of_the_engine_ends_the_rollout_batch(error, monkeypatch):
    policy = tiny_policy()
    engine = local_engine(policy)
    calls = 0
    step = FastForward.step

    def failing_step(*args):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise error
        return step(*args)

    monkeypatch.setattr(FastForward, "step", failing_step)
    with pytest.raises(type(error), match=str(error)):
        await asyncio.wait_for(collect(policy, engine=engine), WAIT_S)


async def test_an_error_of_the_host_ends_the_rollout_batch():
    """No other episode may go on waiting in the engine."""

    def dies(seed, number, action):
        if (seed, number) == (1, 1):
            raise HostError("gone for good")
        return play(seed, number, action)

    policy = tiny_policy(ends=True)
    engine = local_engine(policy)
    with pytest.raises(HostError):
        await asyncio.wait_for(collect(policy, engine=engine, host=FakeHost(dies)), WAIT_S)
    again = await asyncio.wait_for(collect(policy, engine=engine), WAIT_S)
    assert sampled(again) == sampled(await collect(policy))


async def test_more_requests_than_a_batch_waits_for_are_an_error():
    """Of one episode, while another request of it waits or is sampled: it would never end, or
    use the cache's row at the same time."""
    engine = local_engine(tiny_policy())
    engine.begin_rollouts(2, 2)
    waiting = asyncio.create_task(engine.generate(request(0, [5])))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match=r"2 requests at once.*num_concurrent=1.*is_exact"):
        await engine.generate(request(0, [6]))
    await asyncio.wait_for(engine.generate(request(1, [5])), WAIT_S)
    assert len((await asyncio.wait_for(waiting, WAIT_S)).token_ids) == 10


class SlowExecutor(Executor):
    """Signals when a batch of the engine is submitted, and runs nothing before `run_all`."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.submitted = []

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        self.submitted.append((future, function, args))
        self.begun.set()
        return future

    def run_all(self) -> None:
        submitted, self.submitted = self.submitted, []
        for future, function, args in submitted:
            if future.set_running_or_notify_cancel():
                future.set_result(function(*args))


async def test_a_cancelled_rollout_batch_ends_and_leaves_the_engine_usable():
    """After Ctrl-C during a batch, that batch cannot change the next rollout batch."""
    policy = tiny_policy(ends=True)
    executor = SlowExecutor()
    engine = LocalEngine(policy, max_episodes=64, executor=executor)
    collection = asyncio.ensure_future(collect(policy, engine=engine))
    await asyncio.wait_for(executor.begun.wait(), WAIT_S)
    collection.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(collection, WAIT_S)

    executor.begun.clear()
    again = asyncio.ensure_future(collect(policy, engine=engine))
    await asyncio.wait_for(executor.begun.wait(), WAIT_S)
    while not again.done():
        executor.run_all()
        await asyncio.sleep(0)
    assert sampled(await again) == sampled(await collect(policy))


async def test_only_new_tokens_are_computed(monkeypatch):
    """Of each prompt, the engine computes what follows the cached tokens: the last sampled one,
    which no forward pass has read, and the turn's own."""
    policy = tiny_policy(ends=True)
    fed, feed = [], FastForward.feed

    def counted_feed(forward, new_ids, *rest):
        fed.append(sum(map(len, new_ids)))
        return feed(forward, new_ids, *rest)

    monkeypatch.setattr(FastForward, "feed", counted_feed)
    engine = RecordingEngine(local_engine(policy))
    episodes = all_episodes(await collect(policy, engine=engine))
    for number, episode in enumerate(episodes):
        ids: list[int] = []
        for (asked, completion), turn in zip(engine.calls[number], episode.turns, strict=True):
            assert asked.prompt_ids == [*ids, *turn.prompt_ids]
            ids = [*asked.prompt_ids, *completion.token_ids]
    turns = [turn for episode in episodes for turn in episode.turns]
    num_continued = len(turns) - len(episodes)
    assert num_continued > len(episodes)
    assert sum(fed) == sum(len(turn.prompt_ids) for turn in turns) + num_continued


async def test_a_prompt_uses_what_is_cached_of_it_and_no_more(monkeypatch):
    """Equal, shorter, changed and unrelated prompts give what they give without a cache."""
    policy = tiny_policy()
    fed, feed = [], FastForward.feed

    def recorded_feed(forward, new_ids, starts, *rest):
        fed.append((starts, [list(ids) for ids in new_ids]))
        return feed(forward, new_ids, starts, *rest)

    monkeypatch.setattr(FastForward, "feed", recorded_feed)
    prompts = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7], [5, 6, 9, 8, 7], [9, 9], [9]]
    requests = [request(0, prompt, seed=n, max_tokens=4) for n, prompt in enumerate(prompts)]
    completions = await generate_alone(policy, *requests)
    assert fed == [
        ([0], [[5, 6, 7, 8]]),
        ([3], [[8]]),
        ([2], [[7]]),
        ([2], [[9, 8, 7]]),
        ([0], [[9, 9]]),
        ([0], [[9]]),
    ]
    for each, completion in zip(requests, completions, strict=True):
        (alone,) = await generate_alone(policy, each)
        assert completion.token_ids == alone.token_ids
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


async def test_an_engine_that_lost_its_cache_samples_the_same():
    """A request contains all that its completion depends on."""
    policy = tiny_policy(ends=True)
    engine = RecordingEngine(local_engine(policy))
    await collect(policy, engine=engine)
    last = [calls[-1] for calls in engine.calls.values()]
    assert max(asked.num_sampled for asked, _ in last) > 0
    for asked, completion in last:
        (alone,) = await generate_alone(policy, dataclasses.replace(asked, episode=0))
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=1e-5)


@pytest.mark.parametrize("kind", [LocalEngine, EagerEngine])
async def test_a_forward_pass_is_freed_before_that_of_the_next_rollout_batch_is_made(
    kind, monkeypatch
):
    """Its cache and its copy of the weights, without waiting for the garbage collector."""
    policy, made, freed = tiny_policy(), [], []
    make = policy.row_forwards

    def row_forwards(num):
        freed.append([each() is None for each in made])
        forwards = make(num)
        made.extend(map(weakref.ref, forwards))
        return forwards

    monkeypatch.setattr(policy, "row_forwards", row_forwards)
    engine = kind(policy, max_episodes=2, executor=InlineExecutor())
    gc.disable()
    try:
        engine.begin_rollouts(2, 2)
        await generate(engine, [request(0, [5]), request(1, [6])])
        await asyncio.sleep(0)  # until callbacks of the batch have run
        engine.begin_rollouts(1, 1)
        await generate(engine, [request(2, [5])])
    finally:
        gc.enable()
    assert freed == [[], [True], [True, True]]


async def test_an_update_frees_the_caches_unless_episodes_are_played_meanwhile():
    engine = local_engine(tiny_policy())
    gc.disable()
    try:
        engine.begin_rollouts(1, 1)
        await generate(engine, [request(0, [5])])
        await asyncio.sleep(0)  # until callbacks of the batch have run
        cache = weakref.ref(engine._batches[""][0]._forward)
        await engine.begin_update(idle=False)
        assert cache() is not None
        await engine.begin_update(idle=True)
        assert cache() is None
    finally:
        gc.enable()


async def test_concurrent_requests_of_an_episode_are_sampled_in_its_batch():
    """Each has the tokens of its prompt and seed alone, wherever it is in the cache."""
    policy = tiny_policy(ends=True)
    prompts = [[5, 6, 7], [8, 9], [5, 6, 9]]
    engine = local_engine(policy)
    engine.begin_rollouts(2, 2)
    other = asyncio.create_task(engine.generate(request(1, [3, 4])))
    rounds = []
    for number in range(2):
        concurrent = [
            dataclasses.replace(request(0, prompt, seed=10 * number + place), num_concurrent=3)
            for place, prompt in enumerate(prompts[number:] + prompts[:number])
        ]
        waiting = [asyncio.create_task(engine.generate(each)) for each in concurrent[:2]]
        await asyncio.sleep(0)
        assert not any(each.done() for each in waiting), "the third request is awaited"
        last = engine.generate(concurrent[2])
        rounds.append(await asyncio.wait_for(asyncio.gather(*waiting, last), WAIT_S))
        await asyncio.wait_for(other, WAIT_S)
        other = asyncio.create_task(engine.generate(request(1, [3])))
    other.cancel()
    assert len(engine._batches[""][0]._rows) == 4, "all concurrent requests have rows"
    for number, found in enumerate(rounds):
        for place, prompt in enumerate(prompts[number:] + prompts[:number]):
            alone = request(0, prompt, seed=10 * number + place)
            (plain,) = await generate_alone(policy, alone)
            assert found[place].token_ids == plain.token_ids
    # One of the three continues the cached prompt, and one row of the episode stays.
    await generate(engine, [request(0, prompts[0]), request(1, [3, 4])])
    assert [row.episode for row in engine._batches[""][0]._rows] == [0, 1]
