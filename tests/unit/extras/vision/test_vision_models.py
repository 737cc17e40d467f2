"""Vision-language models: images in prompts, in the engine and in the learner."""

import io
import json
from dataclasses import replace

import PIL.Image
import pytest
import torch
from fakes import (
    CPU,
    FakeHost,
    RecordingEngine,
    all_episodes,
    assert_same_update,
    collect,
    local_engine,
    loss_and_gradients,
    run_config,
)
from test_safetensors_only import hub_model
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_models import ADAPTER, image, play, samples_of, trained_logprobs, write_vision_model

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.engines.scripted import ScriptedEngine
from openenv_pipe.errors import ConfigError, TrainingError
from openenv_pipe.extras.vision.policy import VisionForward, VisionPolicy
from openenv_pipe.learner.checkpoint import load_weights, save_weights
from openenv_pipe.learner.supervised import WarmStart
from openenv_pipe.models.forward.forward_check import check_forward
from openenv_pipe.models.load import build_empty, check_architecture, load_chat, load_policy
from openenv_pipe.models.tiny import build_tokenizer
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.types import IMAGE_IDS

KINDS = ("qwen2_vl", "qwen2_5_vl")
MARKUP = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("model"))


def vision_policy(folder, lora_rank=0) -> VisionPolicy:
    """Load a policy that ends its turns, with an adapter that has an effect."""
    policy = load_policy(hub_model(folder, lora_rank), seed=0, device=CPU)
    torch.manual_seed(1)
    for name, values in policy.trained_parameters():
        if "lora_B" in name:
            values.data.normal_(std=0.3)
    embeddings = policy.model.get_input_embeddings().weight.data
    embeddings[:, 0] = 1.0
    embeddings[policy.chat.ends.usual, 0] = 3.5
    assert check_forward(policy) == VisionPolicy.padding_reason
    return policy


async def played(policy):
    config = run_config({"env.adapter": ADAPTER, "env.max_episode_tokens": 400})
    return await collect(policy, config=config, host=FakeHost(play), num_tasks=4)


@pytest.mark.parametrize("lora_rank", [0, 2])
async def test_sampler_and_trainer_agree_on_images(folder, lora_rank):
    policy = vision_policy(folder, lora_rank)
    groups = await played(policy)
    samples = samples_of(groups)
    assert {len(episode.turns) for episode in all_episodes(groups)} == {2}
    assert {len(sample.images) for sample in samples} == {2, 3}
    batch = pack(samples, share=False)
    assert len(batch.logprobs) > 60
    assert (trained_logprobs(policy, samples) - batch.logprobs).abs().max() < 1e-4
    for sample in samples:  # The test would notice other images of the same size.
        sample.images = {
            name: image(99, each["width"], each["height"]) for name, each in sample.images.items()
        }
    assert (trained_logprobs(policy, samples) - batch.logprobs).abs().max() > 1e-2


def own_inputs(policy, sample):
    """Return what the model's own processor and transformers make of a sample's tokens."""
    ids = torch.tensor([sample.token_ids])
    is_image = ids >= IMAGE_IDS
    shown, before = [], 0
    for each in sample.token_ids:
        if each >= IMAGE_IDS and each != before:
            shown.append(PIL.Image.open(io.BytesIO(sample.images[each].png)).convert("RGB"))
        before = each
    processor = policy.images._processor
    made = processor(images=shown, return_tensors="pt")
    placeholder = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {
        "input_ids": ids.masked_fill(is_image, placeholder),
        "mm_token_type_ids": is_image.int(),
        **made,
    }


async def test_gradients_are_those_of_transformers_own_forward_pass(folder):
    """Of all weights, those that read images included."""
    policy = vision_policy(folder)
    placeholder = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    samples = [
        each for each in samples_of(await played(policy)) if placeholder not in each.token_ids
    ][:3]
    parameters = [values for _, values in policy.trained_parameters()]
    total = 0.0
    for sample in samples:
        logits = policy.model(**own_inputs(policy, sample)).logits[0, :-1]
        targets = torch.tensor(sample.token_ids[1:]).clamp(max=logits.shape[-1] - 1)
        chosen = torch.tensor(sample.loss_mask[1:])
        logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        total = total + logprobs[chosen].sum()
    expected = torch.autograd.grad(total, parameters, allow_unused=True)
    ours = policy.logprobs(pack(samples, share=False), 1.0)[0].sum()
    assert ours.item() == pytest.approx(total.item(), abs=1e-4)
    policy.model.zero_grad()
    ours.backward()
    named = policy.trained_parameters()
    assert any(name.startswith("model.visual") for name, _ in named)
    for (name, values), gradient in zip(named, expected, strict=True):
        assert values.grad.abs().max() > 0, name
        assert (values.grad - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-7, name


async def test_the_split_into_batches_changes_nothing(qwen2):
    policy = vision_policy(qwen2)
    samples = samples_of(await played(policy))
    one = loss_and_gradients(policy, samples, {"tokens_per_batch": 10_000})
    assert_same_update(one, loss_and_gradients(policy, samples, {"tokens_per_batch": 150}))


@pytest.mark.parametrize(
    ("changes", "bound"),
    [({"activation_checkpointing": True}, 1e-4), ({"autocast": "bfloat16"}, 0.2)],
)
async def test_other_ways_to_compute(qwen2, changes, bound):
    """Checkpointed activations give the same gradients, and bfloat16 agrees as far as it can."""
    model = hub_model(qwen2).model_copy(update=changes)
    policy = load_policy(model, seed=0, device=CPU)
    assert check_forward(policy) == VisionPolicy.padding_reason
    samples = samples_of(await played(policy))
    batch = pack(samples, share=False)
    assert (trained_logprobs(policy, samples) - batch.logprobs).abs().max() < bound
    if "activation_checkpointing" in changes:
        plain = load_policy(hub_model(qwen2), seed=0, device=CPU)
        assert_same_update(loss_and_gradients(plain, samples), loss_and_gradients(policy, samples))


async def test_demonstrations_show_images_too(qwen2):
    """A scripted policy's episodes, from which the warm start learns, have the same prompts."""
    policy = vision_policy(qwen2)
    config = run_config({"env.adapter": ADAPTER, "env.max_episode_tokens": 400})
    scripted = ScriptedEngine(lambda observations, random: "yes")
    groups = await collect(policy, config=config, host=FakeHost(play), num_tasks=2, engine=scripted)
    prompts = [each.turns[0].prompt_ids for each in all_episodes(groups)]
    assert prompts == [each.turns[0].prompt_ids for each in all_episodes(await played(policy))][:4]
    settings = config.trainer.warm_start.model_copy(update={"steps": 5, "episodes_per_step": 4})
    warm_start = WarmStart(policy, settings, tokens_per_batch=200, seed=0)
    losses = [warm_start.step(samples_of(groups))["loss/supervised"] for _ in range(5)]
    assert losses[-1] < losses[0]


async def test_a_twin_and_a_second_rollout_batch_sample_the_same(qwen2):
    policy = vision_policy(qwen2)
    first, again = await played(policy), await played(policy.twin())
    ids = [
        [turn.completion_ids for e in all_episodes(g) for turn in e.turns] for g in (first, again)
    ]
    assert ids[0] == ids[1]


async def test_a_prompt_that_repeats_a_part_of_the_cached_one_is_sampled_as_if_alone(qwen2):
    """The cache knows the next position after all its images only. Such a prompt comes from an
    environment that does not repeat itself on another rollout worker."""
    policy = vision_policy(qwen2)
    engine = RecordingEngine(local_engine(policy))
    config = run_config({"env.adapter": ADAPTER, "env.max_episode_tokens": 400})
    await collect(policy, engine=engine, config=config, host=FakeHost(play), num_tasks=1)
    asked, completion = engine.calls[0][0]
    shown = [index for index, each in enumerate(asked.prompt_ids) if each >= IMAGE_IDS]
    assert len(shown) > 1
    whole = [*asked.prompt_ids, *completion.token_ids, 5, 6]
    cuts = (shown[0], shown[-1] + 1, len(asked.prompt_ids))
    prompts = [whole, *([*asked.prompt_ids[:cut], 7, 8, 9] for cut in cuts)]
    first, *others = (replace(asked, prompt_ids=each, seed=n) for n, each in enumerate(prompts))
    for other in others:
        found = []
        for requests in ([first, other], [other]):
            alone = local_engine(policy)
            alone.begin_rollouts(1, 1)
            found.append([await alone.generate(each) for each in requests][-1])
        assert found[0].token_ids == found[1].token_ids
        assert found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-5)


async def test_a_reply_with_the_placeholder_is_plain_text(qwen2):
    """A model may sample the placeholder's token, which then stands for no image."""
    policy = vision_policy(qwen2)
    placeholder = policy.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    embeddings = policy.model.get_input_embeddings().weight.data
    embeddings[placeholder] = embeddings[policy.chat.ends.usual] * 0.95
    samples = samples_of(await played(policy))
    assert any(placeholder in each.token_ids for each in samples)
    batch = pack(samples, share=False)
    assert (trained_logprobs(policy, samples) - batch.logprobs).abs().max() < 1e-4


def test_prompts_are_those_of_the_models_own_processor(qwen2):
    chat = load_chat(hub_model(qwen2))
    one, two = image(1), image(2, 40, 9)
    notes = ["[image 1: 24 x 16 pixels]", "[image 2: 40 x 9 pixels]"]
    content = f"left {notes[1]} and right {notes[0]}?"
    message = {
        "role": "user",
        "content": content,
        "images": dict(zip(notes, (one, two), strict=True)),
    }
    ids = chat.first_ids([message])
    processor = Qwen2VLImageProcessorPil.from_pretrained(qwen2)
    text = content
    for note, each in zip(notes, (one, two), strict=True):
        file = PIL.Image.open(io.BytesIO(each.png))
        num = int(processor(images=[file])["image_grid_thw"].prod()) // 4
        text = text.replace(note, note + MARKUP.replace("<|image_pad|>", "<|image_pad|>" * num))
    expected = build_tokenizer_of(qwen2)(f"<|user|>{text}<|assistant|>")["input_ids"]
    placeholder = chat.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [placeholder if each >= IMAGE_IDS else each for each in ids] == expected
    shown = [each for each in ids if each >= IMAGE_IDS]
    assert list(dict.fromkeys(shown)) == [two.token_id, one.token_id]
    assert chat.following_ids([message], end=chat.ends.usual)[-len(ids) :] == ids
    assert chat.first_ids([{**message, "images": {notes[0]: two}}]) != ids


def build_tokenizer_of(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_an_environment_cannot_forge_a_image(qwen2):
    chat = load_chat(hub_model(qwen2))
    note = "[image 1: 24 x 16 pixels]"
    message = {"role": "user", "content": f"{MARKUP}{note}", "images": {note: image(1)}}
    ids = chat.first_ids([message])
    assert len(set(ids) & set(chat.tokenizer.convert_tokens_to_ids(["<|image_pad|>"]))) == 0
    assert sum(each >= IMAGE_IDS for each in ids) == 6


def test_a_very_narrow_image_is_its_note_alone(qwen2):
    chat = load_chat(hub_model(qwen2))
    note = "[image 1: 2 x 401 pixels]"
    message = {"role": "user", "content": note, "images": {note: image(1, 2, 401)}}
    assert chat.first_ids([message]) == chat.first_ids([{"role": "user", "content": note}])


async def test_recorded_episodes_have_the_same_samples(qwen2, tmp_path):
    policy = vision_policy(qwen2)
    groups = await played(policy)
    (tmp_path / "episodes").mkdir()
    write_episodes(episodes_path(tmp_path, 1), groups)
    samples, read = samples_of(groups), samples_of(read_episodes(episodes_path(tmp_path, 1)))
    assert [each.token_ids for each in samples] == [each.token_ids for each in read]
    assert torch.equal(trained_logprobs(policy, samples), trained_logprobs(policy, read))
    groups[0].episodes[0].first_observation = {}
    with pytest.raises(TrainingError, match="are in none of its observations"):
        samples_of(groups)


def test_adapters_are_for_the_language_model_alone(qwen2):
    names = [name for name, _ in vision_policy(qwen2, lora_rank=2).trained_parameters()]
    assert names and all("lora_" in name and ".language_model." in name for name in names)


@pytest.mark.parametrize("lora_rank", [0, 2])
async def test_a_checkpoint_is_a_folder_of_transformers(folder, lora_rank, tmp_path):
    policy = vision_policy(folder, lora_rank)
    save_weights(tmp_path, policy, steps=1, warm_start_steps=0)
    samples = samples_of(await played(policy))
    other = load_policy(hub_model(folder, lora_rank), seed=0, device=CPU)
    if lora_rank:
        other.model.get_input_embeddings().weight.data.copy_(
            policy.model.get_input_embeddings().weight.data
        )
    load_weights(tmp_path, other)
    assert torch.equal(trained_logprobs(policy, samples), trained_logprobs(other, samples))
    saved = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert saved.to_dict() == Qwen2VLImageProcessorPil.from_pretrained(folder).to_dict()
    if not lora_rank:
        model = AutoModelForImageTextToText.from_pretrained(tmp_path)
        assert type(model) is type(policy.model)


def test_a_forward_pass_with_wrong_positions_is_rejected(qwen2, monkeypatch):
    policy = load_policy(hub_model(qwen2), seed=0, device=CPU)

    def positions_of(token_ids, images):
        return torch.arange(token_ids.shape[1]).expand(3, len(token_ids), -1).clone()

    monkeypatch.setattr(policy, "positions_of", positions_of)
    with pytest.raises(ConfigError, match=r"the learner's \(with images\) forward pass differs"):
        check_forward(policy)
    monkeypatch.undo()
    monkeypatch.setattr(VisionForward, "step", lambda self, ids, at: self.feed([[1]], at.tolist()))
    with pytest.raises(ConfigError, match="forward pass differs"):
        check_forward(policy)


REJECTED = {
    "model.history": ("rerender", "model.history=rerender: not supported with vision-language"),
    "trainer.devices": (2, "trainer.devices=2: not supported with vision-language"),
}


@pytest.mark.parametrize("key", REJECTED)
def test_what_is_not_supported_is_rejected(qwen2, key):
    value, message = REJECTED[key]
    with pytest.raises(ConfigError, match=message):
        check_architecture(
            run_config({"model": hub_model(qwen2).model_dump(mode="json"), key: value})
        )


def test_other_vision_language_models_are_rejected(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    for load in (lambda config: load_policy(config, seed=0, device=CPU), build_empty):
        with pytest.raises(ConfigError, match=r"vision-language model .*\(qwen2_vl, qwen2_5_vl\)"):
            load(hub_model(tmp_path))


def test_without_its_image_processor_a_model_is_rejected(qwen2, tmp_path):
    (tmp_path / "config.json").write_text((qwen2 / "config.json").read_text())
    build_tokenizer_of(qwen2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be loaded.*preprocessor_config.json"):
        load_chat(hub_model(tmp_path))


def test_without_the_extra_these_models_are_rejected_as_others(qwen2, monkeypatch):
    monkeypatch.setattr("openenv_pipe.models.vision.extras", lambda: ())
    with pytest.raises(ConfigError, match=r"vision-language model .*\(none\)"):
        load_policy(hub_model(qwen2), seed=0, device=CPU)
