"""Episodes whose turns are a graph: their branches, samples and losses. Trap numbers:
tests/README.md."""

import dataclasses
import json
import zlib

import pytest
import run_samples
import torch
from fakes import (
    assert_same_update,
    loss_and_gradients,
    made_up_episode,
    made_up_turn,
    random_samples,
    run_config,
    tiny_policy,
)

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.samples import by_episode, episode_samples
from openenv_pipe.errors import RunFolderError
from openenv_pipe.extras.judges.trajectories import conversation_of
from openenv_pipe.extras.viewer.episodes.export import export_episodes
from openenv_pipe.extras.viewer.episodes.listing import Selection, find_episodes
from openenv_pipe.extras.viewer.episodes.query import TRAIN, EpisodeFilter
from openenv_pipe.extras.viewer.web.tokens import tokens_of
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.rollout.metrics import summarise_groups
from openenv_pipe.runs.episodes import (
    RecordedEpisode,
    episodes_path,
    read_episodes,
    write_episodes,
)
from openenv_pipe.runs.packed_lines import GZIP
from openenv_pipe.runs.transcript import branch_notes, transcript
from openenv_pipe.types import Group, Status, TurnRole

NORMALISERS = ["sample", "token", "constant"]


def branched_episode(**fields):
    """A main branch 0-1-3, a retry 2 in the place of 1, a title 4, and a compaction 5."""
    turns = [
        made_up_turn([10, 11], [12]),
        made_up_turn([13], [14, 15], parent=0),
        made_up_turn([13], [16], parent=0, role=TurnRole.RETRY),
        made_up_turn([17], [18], parent=1),
        made_up_turn([20], [21], parent=None, role=TurnRole.AUXILIARY),
        made_up_turn([30, 31], [32, 33], parent=None),
    ]
    return made_up_episode(turns=turns, **fields)


def test_turns_that_say_nothing_continue_each_other():
    episode = made_up_episode(turns=[made_up_turn([1], [2])] * 3)
    assert episode.parents == [None, 0, 1]
    assert episode.branches == [[0, 1, 2]]
    assert made_up_episode(turns=[made_up_turn([1], [2])]).branches == [[0]]


def test_branches_are_paths_from_roots_to_ends():
    episode = branched_episode()
    assert episode.branches == [[0, 2], [0, 1, 3], [4], [5]]
    assert episode.num_tokens == 16


def test_the_order_of_turns_does_not_matter_to_branches():
    turns = [made_up_turn([3], [4], parent=1), made_up_turn([1], [2], parent=None)]
    assert made_up_episode(turns=turns).branches == [[1, 0]]


def test_each_token_of_the_agent_is_trained_once_and_no_other():
    """Trap 8: retries and auxiliary calls are in no loss."""
    samples = episode_samples("g", branched_episode(member=3), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [sample.token_ids for sample in samples] == [
        [10, 11, 12, 13, 14, 15, 17, 18],
        [30, 31, 32, 33],
    ]
    assert [sample.advantages for sample in samples] == [
        [0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 0.0, 4.0],
        [0.0, 0.0, 6.0, 6.0],
    ]
    for sample in samples:
        assert sample.loss_mask == [value > 0 for value in sample.advantages]
        assert sample.logprobs == [-1.0 * chosen for chosen in sample.loss_mask]
        assert (sample.group, sample.member, sample.num_episode_tokens) == ("g", 3, 6)
    assert by_episode(samples) == [samples]


def test_a_turn_on_several_paths_is_trained_in_the_first_of_them():
    turns = [
        made_up_turn([1], [2]),
        made_up_turn([3], [4], parent=0),
        made_up_turn([5], [6], parent=0),
    ]
    first, second = episode_samples("g", made_up_episode(turns=turns), [1.0] * 3)
    assert (first.token_ids, second.token_ids) == ([1, 2, 3, 4], [1, 2, 5, 6])
    assert first.loss_mask == [False, True, False, True]
    assert second.loss_mask == [False, False, False, True]


def test_an_agent_below_a_retry_is_trained_and_the_retry_is_its_context():
    turns = [made_up_turn([1], [2], role=TurnRole.RETRY), made_up_turn([3], [4])]
    (sample,) = episode_samples("g", made_up_episode(turns=turns), [1.0] * 2)
    assert sample.loss_mask == [False, False, False, True]


def test_an_episode_without_turns_of_the_agent_gives_no_sample():
    turns = [made_up_turn([1], [2], role=TurnRole.AUXILIARY)]
    assert episode_samples("g", made_up_episode(turns=turns), [1.0]) == []


# --- the loss -----------------------------------------------------------------------------------


def cut_in_two(sample):
    """Return two samples of one episode that train the same tokens as one sample."""
    trained = [place for place, chosen in enumerate(sample.loss_mask) if chosen]
    middle = trained[len(trained) // 2]

    def half(kept, end):
        return dataclasses.replace(
            sample,
            token_ids=sample.token_ids[:end],
            loss_mask=[chosen and place in kept for place, chosen in enumerate(sample.loss_mask)][
                :end
            ],
            logprobs=sample.logprobs[:end],
            advantages=sample.advantages[:end],
        )

    return [half(range(middle), middle), half(range(middle, 10**6), len(sample.token_ids))]


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_an_episode_weighs_the_same_in_one_sample_and_in_several(normaliser):
    """Trap 10: also where its samples are in batches of their own."""
    policy = tiny_policy()
    samples = [sample for sample in random_samples(3, 5) if sum(sample.loss_mask) > 1]
    apart = [half for sample in samples for half in cut_in_two(sample)]
    assert [len(each) for each in by_episode(apart)] == [2] * len(samples)
    changes = {"loss.normalise": normaliser}
    whole = loss_and_gradients(policy, samples, changes)
    assert_same_update(whole, loss_and_gradients(policy, apart, changes))
    small = changes | {"tokens_per_batch": 8}
    assert_same_update(whole, loss_and_gradients(policy, apart[::-1], small))


def test_batches_know_how_many_tokens_the_episode_of_a_token_has():
    samples = episode_samples("g", branched_episode(), [1.0] * 6)
    assert pack(samples, share=True).episode_tokens.tolist() == [6.0] * 6
    assert torch.is_floating_point(pack(samples[:1], share=False).episode_tokens)


def test_the_warm_start_draws_whole_episodes():
    samples = [
        sample
        for member in range(3)
        for sample in episode_samples("g", branched_episode(member=member), [1.0] * 6)
    ]
    config = run_config({"trainer.warm_start.episodes_per_step": 1}).trainer.warm_start
    warm_start = WarmStart(tiny_policy(), config, tokens_per_batch=64, seed=0)
    assert [warm_start.step(samples)["tokens/trained"] for _ in range(3)] == [6, 6, 6]


# --- files --------------------------------------------------------------------------------------


def rows_of(path):
    return [json.loads(line) for line in zlib.decompress(path.read_bytes(), GZIP).splitlines()]


def write(folder, episode):
    (folder / "episodes").mkdir()
    path = episodes_path(folder, 1)
    write_episodes(path, [Group(id="0", task=episode.task, episodes=[episode])])
    return path


def test_graphs_come_back_from_files(tmp_path):
    episode = branched_episode()
    path = write(tmp_path, episode)
    assert read_episodes(path)[0].episodes == [episode]


def test_files_of_linear_episodes_say_neither_parent_nor_role(tmp_path):
    path = write(tmp_path, made_up_episode(turns=[made_up_turn([1], [2])] * 2))
    assert not {"parent", "role"} & {key for turn in rows_of(path)[0]["turns"] for key in turn}


@pytest.mark.parametrize("parents", [[0], [1], [-2], ["0"], [True], [1, 0], [None, 2, 1], [0.0]])
def test_a_file_whose_turns_lead_to_no_root_is_damaged(tmp_path, parents):
    turns = [made_up_turn([1], [2], parent=parent) for parent in parents]
    path = write(tmp_path, made_up_episode(turns=turns))
    with pytest.raises(RunFolderError, match="damaged episode"):
        read_episodes(path)


def test_a_file_with_an_unknown_role_is_damaged(tmp_path):
    path = write(tmp_path, branched_episode())
    text = zlib.decompress(path.read_bytes(), GZIP).replace(b'"auxiliary"', b'"judge"')
    path.write_bytes(zlib.compress(text, 1, GZIP))
    with pytest.raises(RunFolderError, match="judge"):
        read_episodes(path)


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_say_how_episodes_branch_where_any_can():
    linear = made_up_episode(turns=[made_up_turn([1], [2])] * 2)
    group = Group(id="0", task=linear.task, episodes=[linear])
    assert not {"episodes/branched", "turns/untrained"} & set(summarise_groups([group]))
    group.episodes.append(branched_episode(member=1))
    found = summarise_groups([group])
    assert (found["episodes/branched"], found["turns/untrained"]) == (1, 2 / 8)


# --- what people and other tools see ------------------------------------------------------------


def test_people_see_where_turns_branch_and_which_are_not_trained():
    assert branch_notes(branched_episode()) == [
        *("", "", "continues turn 1, is a retry, and not trained", "continues turn 2"),
        *("continues no other turn, is an auxiliary call, and not trained",),
        "continues no other turn",
    ]
    assert "turn 4 continues turn 2" in transcript(branched_episode())


def test_a_prompt_begins_with_the_turns_that_it_continues():
    assert branched_episode().prompt_lengths == [2, 4, 4, 7, 1, 2]


def test_tokens_that_are_not_trained_have_no_mask_in_the_viewer(tmp_path):
    recorded = RecordedEpisode(line=1, group="0", episode=branched_episode(), advantages=None)
    shown = tokens_of(recorded, None, tmp_path, trust=False)
    masked = [id for id, chosen in zip(shown["ids"], shown["mask"], strict=True) if chosen]
    assert masked == [12, 14, 15, 18, 32, 33]


def test_an_export_has_a_row_for_each_sample(tmp_path):
    run = run_samples.create(tmp_path)
    episode = branched_episode()
    group = Group(id="0", task=episode.task, episodes=[episode])
    write_episodes(episodes_path(run.path, 1), [group])
    selection = Selection(wanted=EpisodeFilter(source=TRAIN), first=None)
    path = tmp_path / "all.jsonl"
    assert export_episodes(run, find_episodes(run, selection), "jsonl", path) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    samples = episode_samples("0", episode, [1.0] * 6)
    for number, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        assert row["sample"] == number
        assert (row["token_ids"], row["loss_mask"]) == (sample.token_ids, sample.loss_mask)


def test_judges_read_the_agents_turns_only():
    shown = [each["content"] for each in conversation_of(said_by_roles())]
    assert shown == ["task", "done"]


def said_by_roles():
    said = {"task": TurnRole.AGENT, "title": TurnRole.AUXILIARY}
    turns = [
        made_up_turn([], [], messages=[{"role": "user", "content": text}], role=role, steps=[])
        for text, role in said.items()
    ]
    turns[0].reply = "done"
    return made_up_episode(turns=turns, status=Status.ANSWERED)
