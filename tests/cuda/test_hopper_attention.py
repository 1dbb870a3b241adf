"""Attention whose warps have roles: its own functions over a model of the machine, small launches in every order, larger ones in
drawn orders; and the op beside its reference, where the kernel is chosen."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from barellm.cuda import attention_config, tuning
from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernel import Target
from barellm.cuda.kernels.attention.hopper_attention import hopper_attention
from barellm.cuda.step import lower_and_plan
from barellm.cuda.tuner import harness
from barellm.cuda.tuning import AttentionProblem
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.tensor import Dim
from barellm.runtime.tuner.problem import Candidate
from tests.cases import forward_case
from tests.check import Case, check_case
from tests.cuda.check import InterpretedSession
from tests.simulators.gluon_machine import explore, run
from tests.simulators.gluon_stub import Fault, Map, Pointer, materialised, trace
from tests.simulators.mock import Gpu

pytestmark = pytest.mark.extended

BF16 = np.dtype(ml_dtypes.bfloat16)
LOG2_E = float(np.log2(np.e))


def launch(batch, seq, heads, D, *, stages, share=1, seed=1, dtype=BF16, size=1.0):
    """Arguments of the kernel, and (array, float64 result, limit) of what it writes."""
    draw = np.random.default_rng(seed).standard_normal
    q, k, v = ((size * draw((batch * seq, n * D))).astype(dtype) for n in (heads, heads // share, heads // share))
    out, lse = np.full((batch * seq, heads * D), np.nan, dtype), np.full((batch, heads, seq), np.nan, np.float32)
    args = {
        "out": Pointer(out.reshape(-1)), "lse": Pointer(lse.reshape(-1)), "q_map": Map(q, [64, D]), "k_map": Map(k, [128, D]),
        "v_map": Map(v, [128, D]), "seq": seq, "heads": batch * heads, "SCALE_LOG2": LOG2_E / D**0.5, "H": heads,
        "GROUP_SIZE": share, "D": D, "STAGES": stages,
    }  # fmt: skip

    def split(x, n):
        return x.astype(np.float64).reshape(batch, seq, n, D).transpose(0, 2, 1, 3)

    q, k, v = split(q, heads), *(np.repeat(split(x, heads // share), share, 1) for x in (k, v))
    s = np.where(np.tri(seq, dtype=bool), q @ k.swapaxes(-1, -2) / D**0.5, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    y = (p @ v / total).transpose(0, 2, 1, 3).reshape(out.shape)
    return args, [(out, y, 2.0**-7 * size), (lse, (top + np.log(total))[..., 0], 1e-5 * max(1.0, size**2))]


def check(wanted) -> None:
    for got, result, limit in wanted:
        np.testing.assert_allclose(got.astype(np.float64), result, rtol=2.0**-8, atol=limit)


# Edges within a half, and at one; rings that go round within a tile, and from tile to tile.
SMALL = {
    "a part of one tile": dict(batch=1, seq=33, heads=1, D=64, stages=2),
    "two tiles": dict(batch=1, seq=192, heads=1, D=64, stages=2),
    "three tiles": dict(batch=1, seq=257, heads=1, D=64, stages=2),
    "three short tiles": dict(batch=1, seq=33, heads=3, D=64, stages=3),
}


@pytest.mark.parametrize("name", ["a part of one tile", "three tiles"])
def test_every_order_of_a_small_launch(name):
    kernel = materialised(hopper_attention)
    args, _ = launch(**SMALL[name])
    explore(trace(kernel, args))
    for seed in range(3):
        args, wanted = launch(**SMALL[name], seed=seed)
        run(trace(kernel, args), seed)
        check(wanted)


K_WAIT = "consumer_wait(k_full, next_i)"
V_WAIT = "consumer_wait(v_full, next_i)"
FIRST_K = "consumer_wait(k_full, i)"
FIRST_V = "consumer_wait(v_full, i)"
PRODUCER, CONSUMER = "attention_producer_warp", "attention_consumer_warpgroup"
MUTANTS = {
    "queries' room is not waited for": (
        "three short tiles", PRODUCER, "producer_acquire(q_empty, t)", "pass"
    ),
    "queries' room, the phase flipped": ("two tiles", PRODUCER, "producer_acquire(q_empty, t)", "consumer_wait(q_empty, t)"),
    "keys' room is not waited for": ("three tiles", PRODUCER, "hopper.mbarrier.wait(k_empty.index(s), phase)", "pass"),
    "values' room is not waited for": ("three tiles", PRODUCER, "hopper.mbarrier.wait(v_empty.index(s), phase)", "pass"),
    "the rings' phase flipped": ("two tiles", PRODUCER, "(i // STAGES & 1) ^ 1", "i // STAGES & 1"),
    "one half's queries expected": ("two tiles", PRODUCER, "2 * q_map.block_type.nbytes", "q_map.block_type.nbytes"),
    "too many bytes of values expected": ("two tiles", PRODUCER, "v_map.block_type.nbytes", "2 * v_map.block_type.nbytes"),
    "queries are not waited for": ("two tiles", CONSUMER, "consumer_wait(q_full, t)", "pass"),
    "the first keys are not waited for": ("two tiles", CONSUMER, FIRST_K, "pass"),
    "the first values are not waited for": ("two tiles", CONSUMER, FIRST_V, "pass"),
    "the next keys are not waited for": ("two tiles", CONSUMER, K_WAIT, "pass"),
    "the next values are not waited for": ("two tiles", CONSUMER, V_WAIT, "pass"),
    "the next keys' phase flipped": ("two tiles", CONSUMER, K_WAIT, K_WAIT.replace("consumer_wait", "producer_acquire")),
    "both halves wait for their turn": ("two tiles", CONSUMER, "^ (1 - WG)", ""),
    "no half gives its turn on": ("three tiles", CONSUMER, "hopper.mbarrier.arrive(pingpong.index(1 - WG))", "pass"),
    "scores are read too early": (
        "two tiles", CONSUMER, "s = hopper.warpgroup_mma_wait(1, deps=(s,))", "s = hopper.warpgroup_mma_wait(2, deps=(s,))"
    ),
    "values are released while they are multiplied": (
        "three tiles", CONSUMER, "hopper.warpgroup_mma_wait(0, deps=(sums, p))", "sums, p"
    ),
    "the last values are released while they are multiplied": (
        "three tiles", CONSUMER, "acc = hopper.warpgroup_mma_wait(0, deps=(sums,))", "acc = sums"
    ),
    "the first keys are released while they are multiplied": (
        "three tiles", CONSUMER, "s = hopper.warpgroup_mma_wait(0, deps=(s,))", "pass"
    ),
    "the first keys are kept": ("three tiles", CONSUMER, "consumer_release(k_empty, i)", "pass"),
    "the next keys are kept": ("three tiles", CONSUMER, "consumer_release(k_empty, next_i)", "pass"),
    "queries are kept": ("three tiles", CONSUMER, "consumer_release(q_empty, t)", "pass"),
    "one half's answer is enough": ("three tiles", "hopper_attention", "q_empty.index(s), count=2", "q_empty.index(s), count=1"),
    "one half's release of keys is enough": (
        "three tiles", "hopper_attention", "k_empty.index(s), count=2", "k_empty.index(s), count=1"
    ),
    "one half's release of values is enough": (
        "three tiles", "hopper_attention", "v_empty.index(s), count=2", "v_empty.index(s), count=1"
    ),
    "barriers are not fenced": ("two tiles", "hopper_attention", "hopper.fence_async_shared()", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name):
    config, function, old, new = MUTANTS[name]
    args, _ = launch(**SMALL[config])
    mutant = materialised(hopper_attention, {function: (old, new)})
    with pytest.raises(Fault):
        explore(trace(mutant, args))


def test_rings_of_one_stage_stand_still():
    """A half waits for the next values before it has released these."""
    args, _ = launch(**SMALL["two tiles"] | {"stages": 1})
    with pytest.raises(Fault, match="standstill"):
        explore(trace(materialised(hopper_attention), args))


LARGE = {
    "heads of two sequences": dict(batch=2, seq=140, heads=2, D=64, stages=4),
    "shared keys": dict(batch=1, seq=257, heads=4, D=64, stages=2, share=2),
    "wide heads": dict(batch=1, seq=300, heads=1, D=128, stages=2),
    "fp16": dict(batch=1, seq=130, heads=2, D=64, stages=4, dtype=np.dtype(np.float16)),
    "large scores": dict(batch=1, seq=257, heads=1, D=64, stages=3, size=30.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_drawn_orders_of_a_whole_launch(name):
    """The bits do not depend on the order, nor on who does which tile."""
    kernel, found = materialised(hopper_attention), []
    for seed, programs in ((1, 1), (2, 3)):
        args, wanted = launch(**LARGE[name])
        for program in range(programs):
            run(trace(kernel, args, program, programs), seed * 3 + program)
        check(wanted)
        found.append([got.copy() for got, _, _ in wanted])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("seq", [1, 127, 1000, 1024, 4096])
@pytest.mark.parametrize("heads", [1, 12, 64 * 12])
def test_tiles_are_done_once_and_evenly(seq, heads):
    """Every block of threads of an H100 has about as many blocks of keys to visit, where each has some tiles."""
    place = materialised(hopper_attention).__globals__["query_tile"]
    tiles = -(-seq // 128)
    items = [place(w, seq) for w in range(heads * tiles)]
    assert sorted(items) == [(head, 128 * n) for head in range(heads) for n in range(tiles)]
    blocks = [sum(m0 // 128 + 1 for _, m0 in items[c::132]) for c in range(132)]
    if len(items) >= 20 * 132:
        assert max(blocks) <= 1.1 * sum(blocks) / 132


@pytest.mark.parametrize("D, dtype, groups, packed", [(64, "bf16", 2, True), (64, "bf16", 1, True), (128, "fp16", 2, False)])
def test_the_op_takes_the_kernel_where_it_is_chosen(D, dtype, groups, packed):
    shape, plan = (2, 131, 2, D), (3, 150)
    subject = tuning.AttentionProblem("forward", dtype, *plan, 2, D, kv_heads=groups % 2)
    target = Target(arch=90, sms=3)
    launched = []

    class Session(InterpretedSession):
        def __init__(self, programs):
            super().__init__(programs, target=target)
            launched.append([c.spec.name for c in self.lowered["op"].launches])

    attrs = forward_case(shape, dtype, groups=groups, packed=packed)
    given, views, bounds, scalars = (attrs.pop(name) for name in ("given", "views", "bounds", "scalars"))
    assert attention_config.WARP_SPECIALIZED[D] == subject.default(90)
    check_case(Case(ops.Attention, given, attrs, bounds, {}, scalars, plan, views), {"": Session})
    assert launched == [["hopper_attention"]]


def test_it_is_no_choice_where_it_does_not_fit():
    def names(**changes):
        fields = {"operation": "forward", "dtype": "bf16", "batch": 1, "seq": 256, "heads": 2, "head": 64}
        return [t.warp_specialized for t in tuning.AttentionProblem(**fields | changes).all_configs(changes.pop("arch", 90))]

    assert sum(names()) == 1
    for role in ("forward", "queries", "keys"):
        assert sum(names(operation=role)) == 1
        for changes in ({"dtype": "fp32"}, {"head": 96}, {"dropout": True}):
            assert not any(names(operation=role, **changes)), changes
        assert not any(t.warp_specialized for t in tuning.AttentionProblem(role, "bf16", 1, 256, 2, 64).all_configs(80))
    usual = attention_config.select_attention_config("forward", 64, "bf16", 90)
    backward = attention_config.WARP_SPECIALIZED_BACKWARD["keys", 64]
    assert not attention_config.bitwise_equal("keys", backward, AttentionConfig(64, 128, 8, 2))
    forward = attention_config.WARP_SPECIALIZED[64]
    assert not attention_config.bitwise_equal("forward", forward, AttentionConfig(128, 128, 8, 2)) and not usual.warp_specialized


def test_triton_s_kernel_has_what_is_not_causal_or_scaled_and_all_where_it_is_forced():
    for module, causal, scale, plain in (
        ("hopper_attention", True, None, False), ("attention", False, None, False),
        ("attention", True, "softmax_scale", False), ("attention", True, None, True),
    ):  # fmt: skip
        p = Program(Store(), compute="bf16")
        q = p.input("q", (Dim("batch", 2), Dim("seq", 64), 128), "bf16")
        p.output("out", p.attention(q, q, q, heads=2, causal=causal, scale=scale))
        (spec,) = lower_and_plan({"op": p}, Target(arch=90, plain_attention=plain)).specs
        assert spec.function.module.endswith(f".{module}")


def test_the_tuner_s_harness_measures_triton_s_beside_it(monkeypatch):
    """On the driver in Python: parameters, tensor maps and grid as the compiled code wants them."""
    Gpu(arch=90).install(monkeypatch)
    both = harness.Harness(AttentionProblem("forward", "bf16", 2, 70, 2, 64), calls=1)
    other = Candidate(both.problem.configs_in_triton(90)[0], other_bits=True)
    both.check(other)
    (ratios,) = both.time([other], 1)
    assert len(ratios) == 1 and both.case.worst < 1
    both.close()
