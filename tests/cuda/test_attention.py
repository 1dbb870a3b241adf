"""Attention, forward, backward and with a cache, interpreted with small blocks, against float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from barellm.cuda import attention_config
from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernels.attention import attention_kv_cache
from barellm.program import ops
from tests.cases import backward_case, bounded, cached_case, each_cached_scored, each_scored, forward_case
from tests.cuda import check
from tests.cuda.check import PLAIN

each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
# (batch, length, heads, head size): length 1, primes, one more than a block, heads that are and are not a power of two
SHAPES = [(1, 1, 1, 1), (2, 7, 3, 5), (1, 67, 2, 32), (1, 129, 1, 20), (1, 64, 2, 80)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
TILES = {"forward": AttentionConfig(64, 32, 4, 1), "keys": AttentionConfig(32, 64, 4, 1), "queries": AttentionConfig(64, 32, 4, 1)}

check_op = partial(check.check_op, target=replace(PLAIN, config=TILES))
ADDED = dict.fromkeys(("dq", "dk", "dv"), "add")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention_kv_cache, "SPLIT_KEYS", 48)


@each_shape
@each_dtype
def test_forward(shape, dtype):
    check_op(ops.Attention, **forward_case(shape, dtype), plan=(shape[0] + 1, shape[1] + 40))


@each_shape
@each_dtype
def test_backward(shape, dtype):
    check_op(ops.AttentionBackward, **backward_case(shape, dtype))


# (batch, length, heads, head size), heads of keys and values: one for all, one for two, sizes that are no power of two
GROUPED = [((2, 7, 3, 5), 1), ((1, 67, 4, 32), 2)]
each_group = pytest.mark.parametrize("shape, groups", GROUPED, ids=str)
each_packing = pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])


@each_group
@each_dtype
@each_packing
def test_grouped_queries(shape, groups, dtype, packed):
    case = forward_case(shape, dtype, rate=0.3, groups=groups, packed=packed)
    check_op(ops.Attention, **case, plan=(shape[0] + 1, shape[1] + 40))


@each_group
@each_dtype
@each_packing
@pytest.mark.extended
def test_grouped_queries_backward(shape, groups, dtype, packed):
    case = backward_case(shape, dtype, rate=0.3, groups=groups, packed=packed)
    check_op(ops.AttentionBackward, **case, modes=ADDED if packed else {"dk": "add"})


def test_gradients_of_tensors_of_their_own_have_modes_of_their_own():
    for name in ADDED:
        case = backward_case((2, 19, 4, 8), "bf16", groups=2, packed=False)
        check_op(ops.AttentionBackward, **case, modes={name: "add"})


def test_keys_in_smaller_blocks_than_queries(monkeypatch):
    """Then the first queries of a block of keys are before it."""
    for role in ("keys", "shared keys"):
        monkeypatch.setitem(TILES, role, AttentionConfig(64, 32, 4, 1))
    check_op(ops.AttentionBackward, **backward_case((1, 131, 1, 16), "fp32"))
    check_op(ops.AttentionBackward, **backward_case((1, 67, 2, 16), "fp32", groups=1))


@each_dtype
@pytest.mark.parametrize("D, rate", [(144, 0.0), (150, 0.0), (256, 0.3)])
@pytest.mark.extended
def test_dk_and_dv_of_wide_heads_in_pieces(D, rate, dtype, monkeypatch):
    """A last piece that is full, begun, and not there at all."""
    monkeypatch.setitem(attention_config.MAX_HEAD_SIZE_DKV, "bf16", 128)
    check_op(ops.AttentionBackward, **backward_case((2, 37, 2, D), dtype, rate=rate), modes=ADDED)


def test_dk_and_dv_of_wide_heads_that_serve_several(monkeypatch):
    monkeypatch.setitem(attention_config.MAX_HEAD_SIZE_DKV, "bf16", 128)
    check_op(ops.AttentionBackward, **backward_case((1, 37, 4, 150), "bf16", groups=2, packed=False))


@pytest.mark.parametrize("shape", [(2, 7, 3, 5), (1, 67, 1, 16)], ids=str)
@each_dtype
def test_dropout_has_the_bits_of_the_reference(shape, dtype):
    check_op(ops.Attention, **forward_case(shape, dtype, rate=0.3))
    check_op(ops.AttentionBackward, **backward_case(shape, dtype, rate=0.3))


def test_dropout_in_blocks_of_16_keys(monkeypatch):
    """They need one of the two words of each call of the generator."""
    for role in TILES:
        monkeypatch.setitem(TILES, role, AttentionConfig(16, 16, 4, 1))
    check_op(ops.Attention, **forward_case((1, 35, 1, 16), "fp32", rate=0.3))
    check_op(ops.AttentionBackward, **backward_case((1, 35, 1, 16), "fp32", rate=0.3))


@each_dtype
def test_large_scores_neither_overflow_nor_lose_the_normalisation(dtype):
    check_op(ops.Attention, **forward_case((1, 70, 1, 16), dtype, size=30.0))


@each_dtype
def test_gradient_is_added_to_what_is_there(dtype):
    check_op(ops.AttentionBackward, **backward_case((1, 35, 2, 24), dtype), modes=ADDED)


# (batch, length, heads, head size), heads of keys, bounds: as the CPU's, around blocks of 32 and 64
BOUNDED = [
    ((1, 67, 2, 32), 2, {"window": 0}),
    ((2, 131, 2, 20), 2, {"window": 5, "scale": 0.4}),
    ((2, 150, 2, 16), 1, {"window": 64, "starts": [7, 64, 129]}),
    ((1, 97, 3, 5), 3, {"window": (1 << 63) - 1, "starts": [64, 65]}),
    ((2, 70, 4, 24), 2, {"window": 33, "starts": [10, 60], "paired": True, "scale": 0.1}),
    ((1, 37, 2, 32), 2, {"paired": True}),
]
each_bound = pytest.mark.parametrize("shape, groups, bounds", BOUNDED, ids=str)


@each_bound
@each_dtype
@pytest.mark.extended
def test_bounded(shape, groups, bounds, dtype):
    more = {"groups": groups, "packed": shape[1] % 2 == 0, **bounded(**bounds)}
    check_op(ops.Attention, **forward_case(shape, dtype, **more), plan=(shape[0] + 1, shape[1] + 20))
    check_op(ops.AttentionBackward, **backward_case(shape, dtype, **more), modes=ADDED if more["packed"] else {"dk": "add"})


@each_scored
def test_constant_windows_scales_and_soft_caps(shape, groups, scored):
    more = {"groups": groups, "packed": False, **scored}
    check_op(ops.Attention, **forward_case(shape, "fp32", **more), plan=(shape[0] + 1, shape[1] + 20))
    check_op(ops.AttentionBackward, **backward_case(shape, "bf16", **more))


@each_cached_scored
def test_cached_with_constant_windows_scales_and_soft_caps(pos, T, scored):
    check_op(ops.AttentionCached, **cached_case("fp32", pos=pos, T=T, heads=4, groups=2, D=20, length=113, **scored))


@pytest.mark.parametrize("shape, groups, rate", [((2, 67, 2, 20), 2, 0.0), ((1, 130, 4, 16), 2, 0.3), ((1, 64, 1, 32), 1, 0.0)])
@each_dtype
@pytest.mark.extended
def test_over_all_keys(shape, groups, rate, dtype):
    more = {"groups": groups, "packed": groups == 2, "causal": False}
    check_op(ops.Attention, **forward_case(shape, dtype, rate, **more), plan=(shape[0] + 1, shape[1] + 20))
    check_op(ops.AttentionBackward, **backward_case(shape, dtype, rate, **more), modes=ADDED)


def test_keys_beyond_the_last_count_for_nothing_where_scores_are_far_below_zero():
    """Without a mask their probability would be infinite there, as their score is 0."""
    check_op(ops.Attention, **forward_case((2, 3, 2, 16), "fp32", below=200.0, causal=False))
    check_op(ops.AttentionBackward, **backward_case((2, 3, 2, 16), "fp32", below=200.0, causal=False))


@pytest.mark.extended
def test_bounded_with_dropout():
    more = bounded(33, starts=[50], paired=True)
    check_op(ops.Attention, **forward_case((1, 80, 4, 16), "bf16", 0.3, **more))
    check_op(ops.AttentionBackward, **backward_case((1, 80, 4, 16), "bf16", 0.3, **more))


def test_dk_and_dv_of_wide_paired_heads_in_pieces(monkeypatch):
    monkeypatch.setitem(attention_config.MAX_HEAD_SIZE_DKV, "bf16", 128)
    check_op(ops.AttentionBackward, **backward_case((1, 37, 2, 150), "bf16", **bounded(20, starts=[9], paired=True)))


@each_dtype
@pytest.mark.parametrize("pos, T", [(0, 1), (37, 1), (0, 35), (30, 3), (70, 40), (46, 16), (112, 1)])
@pytest.mark.extended
def test_cached(dtype, pos, T):
    check_op(ops.AttentionCached, **cached_case(dtype, pos=pos, T=T, heads=3, D=5, length=113))


@each_dtype
@each_packing
@pytest.mark.parametrize("heads, groups, pos, T", [(6, 2, 0, 1), (3, 1, 37, 7), (6, 2, 40, 16), (20, 1, 60, 1), (6, 2, 70, 40)])
@pytest.mark.extended
def test_cached_with_grouped_heads(dtype, packed, heads, groups, pos, T):
    """The heads of a group are rows of one block: of several tokens, of a part of one. Of 16 tokens after 40 the first block needs
    one part of the keys, the last two."""
    case = cached_case(dtype, pos=pos, T=T, heads=heads, groups=groups, D=5, length=113, packed=packed)
    check_op(ops.AttentionCached, **case)


@each_dtype
def test_cached_with_wide_heads(dtype):
    check_op(ops.AttentionCached, **cached_case(dtype, pos=50, T=1, heads=2, D=80, length=64))


@pytest.mark.extended
def test_fewer_new_tokens_than_planned():
    for T in (1, 5, 17):
        check_op(ops.AttentionCached, **cached_case("fp32", pos=60, T=T, heads=2, D=8, length=100), plan=(2, 40))
