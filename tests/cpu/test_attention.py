from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from barellm.cpu.isa import cross
from barellm.cpu.jit import assembly
from barellm.cpu.kernel import REGISTRY, KernelBuilder, Lowering, Specialisation
from barellm.cpu.kernels.attention import attention_backward, attention_backward_windowed, attention_forward
from barellm.cpu.step import CpuSession
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from tests.cases import (
    CACHED_SCORED,
    SCORED,
    attention_both,
    backward_case,
    bounded,
    cached_case,
    each_cached_scored,
    each_scored,
    forward_case,
    normal,
)
from tests.cpu.check import ISAS, Given, changed, check_op, isa_named, persistent, tokens
from tests.cpu.test_block_sparse_attention import pairs_in_fp32
from tests.simulators import amx_emulator
from tests.simulators.amx_emulator import EMULATED

# (batch, length, heads, head size): length 1, primes, head sizes beside and beyond the vectors' multiples
SHAPES = [(1, 1, 1, 1), (2, 7, 3, 5), (1, 67, 2, 32), (2, 131, 2, 64), (1, 40, 2, 80), (1, 97, 1, 128)]
# Short ones with rows of whole units: AVX512-BF16 has kernels of their own for them.
SHAPES += [(3, 64, 2, 32), (2, 41, 3, 64), (2, 1, 1, 32)]
each_isa = pytest.mark.parametrize("isa", [isa_named(n) for n in ISAS], ids=ISAS)
each_dtype = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def check_forward(isa, shape, dtype, rate=0.0, size=1.0, **more):
    check_op(ops.Attention, isa, **forward_case(shape, dtype, rate, size), **more)


def check_backward(isa, shape, dtype, rate=0.0, **more):
    check_op(ops.AttentionBackward, isa, **backward_case(shape, dtype, rate), **more)


@each_isa
@each_shape
@each_dtype
@pytest.mark.extended
def test_forward(isa, shape, dtype):
    check_forward(isa, shape, dtype)


@each_isa
@each_shape
@each_dtype
@pytest.mark.extended
def test_backward(isa, shape, dtype):
    check_backward(isa, shape, dtype)


@each_isa
@each_dtype
@pytest.mark.extended
def test_many_blocks_of_keys_and_queries(isa, dtype):
    check_forward(isa, (1, 1031, 1, 64), dtype, threads=(2,))
    check_backward(isa, (1, 1031, 1, 64), dtype, threads=(2,))


@each_isa
@pytest.mark.parametrize("shape", [(2, 7, 3, 5), (1, 131, 2, 32)], ids=str)
@each_dtype
def test_dropout_has_the_bits_of_the_reference(isa, shape, dtype):
    check_forward(isa, shape, dtype, rate=0.3)
    check_backward(isa, shape, dtype, rate=0.3)


@each_isa
@each_dtype
def test_large_scores_neither_overflow_nor_lose_the_normalisation(isa, dtype):
    check_forward(isa, (1, 70, 1, 16), dtype, size=30.0)


@each_isa
@each_dtype
def test_sizes_below_the_planned_ones(isa, dtype):
    check_forward(isa, (2, 37, 2, 8), dtype, plan=(3, 150))


@each_isa
@each_dtype
def test_gradient_is_added_to_what_is_there(isa, dtype):
    check_backward(isa, (1, 35, 2, 24), dtype, modes=dict.fromkeys(("dq", "dk", "dv"), "add"))


@pytest.mark.parametrize("heads", [1, 7])
def test_schedules_give_the_same_bits(heads):
    """1 thread takes one pass, 5 threads take two: `check_op` compares the bits."""
    ratio = attention_backward.ONE_PASS / attention_backward.TWO_PASSES
    assert any(-(-heads // n) * n * ratio > heads for n in (1, 2, 5)), "no thread count takes two passes"
    check_backward(isa_named(ISAS[0]), (1, 150, heads, 16), "bf16")


@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="fits_single_block sequences have kernels of their own with AVX512-BF16")
@pytest.mark.parametrize("D", [32, 64])
@pytest.mark.parametrize("T", [1, 2, 8, 15, 17, 31, 33, 48, 63, 64])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_short_sequences_have_the_bits_of_blocks(T, D, kv_heads, monkeypatch):
    qkv, dout = normal(3, T, (2 + 2 * kv_heads) * D), normal(3, T, 2 * D, seed=2)

    def results():
        p = Program(Store())
        saved, dqkv = attention_both(p, (Dim("batch", 3), Dim("seq", T)), heads=2, kv_heads=kv_heads, D=D)
        for name, t in (("out", saved.out), ("lse", saved.lse), ("dqkv", dqkv)):
            p.output(name, t)
        session = CpuSession({"both": p}, isa=isa_named("avx512_bf16"))
        session.write("qkv", qkv)
        session.write("dout", dout)
        session.run("both", batch=3, seq=T)
        found = {name: session.read(name) for name in ("out", "lse", "dqkv")}
        session.close()
        return found, {call.spec.name for call in session.calls["both"]}

    ours, names = results()
    assert {"attention_single_block", "attention_backward_single_block"} < names
    monkeypatch.setattr(attention_forward, "fits_single_block", lambda *_: False)
    monkeypatch.setattr(attention_backward, "fits_single_block", lambda *_: False)
    theirs, names = results()
    assert {"attention", "attention_backward_dkdv"} < names
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


# (batch, length, heads, head size), heads of keys, and whether q, k and v are columns of one tensor
GROUPED = [((2, 37, 6, 5), 3, True), ((1, 131, 4, 24), 2, False), ((2, 150, 3, 16), 1, True), ((1, 40, 2, 80), 2, False)]
GROUPED += [((3, 64, 4, 32), 2, True), ((2, 41, 3, 64), 1, False), ((1, 1, 2, 32), 1, False)]  # fits_single_block ones
each_group = pytest.mark.parametrize("shape, groups, packed", GROUPED, ids=str)


@each_isa
@each_group
@each_dtype
@pytest.mark.extended
def test_grouped_heads(isa, shape, groups, packed, dtype):
    check_op(ops.Attention, isa, **forward_case(shape, dtype, groups=groups, packed=packed))
    check_op(ops.AttentionBackward, isa, **backward_case(shape, dtype, groups=groups, packed=packed))


@each_isa
@each_dtype
def test_grouped_heads_with_dropout(isa, dtype):
    more = {"groups": 2, "packed": False}
    check_op(ops.Attention, isa, **forward_case((2, 37, 6, 8), dtype, 0.3, **more))
    check_op(ops.AttentionBackward, isa, **backward_case((2, 37, 6, 8), dtype, 0.3, **more))


@each_isa
@pytest.mark.parametrize("added", [("dk",), ("dq", "dv")], ids=str)
def test_gradients_of_separate_operands_have_modes_of_their_own(isa, added):
    case = backward_case((2, 35, 4, 32), "bf16", groups=2, packed=False)
    check_op(ops.AttentionBackward, isa, **case, modes=dict.fromkeys(added, "add"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("T", [64, 150, 300])
@pytest.mark.extended
def test_a_shared_head_has_the_bits_of_one_for_each(T, dtype):
    """Queries that share keys see what they would see of keys of their own, and the gradients are sums of as many terms."""
    B, H, G, D = 2, 4, 2, 32
    r = np.random.default_rng(1)
    q, dout = (r.standard_normal((B, T, H * D)) for _ in range(2))
    k, v = (r.standard_normal((B, T, G * D)) for _ in range(2))

    def results(groups, k, v):
        p = Program(Store())
        dims = Dim("batch", B), Dim("seq", T)
        given = {"q": q, "k": k, "v": v, "dout": dout}
        operands = {name: p.input(name, (*dims, x.shape[-1]), dtype) for name, x in given.items()}
        into = operands.pop("dout")
        attrs = {"heads": H, "kv_heads": groups, "rate": 0.0, "stream": 0}
        saved = p.apply(ops.Attention, **operands, **attrs)
        back = p.apply(ops.AttentionBackward, **operands, out=saved.out, dout=into, lse=saved.lse, **attrs)
        for name, t in (saved.outputs | back.outputs).items():
            p.output(name, t)
        session = CpuSession({"both": p})
        for name, x in given.items():
            session.write(name, x)
        session.run("both", batch=B, seq=T)
        found = {name: session.read(name) for name in (*saved.outputs, *back.outputs)}
        session.close()
        return found

    shared = results(G, k, v)
    spread = [np.repeat(x.reshape(B, T, G, D), H // G, 2).reshape(B, T, H * D) for x in (k, v)]
    own = results(H, *spread)
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(shared[name], own[name], err_msg=name)
    for name in ("dk", "dv"):
        total = own[name].astype(np.float64).reshape(B, T, G, H // G, D).sum(3).reshape(B, T, G * D)
        np.testing.assert_allclose(shared[name], total, atol=1e-5 if dtype == "fp32" else 0.1, err_msg=name)


@each_isa
@each_dtype
@pytest.mark.parametrize("pos, T, packed", [(37, 1, True), (30, 3, False), (0, 35, True), (70, 40, False)])
def test_cached_with_grouped_heads(isa, dtype, pos, T, packed):
    check_cached(isa, dtype, pos=pos, T=T, heads=6, groups=2, D=5, length=113, packed=packed)


# (batch, length, heads, head size), heads of keys, bounds: windows of no key, beside a block's edge and beyond the sequence;
# documents of 1 token, at and beside blocks' edges; paired heads, packed and apart, with and without bounds; several heads over one
BOUNDED = [
    ((1, 67, 2, 32), 2, {"window": 0}),
    ((2, 131, 2, 20), 2, {"window": 5, "scale": 0.4}),
    ((1, 300, 1, 64), 1, {"window": 127, "starts": [129, 256, 257]}),
    ((2, 97, 3, 5), 1, {"window": (1 << 63) - 1, "starts": [64, 65]}),
    ((2, 102, 4, 24), 2, {"window": 33, "starts": [10, 60], "paired": True, "scale": 0.1}),
    ((1, 64, 2, 32), 2, {"paired": True}),
    ((1, 45, 2, 128), 2, {"window": 70, "paired": True}),
]
each_bound = pytest.mark.parametrize("shape, groups, bounds", BOUNDED, ids=str)


@each_isa
@each_bound
@each_dtype
@pytest.mark.extended
def test_bounded(isa, shape, groups, bounds, dtype):
    """Operands that are columns of one tensor, and of tensors of their own where the length is odd."""
    more = {"groups": groups, "packed": shape[1] % 2 == 0, **bounded(**bounds)}
    check_op(ops.Attention, isa, **forward_case(shape, dtype, **more), plan=(shape[0] + 1, shape[1] + 20))
    added = {"dk": "add"} if shape[1] % 2 else dict.fromkeys(("dq", "dk", "dv"), "add")
    check_op(ops.AttentionBackward, isa, **backward_case(shape, dtype, **more), modes=added)


@each_isa
@each_scored
@each_dtype
@pytest.mark.extended
def test_constant_windows_scales_and_caps(isa, shape, groups, scored, dtype):
    more = {"groups": groups, "packed": shape[1] % 2 == 0, **scored}
    check_op(ops.Attention, isa, **forward_case(shape, dtype, **more), plan=(shape[0] + 1, shape[1] + 20))
    added = {"dk": "add"} if shape[1] % 2 else dict.fromkeys(("dq", "dk", "dv"), "add")
    check_op(ops.AttentionBackward, isa, **backward_case(shape, dtype, **more), modes=added)


@each_isa
def test_a_window_with_a_cap_and_dropout(isa):
    more = {"groups": 2, "sliding_window": 33, "softcap": 1.5}
    check_op(ops.Attention, isa, **forward_case((1, 80, 4, 16), "bf16", 0.3, **more), threads=(2,))
    check_op(ops.AttentionBackward, isa, **backward_case((1, 80, 4, 16), "bf16", 0.3, **more), threads=(2,))


@pytest.mark.parametrize("window, masked", [(40, True), (41, False)])
def test_a_window_that_reaches_over_the_planned_length_is_none(window, masked):
    p = Program(Store())
    attention_both(p, (Dim("batch", 2), Dim("seq", 41)), heads=2, D=32, sliding_window=window)
    names = set()
    for op in p.ops:
        lowering = Lowering(op, isa_named(ISAS[0]), 2)
        REGISTRY.lower(op, lowering)
        names |= {call.spec.name for call in lowering.calls}
    assert ("attention_backward_windowed" in names) == masked


# (batch, length, heads, head size), heads of keys, dropout: lengths beside the edges of tiles, groups and blocks of 64 and 128
WHOLE = [
    ((1, 1, 1, 1), 1, 0.0),
    ((2, 7, 3, 5), 3, 0.3),
    ((2, 33, 2, 32), 1, 0.0),
    ((1, 64, 4, 20), 2, 0.3),
    ((1, 131, 2, 64), 2, 0.0),
    ((1, 257, 3, 24), 1, 0.0),
]


@each_isa
@pytest.mark.parametrize("shape, groups, rate", WHOLE, ids=str)
@each_dtype
@pytest.mark.extended
def test_over_all_keys(isa, shape, groups, rate, dtype):
    more = {"groups": groups, "packed": groups > 1, "causal": False}
    check_op(ops.Attention, isa, **forward_case(shape, dtype, rate, **more), plan=(shape[0] + 1, shape[1] + 20))
    added = dict.fromkeys(("dq", "dk", "dv"), "add") if groups > 1 else {"dk": "add"}
    check_op(ops.AttentionBackward, isa, **backward_case(shape, dtype, rate, **more), modes=added)


@each_isa
@each_dtype
def test_keys_beyond_the_last_count_for_nothing_where_scores_are_far_below_zero(isa, dtype):
    """Without a mask their probability would be infinite there, as their score is 0."""
    check_op(ops.Attention, isa, **forward_case((2, 3, 2, 16), dtype, below=200.0, causal=False))
    check_op(ops.AttentionBackward, isa, **backward_case((2, 3, 2, 16), dtype, below=200.0, causal=False))


@pytest.mark.parametrize("heads", [1, 7])
def test_schedules_over_all_keys_give_the_same_bits(heads):
    check_op(ops.AttentionBackward, isa_named(ISAS[0]), **backward_case((1, 150, heads, 16), "bf16", causal=False))


@pytest.mark.parametrize("groups", [1, 2])
def test_segments_of_a_long_sequence(groups, monkeypatch):
    """Segments of two blocks: five of them however few threads there are."""
    changed(monkeypatch, attention_backward_windowed, CHUNK=256)
    monkeypatch.setattr(attention_backward, "CHUNK", 256)
    more = {"groups": groups, **bounded(150, starts=[200, 512, 900])}
    check_op(ops.AttentionBackward, isa_named(ISAS[0]), **backward_case((1, 1100, 2, 16), "bf16", **more))


@each_isa
def test_bounded_with_dropout(isa):
    more = bounded(33, starts=[50], paired=True)
    check_op(ops.Attention, isa, **forward_case((1, 80, 4, 16), "bf16", 0.3, **more))
    check_op(ops.AttentionBackward, isa, **backward_case((1, 80, 4, 16), "bf16", 0.3, **more))


@pytest.fixture
def emulated(monkeypatch):
    """Kernels of the emulated ISA get functions for their tile instructions."""
    monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)


each_emulated = pytest.mark.parametrize("isa", EMULATED, ids=["amx emulated"] * len(EMULATED))


@each_emulated
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("shape, groups", [((2, 7, 3, 5), 3), ((1, 131, 2, 64), 1), ((1, 40, 1, 80), 1)], ids=str)
def test_emulated_tiles(isa, shape, groups):
    check_op(ops.Attention, isa, **forward_case(shape, "bf16", groups=groups), threads=(1, 5))
    check_op(ops.AttentionBackward, isa, **backward_case(shape, "bf16", groups=groups), threads=(1, 5))


@each_emulated
@pytest.mark.usefixtures("emulated")
def test_emulated_tiles_over_all_keys(isa):
    more = {"groups": 1, "causal": False}
    check_op(ops.Attention, isa, **forward_case((1, 135, 2, 24), "bf16", 0.3, **more), threads=(2,))
    check_op(ops.AttentionBackward, isa, **backward_case((1, 135, 2, 24), "bf16", 0.3, **more), threads=(1, 5))


@each_emulated
@pytest.mark.usefixtures("emulated")
def test_emulated_tiles_with_bounds_dropout_and_caches(isa):
    more = {"groups": 2, **bounded(33, starts=[10, 60])}
    check_op(ops.Attention, isa, **forward_case((1, 102, 4, 24), "bf16", 0.3, **more), threads=(2,))
    check_op(ops.AttentionBackward, isa, **backward_case((1, 102, 4, 24), "bf16", 0.3, **more), threads=(2,))
    check_op(ops.AttentionCached, isa, **cached_case("bf16", pos=30, T=35, heads=2, D=5, length=113), threads=(2,))


@each_emulated
@pytest.mark.usefixtures("emulated")
def test_emulated_tiles_with_constant_windows_and_caps(isa):
    scored = {"sliding_window": 33, "softcap": 1.5, "scale": 0.4}
    for more in (scored, {"softcap": 1.5}):
        check_op(ops.Attention, isa, **forward_case((1, 102, 2, 24), "bf16", 0.3, **more), threads=(2,))
        check_op(ops.AttentionBackward, isa, **backward_case((1, 102, 2, 24), "bf16", 0.3, **more), threads=(2,))
    check_op(ops.AttentionCached, isa, **cached_case("bf16", pos=30, T=35, heads=2, D=5, length=113, **scored), threads=(2,))


@pytest.mark.parametrize(
    "lanes, tiles", [(16, False), (4, False), (16, True)], ids=["as avx512_bf16", "as neon_bf16", "as amx_bf16"]
)
@pytest.mark.extended
def test_constant_windows_and_caps_on_other_machines(lanes, tiles, monkeypatch):
    """Vectors, pairs of bf16 and tiles of instruction sets that this machine may lack, by its own instructions."""
    monkeypatch.setattr(KernelBuilder, "dot", pairs_in_fp32)
    isa = replace(isa_named(ISAS[0]), lanes=lanes, registers=32, dot="emulated", tiles=tiles)
    if tiles:
        isa = replace(isa, name=f"{amx_emulator.NAME}_by_hand")
        for name, value in (("NAME", isa.name), ("ISA_EMULATED", isa), ("_functions", amx_emulator._functions.__wrapped__)):
            monkeypatch.setattr(amx_emulator, name, value)
        monkeypatch.setattr(Specialisation, "ir", amx_emulator.ir)
    for shape, groups, scored in SCORED:
        more = {"groups": groups, "packed": shape[1] % 2 == 0, **scored}
        check_op(ops.Attention, isa, **forward_case(shape, "bf16", **more), threads=(2,))
        check_op(ops.AttentionBackward, isa, **backward_case(shape, "bf16", **more), threads=(2,))
    for pos, T, scored in CACHED_SCORED:
        check_op(ops.AttentionCached, isa, **cached_case("bf16", pos=pos, T=T, heads=4, D=20, length=113, **scored), threads=(2,))
    for case, op in ((forward_case, ops.Attention), (backward_case, ops.AttentionBackward)):  # of short sequences
        check_op(op, isa, **case((2, 41, 2, 64), "bf16", groups=1, scale=0.3), threads=(2,))


def check_cached(isa, dtype, **sizes):
    check_op(ops.AttentionCached, isa, **cached_case(dtype, **sizes))


@each_isa
@each_dtype
@pytest.mark.parametrize("pos, T", [(0, 1), (37, 1), (0, 35), (30, 3), (70, 40)])
def test_cached(isa, dtype, pos, T):
    check_cached(isa, dtype, pos=pos, T=T, heads=3, D=5, length=113)


@each_isa
@each_cached_scored
@each_dtype
def test_cached_with_constant_windows_scales_and_caps(isa, pos, T, scored, dtype):
    check_cached(isa, dtype, pos=pos, T=T, heads=4, groups=2, D=20, length=113, **scored)


@each_isa
@each_dtype
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("scored", [{}, {"sliding_window": 9, "softcap": 1.5}], ids=str)
def test_cached_with_texts_at_places_of_their_own(isa, dtype, T, scored):
    """Three texts at other positions, in some rows of the caches: each as if it were alone, bit for bit; other rows stay."""
    starts, slots, length, heads, D = (70, 0, 37), (3, 0, 4), 113, 4, 20
    one = cached_case(dtype, pos=0, T=T, heads=heads, groups=2, D=D, length=length, batch=5, **scored)
    operands = {name: g.values[:3] for name, g in one["given"].items() if g.kind == "tokens"}
    caches = {name: g for name, g in one["given"].items() if g.kind == "cache"}
    at = np.array(starts, np.int32)[:, None] + np.arange(T, dtype=np.int32)
    places = {"positions": tokens(at, "i32"), "slots": Given(np.array(slots), "i32", "sequences")}
    case = {name: value for name, value in one.items() if name not in ("given", "bounds", "scalars")}
    case["bounds"] = {"out": np.abs(caches["v_cache"].values).max()}
    given = {name: tokens(x, dtype) for name, x in operands.items()} | caches
    got = check_op(ops.AttentionCached, isa, given | places, **case)
    for text, (pos, slot) in enumerate(zip(starts, slots, strict=True)):
        alone = {name: tokens(x[text : text + 1], dtype) for name, x in operands.items()}
        alone |= {name: persistent(g.values[slot : slot + 1], dtype, "cache") for name, g in caches.items()}
        alone = check_op(ops.AttentionCached, isa, alone, threads=(2,), scalars={"pos": pos}, **case)
        assert np.array_equal(got["out"][text], alone["out"][0])
        for name in caches:
            assert np.array_equal(got[name][slot], alone[name][0])
    for name, g in caches.items():
        assert np.array_equal(got[name][[1, 2]], g.values[[1, 2]])


@each_isa
def test_no_position_writes_into_the_cache_of_another_text(isa):
    """Positions whose first is so late that the new rows would end beyond the cache."""
    one = cached_case("fp32", pos=0, T=4, heads=2, D=8, length=10, batch=2)
    late = np.array([[9, 0, 0, 0], [0, 1, 2, 3]], np.int32)
    got = check_op(
        ops.AttentionCached, isa, one["given"] | {"positions": tokens(late, "i32")}, views=one["views"], heads=2, kv_heads=2
    )
    want = one["given"]["k_cache"].values
    assert np.array_equal(got["k_cache"][0, :6], want[0, :6]) and np.array_equal(got["k_cache"][1, 4:], want[1, 4:])


@each_isa
@each_dtype
def test_cached_with_wide_heads(isa, dtype):
    check_cached(isa, dtype, pos=50, T=1, heads=2, D=80, length=64)


@pytest.mark.parametrize("name, instruction", [("neon_bf16", "bfdot"), ("neon", "fmla")])
def test_arm_code_uses_the_instructions_it_should(name, instruction):
    isa = cross(name, "aarch64-unknown-linux-gnu")
    p = Program(Store())
    attention_both(p, (Dim("batch", 2), Dim("seq", 64)), heads=1, D=64)
    for op in p.ops:
        lowering = Lowering(op, isa, 2)
        REGISTRY.lower(op, lowering)
        for call in lowering.calls:
            if call.spec.name != "attention_delta":
                assert assembly(call.spec.ir(isa), isa).count(instruction) > 30, call.spec.name
