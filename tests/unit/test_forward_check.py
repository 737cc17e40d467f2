"""The forward passes of sampling and training agree with the model's own, or the model is
rejected."""

import pytest
import torch
from fakes import (
    assert_same_update,
    loss_and_gradients,
    random_samples,
    run_config,
    tiny_policy,
)

from openenv_pipe.errors import ConfigError
from openenv_pipe.learner import devices
from openenv_pipe.models.forward import forward_check
from openenv_pipe.models.forward.attention.packed import PackedRow
from openenv_pipe.models.forward.forward_check import UNPROBED, check_forward
from openenv_pipe.models.forward.forward_probe import build_probe
from openenv_pipe.models.forward.own_logprobs import own_logprobs
from openenv_pipe.models.forward.row_forward import RaggedCache, Sampler
from openenv_pipe.models.load import load_policy
from openenv_pipe.pipeline.loading import load_checked
from tests.families import DEEPSEEK, family_policy, family_run, make_family


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_tiny_model_passes(lora_rank, autocast):
    policy = tiny_policy(lora_rank=lora_rank, autocast=autocast)
    assert check_forward(policy) is None
    assert policy.packs_rows


@pytest.mark.parametrize("scale", [0.5, float("nan")])
def test_an_architecture_that_scales_its_logits_is_rejected(scale):
    """Granite, Cohere and Gemma scale or cap their logits after the head."""
    policy = tiny_policy()
    policy.model.register_forward_hook(
        lambda module, args, output: output.__setitem__("logits", output.logits * scale)
    )
    with pytest.raises(ConfigError, match="the learner's"):
        check_forward(policy)


def test_a_decoder_that_the_fast_pass_does_not_implement_is_sampled_with_its_own_modules():
    policy = tiny_policy()
    layer = policy.decoder.layers[0].mlp
    layer.register_forward_hook(lambda module, args, output: 3 * output)
    assert policy.sampler is Sampler.FAST
    check_forward(policy)
    assert policy.sampler is Sampler.RAGGED
    assert "differs from the model's own by" in policy.left_out[Sampler.FAST]


def test_a_decoder_whose_cache_is_inexact_is_sampled_without_one():
    policy = tiny_policy()
    policy.sampler = Sampler.RAGGED
    decoder = policy.model.get_decoder()

    def forget_the_past(module, args, kwargs):
        if kwargs["use_cache"]:
            mask = kwargs["attention_mask"].clone()
            mask[..., 0] = 0
            kwargs["attention_mask"] = mask
        return args, kwargs

    decoder.register_forward_pre_hook(forget_the_past, with_kwargs=True)
    check_forward(policy)
    assert policy.sampler is Sampler.WHOLE
    for skipped in (Sampler.RAGGED, Sampler.PLAIN, Sampler.PLAIN_EQUAL):
        assert "differs from the model's own by" in policy.left_out[skipped]


def change_masks(monkeypatch, change):
    """Let `change(mask, positions)` change the masks of attention in the ragged cache."""
    write_at = RaggedCache.write_at

    def changed(cache, positions):
        mask = write_at(cache, positions)
        change(mask, positions)
        return mask

    monkeypatch.setattr(RaggedCache, "write_at", changed)


def test_a_decoder_that_no_sampler_agrees_with_is_rejected(monkeypatch):
    def forget(mask, positions):
        mask[..., 0] &= positions[:, None] == 0

    change_masks(monkeypatch, forget)
    policy = tiny_policy()
    policy.sampler = Sampler.RAGGED
    policy.samplers = (Sampler.RAGGED,)
    with pytest.raises(ConfigError, match=r"engine=local's forward pass differs .* by \d"):
        check_forward(policy)


def policy_in_bfloat16(tmp_path, name, **options):
    model = family_run(make_family(tmp_path, name, **options)).model
    model = model.model_copy(update={"dtype": "bfloat16", "autocast": "bfloat16"})
    policy = load_policy(model, seed=0, device=torch.device("cpu"))
    policy.sampler = Sampler.RAGGED
    return policy


def test_in_bfloat16_one_hidden_token_is_no_rounding(tmp_path, monkeypatch):
    """The limit is three times the rounding of the model's own pass. SmolLM2-135M differs by 0.75
    nats where 3.2 are allowed, and by 4.9 without the fifth of forty tokens."""
    policy = policy_in_bfloat16(tmp_path, "LlamaConfig")
    check_forward(policy)
    assert policy.sampler is Sampler.RAGGED

    def hide_the_fifth(mask, positions):
        mask[..., 4:5] &= positions[:, None, :, None] <= 4

    change_masks(monkeypatch, hide_the_fifth)
    check_forward(policy)
    assert policy.sampler is Sampler.PLAIN
    assert "differs from the model's own by" in policy.left_out[Sampler.RAGGED]


@pytest.mark.parametrize(
    ("name", "options"),
    [("LlamaConfig", {"initializer_range": 0.8}), ("DeepseekV3Config", DEEPSEEK)],
)
def test_in_bfloat16_a_model_is_trained_that_rounds_by_nats(tmp_path, name, options):
    """Wide weights, and experts that rounding chooses: what differs is not attention."""
    policy = policy_in_bfloat16(tmp_path, name, **options)
    before = {key: values.clone() for key, values in policy.model.state_dict().items()}
    with torch.inference_mode():
        expected, _ = own_logprobs(policy, build_probe(40))
    assert expected.largest > 1  # of a mixture: infinite
    check_forward(policy)
    assert policy.sampler is Sampler.RAGGED
    after = policy.model.state_dict()
    assert all(torch.equal(after[key], values) for key, values in before.items())
    assert all(after[key].dtype is values.dtype for key, values in before.items())


def test_in_bfloat16_one_row_of_a_mixture_with_a_hidden_token_is_no_rounding(tmp_path, monkeypatch):
    policy = policy_in_bfloat16(tmp_path, "DeepseekV3Config", **DEEPSEEK)

    def hide_the_second_turn(mask, positions):
        if positions.shape[1] > 1 and positions.min() > 0:
            mask[..., :5] = False

    change_masks(monkeypatch, hide_the_second_turn)
    check_forward(policy)
    assert policy.sampler is Sampler.PLAIN
    assert "by a median of" in policy.left_out[Sampler.RAGGED]


@pytest.mark.parametrize("name", ["MistralConfig", "MixtralConfig"])
def test_in_bfloat16_a_window_that_packed_rows_ignore_is_no_rounding(tmp_path, name, monkeypatch):
    """Four targets in ten are beyond a window of 128 tokens, so that the median of all is not."""
    policy = policy_in_bfloat16(tmp_path, name, sliding_window=128)
    init = PackedRow.__init__

    def without_length(row, nodes, device, length, read=None):
        init(row, nodes, device, 0, read)

    monkeypatch.setattr(PackedRow, "__init__", without_length)
    check_forward(policy)
    assert not policy.packs_rows
    assert "differs from the model's own by" in policy.left_out["packed"]


def test_a_window_that_is_longer_than_what_is_compared_is_named(tmp_path, monkeypatch):
    """Its model is trained in padded rows, because packed ones may reach beyond the window."""
    monkeypatch.setattr(forward_check, "SAFE_TOKENS", 50)
    policy = family_policy(make_family(tmp_path, "MistralConfig", sliding_window=60))
    check_forward(policy)
    assert policy.left_out[UNPROBED] == (
        "windows or chunks have 60 tokens, and rows of 50 were compared"
    )
    assert not policy.packs_rows
    check_forward(policy, max_tokens=50)  # The window has no effect.
    assert UNPROBED not in policy.left_out
    assert policy.packs_rows


def test_rows_that_need_too_much_memory_are_compared_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr(forward_check, "_most_tokens", lambda policy: [80, 40])
    monkeypatch.setattr(forward_check, "SAFE_TOKENS", 40)
    policy = family_policy(make_family(tmp_path, "MistralConfig", sliding_window=30))
    own = policy.model_logits

    def model_logits(token_ids):
        if token_ids.shape[1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(token_ids)

    policy.model_logits = model_logits
    check_forward(policy)
    assert "rows of 40 were compared" in policy.left_out[UNPROBED]


def policy_whose_decoder(forward):
    """Return a policy whose decoder calls `forward(own_forward, ...)` instead of its own
    forward."""
    policy = tiny_policy()
    decoder = policy.model.get_decoder()
    decoder.forward = forward(decoder.forward)
    return policy


def with_fixed_arguments(own_forward):
    """A forward pass that takes only the usual keywords, and so no packed rows."""

    def forward(
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
    ):
        caches = {"past_key_values": past_key_values, "cache": cache}
        return own_forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{name: given for name, given in caches.items() if given is not None},
        )

    return forward


def without_packed_rows(own_forward):
    """A forward pass that takes a packed row but does not pass it on to its attention."""

    def forward(*args, packed_row=None, **kwargs):
        return own_forward(*args, **kwargs)

    return forward


def with_capped_attention(own_forward):
    """A forward pass that caps attention scores of packed rows, as Gemma 2 does."""

    def forward(*args, **kwargs):
        capped = {"softcap": 30.0} if "packed_row" in kwargs else {}
        return own_forward(*args, **kwargs, **capped)

    return forward


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (with_fixed_arguments, "Qwen3Model.forward does not take packed_row"),
        (without_packed_rows, "differ"),
        (with_capped_attention, "capped scores (softcap)"),
    ],
)
def test_a_model_that_packed_rows_do_not_fit_is_trained_in_padded_ones(forward, reason):
    """The learner tells the reason, and the update is the same as with packed rows."""
    samples = random_samples(0)
    expected = loss_and_gradients(tiny_policy(), samples)
    policy = policy_whose_decoder(forward)
    assert reason in check_forward(policy)
    assert not policy.packs_rows
    assert_same_update(loss_and_gradients(policy, samples), expected)


@pytest.mark.parametrize("error", [TypeError, ValueError, ConfigError])
def test_a_forward_pass_that_fails_in_packed_rows_is_trained_in_padded_ones(error):
    def with_a_bug(own_forward):
        def forward(*args, **kwargs):
            if "packed_row" in kwargs:
                raise error("a bug of the model's own")
            return own_forward(*args, **kwargs)

        return forward

    policy = policy_whose_decoder(with_a_bug)
    assert "a bug of the model's own" in check_forward(policy)
    assert not policy.packs_rows


def test_an_error_in_every_forward_pass_names_it():
    def with_a_bug(own_forward):
        def forward(*args, use_cache=False, input_ids=None, **kwargs):
            if len(input_ids) > 1:
                raise ValueError("a bug of the model's own")
            return own_forward(*args, use_cache=use_cache, input_ids=input_ids, **kwargs)

        return forward

    with pytest.raises(ConfigError, match="a bug of the model's own"):
        check_forward(policy_whose_decoder(with_a_bug))


@pytest.mark.parametrize(
    ("reason", "unprobed", "told"),
    [
        (
            "its attention has softcap=30.0",
            None,
            "model tiny does not support packed rows (its attention has softcap=30.0)",
        ),
        (None, "windows of 9,000 tokens", "not compared in longer rows: windows of 9,000 tokens"),
    ],
)
def test_a_run_tells_that_its_samples_are_padded_or_that_rows_are_not_compared(
    reason, unprobed, told, monkeypatch
):
    def check(policy, max_tokens):
        if unprobed:
            policy.left_out[UNPROBED] = unprobed
        return reason

    monkeypatch.setattr(devices, "check_forward", check)
    config, notes = run_config(), []
    one_device = devices.Devices(config, torch.device("cpu"))
    load_checked(config, one_device, None, notes.append)
    (note,) = notes
    assert told in note
