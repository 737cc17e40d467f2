"""Attention over packed rows against attention with an explicit mask. Trap numbers:
tests/README.md."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from openenv_pipe.algorithms.packing import pack
from openenv_pipe.algorithms.prefix_tree import flat, merged
from openenv_pipe.models.forward.attention import flex as flex_module
from openenv_pipe.models.forward.attention import tree as module
from openenv_pipe.models.forward.attention.flex import build_block_mask, rule
from openenv_pipe.models.forward.attention.packed import each_alone
from openenv_pipe.models.forward.attention.tree import plan_attention, tree_attention
from openenv_pipe.types import Sample

CPU = torch.device("cpu")
HEADS, HEAD_SIZE = 2, 8


def random_rows(draw):
    """Return rows with shared prefixes from a small vocabulary, so that they branch at every
    depth."""
    base = [draw.randrange(3) for _ in range(draw.randrange(1, 30))]
    return [
        np.array(
            base[: draw.randrange(len(base) + 1)]
            + [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        )
        for _ in range(draw.randrange(1, 8))
    ]


def visible(nodes):
    """Return the mask [T, T] that FlexAttention gets on a GPU."""
    places = torch.arange(nodes[-1].end)
    return rule(nodes, CPU)(0, 0, places[:, None], places[None])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    min_block=st.sampled_from([1, 3, 1000]),
    long_row=st.sampled_from([0, 5, 1024]),
    share=st.booleans(),
)
def test_output_and_gradients_are_those_of_a_mask(seed, min_block, long_row, share):
    """Traps 10 and 25: also for blocks of one token, and for rows without queries."""
    draw = random.Random(seed)
    trie = (merged if share else flat)(random_rows(draw))
    torch.manual_seed(seed)
    shape = (1, HEADS, len(trie.token_ids), HEAD_SIZE)
    given = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *given, attn_mask=visible(trie.nodes), scale=0.3
    ).transpose(1, 2)
    upstream = torch.randn_like(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_BLOCK", min_block)
        patch.setattr(module, "LONG_ROW", long_row)
        plan = plan_attention(trie.nodes)
    output = tree_attention(*given, plan, 0.3)
    assert torch.allclose(output, expected, atol=1e-5)
    for seen, value in zip(
        torch.autograd.grad(output, given, upstream),
        torch.autograd.grad(expected, given, upstream),
        strict=True,
    ):
        assert torch.allclose(seen, value, atol=1e-4)


@pytest.mark.parametrize("block", [2, 7, 128])
def test_blocks_of_the_mask_are_those_that_torch_finds(block, monkeypatch):
    """For rows whose last block is full, and others."""
    monkeypatch.setattr(flex_module, "BLOCK", block)
    for seed in range(20):
        nodes = merged(random_rows(random.Random(seed))).nodes
        length = nodes[-1].end
        expected = create_block_mask(
            rule(nodes, CPU), None, None, length, length, device="cpu", BLOCK_SIZE=block
        )
        found = build_block_mask(nodes, CPU)
        assert found.shape == expected.shape
        for name in ("num_blocks", "indices"):
            for kind in ("kv", "full_kv", "q", "full_q"):
                assert torch.equal(
                    getattr(found, f"{kind}_{name}"), getattr(expected, f"{kind}_{name}")
                )


def test_samples_alone_attend_as_in_their_row():
    """Also if several heads of queries share one of keys."""
    nodes = flat([np.arange(length) for length in (5, 1, 9)]).nodes
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 15, 8, generator=draw) for heads in (4, 2, 2))
    repeated = (each.repeat_interleave(2, dim=1) for each in (key, value))
    expected = tree_attention(query, *repeated, plan_attention(nodes), 0.3)
    assert torch.allclose(each_alone(query, key, value, [5, 1, 9], 0.3), expected, atol=1e-6)


def test_a_token_sees_its_ancestors_and_itself():
    """The mask for GPUs by hand, for the rows 1 2 3, 1 2 4 5 and 6."""
    trie = merged([np.array(row) for row in ([1, 2, 3], [1, 2, 4, 5], [6])])
    assert trie.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert visible(trie.nodes).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_what_the_cpus_attention_gives(monkeypatch):
    """The GPU's block mask, scale and grouped key heads, here without the compiled kernel."""
    monkeypatch.setattr(flex_module, "_compiled", lambda: flex_attention)
    nodes = merged([np.array([*range(40), *[100 + n] * (5 + n)]) for n in range(4)]).nodes
    torch.manual_seed(0)
    query = torch.randn(1, 2 * HEADS, nodes[-1].end, 16)
    key, value = (torch.randn(1, HEADS, nodes[-1].end, 16) for _ in range(2))
    output = flex_module.flex(query, key, value, flex_module.build_block_mask(nodes, CPU), 0.3)
    repeated = (x.repeat_interleave(2, dim=1) for x in (key, value))
    expected = tree_attention(query, *repeated, plan_attention(nodes), 0.3)
    assert torch.allclose(output, expected, atol=1e-5)


def test_a_long_shared_stretch_is_a_block_and_what_hangs_below_it_are_rows():
    prompt = list(range(module.MIN_BLOCK))
    rows = [np.array([*prompt, *[100 + member] * 10]) for member in range(4)]
    plan = plan_attention(merged(rows).nodes)
    assert [(block.start, block.end) for block in plan.blocks] == [(0, module.MIN_BLOCK)]
    (bucket,) = plan.buckets
    assert bucket.num_rows == 4
    assert len(bucket.places) == 40


def test_tokens_that_nobody_reads_need_no_attention_to_shared_blocks():
    """Outputs of tokens that are read, and all gradients, are those of a whole row."""
    batch = pack(shared_samples(), share=True)
    plan = plan_attention(batch.nodes)
    read = batch.finished
    assert plan.blocks and len(read) < len(batch.token_ids)
    part = plan.reading(read)
    below = torch.cat([torch.arange(b.end, b.subtree_end) for b in plan.blocks])
    asked = torch.cat([tokens for _, tokens in part.asking])
    assert asked.tolist() == [place for place in below.tolist() if place in set(read.tolist())]
    outputs = [attended(each, read, len(batch.token_ids)) for each in (plan, part)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


@settings(derandomize=True, deadline=None, max_examples=40)
@example(seed=5, min_block=1, max_queries=64, long_row=1024, share=True)  # a block nobody asks
@given(
    seed=st.integers(0, 2**32),
    min_block=st.sampled_from([1, 3, 1000]),
    max_queries=st.sampled_from([1, 3, 64]),
    long_row=st.sampled_from([0, 5, 1024]),
    share=st.booleans(),
)
def test_whatever_is_read_has_the_outputs_and_gradients_of_a_mask(
    seed, min_block, max_queries, long_row, share
):
    """Also where nothing of a bucket is read, or one token in all."""
    draw = random.Random(seed)
    trie = (merged if share else flat)(random_rows(draw))
    length = len(trie.token_ids)
    read = torch.tensor(sorted(draw.sample(range(length), draw.randrange(1, length + 1))))
    torch.manual_seed(seed)
    given = [torch.randn((1, HEADS, length, HEAD_SIZE), requires_grad=True) for _ in range(3)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *given, attn_mask=visible(trie.nodes), scale=0.3
    ).transpose(1, 2)[:, read]
    upstream = torch.randn_like(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_BLOCK", min_block)
        patch.setattr(module, "MAX_QUERIES", max_queries)
        patch.setattr(module, "LONG_ROW", long_row)
        plan = plan_attention(trie.nodes).reading(read)
    output = tree_attention(*given, plan, 0.3)
    assert output.isfinite().all()
    torch.testing.assert_close(output[:, read], expected, rtol=0, atol=1e-5)
    for seen, value in zip(
        torch.autograd.grad(output[:, read], given, upstream),
        torch.autograd.grad(expected, given, upstream),
        strict=True,
    ):
        torch.testing.assert_close(seen, value, rtol=0, atol=1e-4)


def shared_samples():
    """Return two groups of samples that begin with the same 40 tokens, and are trained in parts."""
    draw = random.Random(0)
    samples = []
    for group in range(2):
        prompt = [draw.randrange(250) for _ in range(40)]
        for member in range(3):
            ids = prompt + [draw.randrange(250) for _ in range(12 + member)]
            mask = [place > 40 and place % 3 == 0 for place in range(len(ids))]
            samples.append(
                Sample(
                    group=str(group),
                    member=member,
                    num_episode_tokens=sum(mask),
                    token_ids=ids,
                    loss_mask=mask,
                    logprobs=[0.0] * len(ids),
                    advantages=[0.0] * len(ids),
                )
            )
    return samples


def attended(plan, read, length):
    """Return the outputs of the read tokens, and the gradients of a sum of them."""
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, length, 8, generator=draw).requires_grad_() for _ in range(3)]
    output = tree_attention(*given, plan, 0.3)[0, read]
    (output * torch.randn(output.shape, generator=draw)).sum().backward()
    return [output, *(each.grad for each in given)]


def test_compiled_kernels_are_not_read_from_a_folder_that_others_can_make(monkeypatch, tmp_path):
    """torch's own default has a name that anybody can guess, in /tmp."""
    monkeypatch.setenv(flex_module.COMPILED, "")  # so that its absence is restored
    monkeypatch.delenv(flex_module.COMPILED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    flex_module._compiled.__wrapped__()
    folder = Path(os.environ[flex_module.COMPILED])
    assert folder == tmp_path / "openenv-pipe" / "inductor" and folder.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(flex_module.COMPILED, "/of/a/user")
    flex_module._compiled.__wrapped__()
    assert os.environ[flex_module.COMPILED] == "/of/a/user"
