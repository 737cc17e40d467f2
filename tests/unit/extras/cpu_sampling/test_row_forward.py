"""Forward passes for sampling, with their caches, against forward passes without a cache."""

import gc
import platform
import random
import weakref
from pathlib import Path

import pytest
import torch
from fakes import tiny_policy
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from openenv_pipe.extras.cpu_sampling import fast_forward, packed_decoder, row_attention
from openenv_pipe.extras.cpu_sampling.fast_forward import FastForward
from openenv_pipe.extras.cpu_sampling.row_attention import RowStore
from openenv_pipe.models.forward.row_forward import Sampler, TransformersForward
from openenv_pipe.models.policy import Policy
from openenv_pipe.system.process_settings import keep_freed_memory

BOUND = {"float32": 1e-5, "bfloat16": 0.1}  # of a logit's difference


def policy_of(kind, autocast="float32"):
    policy = tiny_policy(autocast=autocast)
    assert policy.sampler is Sampler.FAST
    if kind == "transformers":
        policy.sampler = Sampler.RAGGED
    return policy


@pytest.fixture(autouse=True)
def _small_stores(monkeypatch):
    """Let the stores of the fast pass grow several times with rows of some dozen tokens."""
    monkeypatch.setattr(row_attention, "MIN_CAPACITY", 8)


@pytest.fixture(params=["transformers", "fast"])
def kind(request):
    return request.param


class Grower:
    """Feeds random tokens to rows and compares the logits with those of an uncached pass."""

    def __init__(self, policy: Policy, num_rows: int, *, seed: int = 0, bound: float = 1e-5):
        self.policy = policy
        (self.forward,) = policy.row_forwards(1)
        self.forward.reserve_rows(num_rows)
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self._draw = random.Random(seed)
        self._bound = bound

    def add_rows(self, num_rows: int) -> None:
        self.rows += [[] for _ in range(num_rows)]
        self.forward.reserve_rows(len(self.rows))

    @torch.inference_mode()
    def feed(self, lengths: list[int]) -> None:
        """Give row r lengths[r] new tokens."""
        new = [[self._draw.randrange(5, 250) for _ in range(length)] for length in lengths]
        logits = self.forward.feed(new, [len(row) for row in self.rows])
        for row, ids in zip(self.rows, new, strict=True):
            row += ids
        self._check(logits)

    @torch.inference_mode()
    def begin(self, new: list[list[int]]) -> None:
        """Give these tokens to the rows."""
        logits = self.forward.feed(new, [len(row) for row in self.rows])
        self.rows = [row + ids for row, ids in zip(self.rows, new, strict=True)]
        self._check(logits)

    def cut(self, lengths: list[int]) -> None:
        """Forget all but the first tokens of the rows."""
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    @torch.inference_mode()
    def step(self, num_rows: int) -> None:
        """Give one token to each of the first rows."""
        ids = [self._draw.randrange(5, 250) for _ in range(num_rows)]
        lengths = [len(row) for row in self.rows[:num_rows]]
        logits = self.forward.step(torch.tensor(ids), torch.tensor(lengths))
        for row, token_id in zip(self.rows, ids, strict=False):
            row.append(token_id)
        self._check(logits)

    @torch.inference_mode()
    def copy_rows(self, sources: list[int], targets: list[int]) -> None:
        self.forward.copy_rows(sources, targets)
        copies = [list(self.rows[source]) for source in sources]
        for target, row in zip(targets, copies, strict=True):
            self.rows[target] = row

    def _check(self, logits_RV: torch.Tensor) -> None:
        for row, logits in zip(self.rows, logits_RV, strict=False):
            hidden = self.policy.hidden(torch.tensor([row]))[0, -1]
            assert (logits - self.policy.logits(hidden)).abs().max() < self._bound


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_different_lengths_equal_plain_forward_passes(kind, seed, autocast):
    """The cache grows several times."""
    draw = random.Random(seed)
    grower = Grower(policy_of(kind, autocast), 4, seed=seed, bound=BOUND[autocast])
    for _ in range(6):
        grower.feed([draw.randrange(1, 25) for _ in range(4)])
        grower.step(4)
        grower.step(draw.randrange(1, 5))
    assert max(map(len, grower.rows)) > 64
    if kind == "fast":
        assert grower.forward._rows.capacity >= 128


def test_long_rows_are_fed_in_blocks(kind, monkeypatch):
    """A block ends before its padded tokens are too many; a row that is longer is cut."""
    monkeypatch.setattr(fast_forward, "BLOCK", 16)
    grower = Grower(policy_of(kind), 6)
    grower.feed([3, 40, 1, 16, 17, 2])
    grower.feed([33, 1, 1, 1, 1, 1])
    grower.step(6)


def test_rows_can_be_added_later(kind):
    grower = Grower(policy_of(kind), 2)
    grower.feed([5, 70])
    grower.add_rows(2)
    grower.feed([1, 1, 9, 3])
    grower.step(4)


def test_rows_can_be_copied_and_exchanged(kind):
    grower = Grower(policy_of(kind), 4)
    grower.feed([5, 9, 2, 7])
    grower.copy_rows([3, 0, 1], [0, 3, 2])
    grower.step(4)
    grower.feed([1, 2, 3, 4])


@pytest.fixture
def computed(monkeypatch) -> list[list[list[int]]]:
    """The new tokens that fast passes compute, by block and piece."""
    blocks, feed_block = [], FastForward._feed_block

    def recorded(forward, store, block):
        blocks.append([list(piece.ids) for piece in block])
        return feed_block(forward, store, block)

    monkeypatch.setattr(FastForward, "_feed_block", recorded)
    return blocks


def test_rows_that_begin_with_equal_tokens_are_computed_once(computed):
    """The members of a group have equal prompts, and go on differently."""
    grower = Grower(policy_of("fast"), 5)
    grower.begin([[5, 6, 7], [8, 9], [5, 6, 7], [8, 9], [8, 9]])
    assert computed == [[[5, 6, 7], [8, 9]]]
    grower.feed([1, 2, 3, 4, 5])
    grower.step(5)


@pytest.mark.parametrize("prompts", [[[5, 6, 7]] * 5, [[5, 6], [5, 7], [6], [7], [8]]])
def test_rows_that_stay_equal_are_computed_once(computed, prompts):
    """Members of a group that do the same see the same; until one of them does something else."""
    grower = Grower(policy_of("fast"), 5)
    grower.begin(prompts)
    grower.copy_rows([0, 0], [2, 3])
    grower.begin([[9, 10, 11], [12, 13], [9, 10, 11], [9, 10, 12], [9, 10, 11]])
    others = [] if prompts[0] == prompts[4] else [[9, 10, 11]]
    assert computed[-1] == [[9, 10, 11], [12, 13], [9, 10, 12], *others]
    grower.step(5)
    grower.cut([len(row) - 2 for row in grower.rows])
    grower.begin([[14] * 12] * 5)
    assert len(computed[-1]) == 2 + len(others)
    grower.feed([1, 2, 3, 4, 5])


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_rows_with_equal_prefixes_go_on_as_all_others(kind, autocast):
    """They are exchanged, cut before the end of what they share, and begun again."""
    grower = Grower(policy_of(kind, autocast), 7, bound=BOUND[autocast])
    grower.begin([[5, 6, 7] * 30, [8, 9], [5, 6, 7] * 30, [8, 9], [8, 9], [4], [5, 6, 7] * 30])
    grower.step(7)
    grower.feed([3, 1, 40, 1, 2, 70, 1])
    grower.copy_rows([0, 6, 1], [6, 0, 3])
    grower.step(4)
    grower.cut([5, 2, 92, 1, 2, 3, 80])
    grower.feed([1, 5, 2, 3, 30, 1, 1])
    grower.step(7)
    grower.cut([0, 0, len(grower.rows[2]), 2, 0, 1, 80])
    others = [[7] * 3, [7] * 3, [3, 4], [5], [7] * 3, [9, 9], [2]]
    grower.begin(others)
    grower.step(7)
    grower.step(3)


def test_a_prefix_that_nobody_has_any_more_gives_its_place_to_another():
    grower = Grower(policy_of("fast"), 4)
    for number in range(5, 9):
        grower.cut([0] * 4)
        grower.begin([[number] * 9, [number] * 9, [number, 3], [number, 3]])
        grower.step(4)
    assert grower.forward._prefixes.num_rows <= 4


@pytest.mark.parametrize(
    ("architecture", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)]
)
@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_other_architectures_with_shared_key_value_heads(architecture, config, autocast):
    """Llama has no norm of queries and keys; Qwen2 has biases."""
    tiny = tiny_policy()
    torch.manual_seed(0)
    model = architecture(
        config(
            vocab_size=len(tiny.tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.15,
            attention_bias=True,
        )
    )
    for name, values in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(values)
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[autocast]
    policy = Policy(model, tiny.chat, device=tiny.device, autocast=precision)
    assert policy.sampler is Sampler.FAST
    grower = Grower(policy, 3, bound=10 * BOUND[autocast])
    grower.feed([5, 1, 9])
    grower.step(2)
    grower.feed([1, 2, 3])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adapted": "embed_tokens"}, "adapters of other layers"),
        ({"dtype": "bfloat16"}, "not float32"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of peft, about tied embeddings
def test_other_models_use_their_own_modules(changes, reason):
    policy = tiny_policy()
    if adapted := changes.get("adapted"):
        policy.model = get_peft_model(policy.model, LoraConfig(target_modules=[adapted]))
    if dtype := changes.get("dtype"):
        policy.model.to(getattr(torch, dtype))
    found = packed_decoder.unsupported_reason(policy.model, policy.decoder)
    assert found is not None
    assert reason in found
    policy.sampler = Sampler.RAGGED
    assert isinstance(policy.row_forwards(1)[0], TransformersForward)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_an_adapter_is_in_the_copy_of_the_weights(autocast):
    policy = tiny_policy(autocast=autocast, lora_rank=2)
    own = {name: values.clone() for name, values in policy.model.named_parameters()}
    torch.manual_seed(0)
    with torch.no_grad():
        for name, values in policy.model.named_parameters():
            if "lora_B" in name:
                values.normal_(std=0.3)
                own[name] = values.clone()
    grower = Grower(policy, 3, bound=10 * BOUND[autocast])
    assert isinstance(grower.forward, FastForward)
    grower.feed([5, 1, 9])
    grower.step(3)
    logits = policy.model_logits(torch.tensor([grower.rows[0]]))
    with policy.model.disable_adapter():
        without = policy.model_logits(torch.tensor([grower.rows[0]]))
    assert (logits - without).abs().max() > 100 * BOUND["float32"]
    found = dict(policy.model.named_parameters())
    assert all(torch.equal(values, own[name]) for name, values in found.items())


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_an_adapter_below_the_rounding_of_the_weights_has_its_effect(autocast):
    """Weights of hubs are bfloat16, and a first update adds less than half a step to them."""
    policy = tiny_policy(autocast=autocast, lora_rank=1)
    attention = policy.decoder.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    size = modules[0].in_features
    with torch.no_grad():
        for module in modules:
            module.weight.copy_(torch.tensor([1 / 16, -1 / 16]).repeat(size // 2))
        for number, module in enumerate([modules[0], modules[2]], 1):
            module.lora_A["default"].weight.fill_(number / size)
            module.lora_B["default"].weight.fill_(2**-14 / module.scaling["default"])
        modules[1].lora_B["default"].weight.zero_()
    product = packed_decoder._Product(modules, policy.precision)
    with torch.inference_mode():
        found = product(torch.ones(3, size)).float().unique(dim=0)[0].unique_consecutive()
    assert found.tolist() == pytest.approx([2**-14, 0.0, 2**-13], rel=1e-2, abs=1e-7)


def test_a_pass_keeps_the_weights_that_it_was_made_with():
    """The learner may change the policy while the engine samples with a copy."""
    policy = policy_of("fast")
    (forward,) = policy.row_forwards(1)
    forward.reserve_rows(1)
    with torch.inference_mode():
        before = forward.feed([[5, 6]], [0])
    with torch.no_grad():
        for values in policy.model.parameters():
            values.mul_(1.5)
    with torch.inference_mode():
        assert torch.equal(forward.feed([[5, 6]], [0]), before)


def test_a_forward_pass_that_nobody_uses_is_freed_without_the_garbage_collector(kind):
    """A reference cycle would keep the tensors of a whole rollout batch in memory for a while."""
    grower = Grower(policy_of(kind), 2)
    gc.collect()
    gc.disable()
    try:
        grower.feed([3, 5])
        grower.step(2)
        if kind == "fast":
            tensors = [*grower.forward._rows.keys, *grower.forward._rows.values]
        else:
            tensors = [layer.keys for layer in grower.forward._cache.layers]
        seen = [weakref.ref(each) for each in (grower.forward, *tensors)]
        del tensors, grower.forward
        assert [each() for each in seen] == [None] * len(seen)
    finally:
        gc.enable()


def resident_kb():
    """Return this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads what Linux counts")
def test_a_cache_that_has_grown_leaves_no_memory_behind():
    """malloc kept twice the last size, and what no row uses takes nothing."""
    keep_freed_memory()
    store = RowStore(num_layers=2, num_kv_heads=4, head_size=32)
    before_kb = resident_kb()
    for width in range(64, 64 * 22, 64):
        store.reserve(32, width)
        used = [layer[:, :, :width] for layer in (*store.keys, *store.values)]
        for values in used:
            values.fill_(1.0)
    assert store.capacity > 1.5 * store.width
    used_kb = sum(values.numel() * 4 for values in used) / 1024
    assert used_kb > 1 << 10
    assert resident_kb() - before_kb < 1.3 * used_kb
