"""Attention's gradients by warps with roles: their own functions over the model of the machine, small launches in every order,
larger ones in drawn orders; and the op beside its reference, where the kernels are chosen."""

from __future__ import annotations

from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from barellm.cuda import attention_config, tuning
from barellm.cuda.kernel import Target
from barellm.cuda.kernels.attention.hopper_attention_backward import hopper_attention_backward
from barellm.cuda.tuner import harness
from barellm.cuda.tuning import AttentionProblem
from barellm.program import ops
from barellm.runtime.tuner.problem import Candidate
from tests.cases import backward_case
from tests.check import Case, check_case
from tests.cuda.check import InterpretedSession
from tests.simulators.gluon_machine import explore, run
from tests.simulators.gluon_stub import Fault, Map, Pointer, materialised, trace
from tests.simulators.mock import Gpu

pytestmark = pytest.mark.extended

BF16 = np.dtype(ml_dtypes.bfloat16)
LOG2_E = float(np.log2(np.e))


def launch(keys, batch, seq, heads, D, *, stages, share=1, seed=1, dtype=BF16, size=1.0):
    """Arguments of the kernel, and (array, float64 result, limits) of what it writes."""
    draw = np.random.default_rng(seed).standard_normal
    groups = heads // share
    q, k, v, dout = ((size * draw((batch * seq, n * D))).astype(dtype) for n in (heads, groups, groups, heads))
    stats = np.full((batch * heads * seq, 4), np.nan, np.float32)

    def split(x, n):
        return x.astype(np.float64).reshape(batch, seq, n, D).transpose(0, 2, 1, 3)

    def joined(x):
        return x.transpose(0, 2, 1, 3).reshape(batch * seq, -1)

    def shared(x):
        return x.reshape(batch, groups, share, seq, D).sum(2)

    Q, dO, K, V = split(q, heads), split(dout, heads), *(np.repeat(split(x, groups), share, 1) for x in (k, v))
    s = np.where(np.tri(seq, dtype=bool), Q @ K.swapaxes(-1, -2) / D**0.5, -np.inf)
    lse = s.max(-1) + np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1))
    p = np.exp(s - lse[..., None])
    delta = (p @ V * dO).sum(-1)
    stats[:, 0], stats[:, 1] = (lse * LOG2_E).reshape(-1), delta.reshape(-1)
    dp = dO @ V.swapaxes(-1, -2)
    ds = p * (dp - delta[..., None]) / D**0.5
    # What is multiplied is rounded to 16 bits, in fp16 at worst to a multiple of 2^-24; p is as exact as its argument, dp and delta
    # as sums in fp32.
    rounding, least, exact = 2.0**-8 if dtype == BF16 else 2.0**-11, 1e-30 if dtype == BF16 else 2.0**-25, 2.0**-20
    spread = rounding * np.abs(ds) + least
    spread += exact * p * ((np.abs(dO) @ np.abs(V).swapaxes(-1, -2)) * (1 + size**2 * D) + np.abs(delta)[..., None])
    if keys:
        results = {"dx": shared(ds.swapaxes(-1, -2) @ Q), "dy": shared(p.swapaxes(-1, -2) @ dO)}
        limits = {
            "dx": shared(spread.swapaxes(-1, -2) @ np.abs(Q)),
            "dy": shared((2 * rounding * p + least).swapaxes(-1, -2) @ np.abs(dO)),
        }
    else:
        results, limits = {"dx": ds @ K}, {"dx": spread @ np.abs(K)}
    written = {name: np.full((batch * seq, x.shape[1] * D), np.nan, dtype) for name, x in results.items()}
    maps = dict(zip("xyab", (k, v, q, dout) if keys else (q, dout, k, v), strict=True))
    args = {f"{name}_map": Map(x, [64, D]) for name, x in maps.items()}
    args |= {name: Pointer(written[name].reshape(-1)) if name in written else None for name in ("dx", "dy")}
    args |= (
        {"stats": None, "stats_map": Map(stats, [64, 4], "plain")}
        if keys
        else {"stats": Pointer(stats.reshape(-1)), "stats_map": None}
    )
    args |= {
        "seq": seq, "heads": batch * (groups if keys else heads), "DKV": keys, "STAGES": stages,
        "SCALE_LOG2": LOG2_E / D**0.5, "SOFTMAX_SCALE": 1 / D**0.5, "H": heads, "GROUP_SIZE": share, "D": D,
        "DKV_STRIDES": (written["dx"].shape[1], groups * D if keys else 0),
    }  # fmt: skip
    return args, [
        (written[n], joined(results[n]), joined(limits[n]) + rounding * np.abs(joined(results[n])) + least) for n in written
    ]


def check(wanted) -> None:
    for got, result, limits in wanted:
        error = np.abs(got.astype(np.float64) - result) / limits
        assert error.max() <= 1, f"{np.argwhere(~(error <= 1))[:4].tolist()} of {error.shape}: {error.max()}"


# Edges within a half, and at one; rings that go round within a tile, and from tile to tile.
SIZES = {
    "a part of one tile": dict(seq=33, heads=1, stages=2),
    "three tiles": dict(seq=257, heads=1, stages=2),
    "three short tiles": dict(seq=33, heads=3, stages=1),
    "two heads for each of keys": dict(seq=70, heads=4, stages=2, share=2),
}
SMALL = {
    f"{name}, {result}": dict(keys=result == "keys", batch=1, D=64, **sizes)
    for result in ("keys", "queries")
    for name, sizes in SIZES.items()
}


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.extended
def test_every_order_of_a_small_launch(name):
    kernel = materialised(hopper_attention_backward)
    args, _ = launch(**SMALL[name])
    explore(trace(kernel, args))
    for seed in range(2):
        args, wanted = launch(**SMALL[name], seed=seed)
        run(trace(kernel, args), seed)
        check(wanted)


ARRIVED = "consumer_wait(full, i)"
SMALL |= {  # too many orders to go through, but for a mutant's first fault
    f"three short tiles, three stages, {result}": SMALL[f"three short tiles, {result}"] | {"stages": 3}
    for result in ("keys", "queries")
}
PRODUCER, CONSUMER = "backward_producer_warp", "backward_consumer_warpgroup"
MUTANTS = {
    "the tile's room is not waited for": (
        "three short tiles, three stages", PRODUCER, "producer_acquire(tile_empty, t)", "pass"
    ),
    "the tile's room, the phase flipped": (
        "three short tiles", PRODUCER, "producer_acquire(tile_empty, t)", "consumer_wait(tile_empty, t)"),
    "the stream's room is not waited for": (
        "three tiles", PRODUCER, "producer_acquire(empty, i)", "pass"
    ),
    "the stream's phase flipped": ("three tiles", PRODUCER, "producer_acquire(empty, i)", "consumer_wait(empty, i)"),
    "one half of a tile expected": ("three tiles", PRODUCER, "4 * x_map.block_type.nbytes", "2 * x_map.block_type.nbytes"),
    "half of the stream expected": ("three tiles", PRODUCER, "2 * a_map.block_type.nbytes", "a_map.block_type.nbytes"),
    "the tile is not waited for": (
        "three tiles", CONSUMER, "consumer_wait(tile_full, t)", "pass"
    ),
    "the stream is not waited for": ("three tiles", CONSUMER, ARRIVED, "pass"),
    "the stream's arrival, the phase flipped": (
        "three tiles", CONSUMER, ARRIVED, ARRIVED.replace("consumer_wait", "producer_acquire")),
    "scores are read too early": ("three tiles", CONSUMER, "mma_wait(1, deps=(scores,))", "mma_wait(2, deps=(scores,))"),
    "the stream is kept": ("three tiles", CONSUMER, "consumer_release(empty, i)", "pass"),
    "the tile is kept": ("three short tiles", CONSUMER, "consumer_release(tile_empty, t)", "pass"),
    "a block beyond the diagonal is given back before it has arrived": (
        "three tiles", "skip_block", "consumer_wait(full, i)", "pass"
    ),
    "a block beyond the diagonal is kept": ("three tiles", "skip_block", "consumer_release(empty, i)", "pass"),
    "one half's answer is enough": (
        "three short tiles", "hopper_attention_backward", "tile_empty.index(s), count=2", "tile_empty.index(s), count=1"
    ),
    "one half's release is enough": (
        "three tiles", "hopper_attention_backward", "(empty.index(s), count=2", "(empty.index(s), count=1"
    ),
    "barriers are not fenced": ("three tiles", "hopper_attention_backward", "hopper.fence_async_shared()", "pass"),
}  # fmt: skip
ONE = {  # of which one result is enough
    "dv's room is given back while it is multiplied": (
        "three tiles, keys", CONSUMER, "x_sum, y_sum = hopper.warpgroup_mma_wait(0, deps=(x_sum, y_sum))",
        "x_sum, y_sum = hopper.warpgroup_mma_wait(1, deps=(x_sum, y_sum))"
    ),
    "dq is added to before it is there": (
        "three tiles, queries", CONSUMER, "mma_wait(0, deps=(x_sum,))", "mma_wait(1, deps=(x_sum,))"
    ),
    "keys' g is read too early": ("three tiles, keys", CONSUMER, "mma_wait(1, deps=(g,))", "mma_wait(2, deps=(g,))"),
    "queries' g is read too early": (
        "three tiles, queries", CONSUMER, "mma_wait(0, deps=(g, p))", "mma_wait(1, deps=(g, p))"
    ),
    "statistics are not expected": (
        "three tiles, keys", PRODUCER, "(stats_map.block_type.nbytes if DKV else 0)", "0"
    ),
    "the wrong half passes by": ("three tiles, keys", CONSUMER, "DKV and WG == 1", "DKV and WG == 0"),
    "the wrong half of queries passes by": (
        "three tiles, queries", CONSUMER, "not DKV and WG == 0", "not DKV and WG == 1"
    ),
}  # fmt: skip
ALL = ONE | {
    f"{name}: {result}": (f"{sizes}, {result}", *edit) for name, (sizes, *edit) in MUTANTS.items() for result in ("keys", "queries")
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.extended
def test_a_mutant_fails(name):
    config, function, old, new = ALL[name]
    args, _ = launch(**SMALL[config])
    with pytest.raises(Fault):
        explore(trace(materialised(hopper_attention_backward, {function: (old, new)}), args))


LARGE = {
    "heads of two sequences": dict(batch=2, seq=140, heads=2, D=64, stages=4),
    "shared keys": dict(batch=2, seq=257, heads=4, D=64, stages=2, share=2),
    "wide heads": dict(batch=1, seq=300, heads=1, D=128, stages=2),
    "fp16": dict(batch=1, seq=130, heads=2, D=64, stages=4, dtype=np.dtype(np.float16)),
    "large scores": dict(batch=1, seq=257, heads=1, D=64, stages=3, size=8.0),
    "one token": dict(batch=3, seq=1, heads=1, D=64, stages=4),
}  # fmt: skip


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "queries"])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.extended
def test_drawn_orders_of_a_whole_launch(name, keys):
    """The bits do not depend on the order, nor on who does which tile."""
    kernel, found = materialised(hopper_attention_backward), []
    for seed, programs in ((1, 1), (2, 3)):
        args, wanted = launch(keys, **LARGE[name])
        for program in range(programs):
            run(trace(kernel, args, program, programs), seed * 3 + program)
        check(wanted)
        found.append([got.copy() for got, _, _ in wanted])
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a.view(np.uint8), b.view(np.uint8))


class Session(InterpretedSession):
    """Of a card that has Hopper's kernels."""

    launched: ClassVar[list[list[str]]] = []

    def __init__(self, programs):
        super().__init__(programs, target=Target(arch=90, sms=3))
        self.launched.append([c.spec.name for c in self.lowered["op"].launches])


@pytest.mark.parametrize(
    "D, dtype, groups, packed, modes",
    [(64, "bf16", 2, True, {}), (128, "fp16", 1, False, {}), (64, "bf16", 2, False, {"dk": "add"})],
)
@pytest.mark.extended
def test_the_op_takes_the_kernels_where_they_are_chosen(D, dtype, groups, packed, modes, monkeypatch):
    """And not where a result is added to."""
    subjects = [tuning.AttentionProblem(role, dtype, 2, 131, 2, D, kv_heads=groups % 2) for role in ("keys", "queries")]
    monkeypatch.setattr(Session, "launched", [])
    assert all(attention_config.WARP_SPECIALIZED_BACKWARD[s.operation, D] == s.default(90) for s in subjects)
    attrs = backward_case((2, 131, 2, D), dtype, groups=groups, packed=packed)
    given, views, bounds, scalars = (attrs.pop(name) for name in ("given", "views", "bounds", "scalars"))
    check_case(Case(ops.AttentionBackward, given, attrs, bounds, modes, scalars, None, views), {"": Session})
    keys = "attention_dkv" if modes else "hopper_attention_backward"
    assert Session.launched == [["attention_stats", keys, "hopper_attention_backward"]]


@pytest.mark.parametrize("role", ["keys", "queries"])
@pytest.mark.extended
def test_the_tuner_s_harness_measures_triton_s_beside_them(role, monkeypatch):
    """On the driver in Python: parameters, tensor maps and grid as the compiled code wants them."""
    Gpu(arch=90).install(monkeypatch)
    both = harness.Harness(AttentionProblem(role, "bf16", 2, 70, 2, 64), calls=1)
    other = Candidate(both.problem.configs_in_triton(90)[0], other_bits=True)
    both.check(other)
    (ratios,) = both.time([other], 1)
    assert len(ratios) == 1 and both.case.worst < 1
    both.close()
