"""Observers in a training step: they see what the step makes, change none of it, and their names are those of the layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.cpu.step import CpuSession
from barellm.models.gpt2 import Config as GPT2
from barellm.models.llama3 import Config as Llama
from barellm.optim.adamw import adamw
from barellm.program.dynamic_range import tensor_stats
from barellm.program.exponent_stats import COUNTS, TOTALS, tensors_with_stats
from barellm.program.ops.optim.exponent_stats import BINS, SUMS
from barellm.runtime.reference import ReferenceSession
from tests.cases import normal

MODEL = GPT2(layers=2, heads=3, d_model=33, vocab_size=29, padded_vocab=31, max_seq=13)
LLAMA = Llama(layers=1, heads=4, kv_heads=2, d_model=32, d_ff=40, vocab_size=29, padded_vocab=31, max_seq=13)
BATCH, SEQ = 3, 11


def programs(model, compute: str = "fp32", **more):
    return build(
        model, batch=BATCH + 1, seq=SEQ, compute=compute, optimizer=lambda p: adamw(p, OptimConfig()), ranges=True, **more
    )[1]


def found(make, built) -> tuple[dict, Any]:
    """(name, kind) -> magnitudes of what a step of random weights observes, and the session."""
    session = make(built)
    for name, t in session.tensors.items():
        if t.role == "parameter":
            values = 0.1 * normal(*t.shape, seed=len(name))
            values[t.valid_rows :] = 0.0
            session.write(name, values + ("ln" in name and "weight" in name))
    counts, sums = (np.zeros(session.tensors[name].shape, np.int32) for name in (COUNTS, TOTALS))
    session.write(COUNTS, counts)
    session.write(TOTALS, sums)
    r = np.random.default_rng(0)
    for name in ("tokens", "targets"):
        session.write(name, r.integers(0, 29, (BATCH, SEQ)))
    session.run("forward_backward_stats", batch=BATCH, seq=SEQ, accumulate=0, inv_targets=0.25, step=1)
    counts, sums = session.read(COUNTS).reshape(-1, BINS), session.read(TOTALS).reshape(-1, len(SUMS))
    seen = {
        (t.name, t.kind): tensor_stats(counts[t.number], sums[t.number])
        for t in tensors_with_stats(built["forward_backward_stats"])
    }
    return {key: m for key, m in seen.items() if m.size}, session


SESSIONS = {"cpu": CpuSession, "reference": lambda programs: ReferenceSession(programs, dtype="float32")}


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("backend", SESSIONS)
@pytest.mark.extended
def test_gradients_are_complete_where_they_are_looked_at(backend, recompute):
    """A bias has the sum of the gradient that it is added to, and the positions that of the residual stream's beginning."""
    seen, session = found(SESSIONS[backend], programs(MODEL, recompute=recompute))
    sums = {
        "h.{}.attn.c_attn": "h.{}.attn.c_attn.bias",
        "h.{}.mlp.c_fc": "h.{}.mlp.c_fc.bias",
        "h.{}.add": "h.{}.attn.c_proj.bias",
        "h.{}.add.2": "h.{}.mlp.c_proj.bias",
        "h.{}.ln_1": "h.{}.ln_1.bias",
        "h.{}.ln_2": "h.{}.ln_2.bias",
        "ln_f": "ln_f.bias",
        "embedding": "wpe",
    }
    for layer in range(2):
        for name, parameter in sums.items():
            m = seen[name.format(layer), "gradient"]
            grad = session.read(parameter.format(layer) + ".grad")
            assert m.total == pytest.approx(grad.sum(dtype=np.float64), abs=1e-5 * m.total_abs), name
            assert m.size == BATCH * SEQ * (99 if "c_attn" in name else 132 if "c_fc" in name else 33), name
    for name, t in session.tensors.items():
        for kind, of in (("weight", name), ("weight gradient", f"{name}.grad")):
            if t.role == "parameter":
                values = np.abs(session.read(of).astype(np.float64))
                m = seen[name, kind]
                assert m.largest == values.max() and m.rms == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5)
                octaves = [((values >= x) & (values < 2 * x)).sum() for x in 2.0 ** np.arange(-7, -4)]
                np.testing.assert_array_equal(m.counts[120:123], octaves)
    # Unit weights and small ones around them: rows of normalised numbers.
    assert seen["h.1.ln_2", "activation"].rms == pytest.approx(1.0, abs=0.1)
    if backend == "cpu":
        assert ("h.0.mlp.c_proj", "activation") not in seen, "it is fused to the addition"
        session.close()


@pytest.mark.parametrize("model, compute", [(MODEL, "bf16"), (LLAMA, "fp32")], ids=["gpt2 bf16", "llama3 fp32"])
@pytest.mark.extended
def test_a_step_that_is_looked_at_makes_the_same_calls_and_bits(model, compute):
    built = programs(model, compute)
    seen, session = found(CpuSession, built)
    plain, watched = (
        [(repr(op), [c.spec for c in low.of[op].calls]) for op in low.ops if not op.observer]
        for low in (session.lowered[name] for name in ("forward_backward", "forward_backward_stats"))
    )
    assert plain == watched
    gradients = {name: session.read(name) for name, t in session.tensors.items() if t.role == "gradient"}
    loss = session.read("loss")
    session.run("forward_backward", batch=BATCH, seq=SEQ, accumulate=0, inv_targets=0.25, step=1)
    assert session.read("loss") == loss and seen
    assert all((session.read(name) == values).all() for name, values in gradients.items())
    session.close()


def test_nothing_is_planned_unless_it_is_asked_for():
    _, built = build(MODEL, batch=2, seq=8, optimizer=lambda p: adamw(p, OptimConfig()))
    assert "forward_backward_stats" not in built and not {COUNTS, TOTALS} & built["forward_backward"].store.tensors.keys()
    assert not any(op.observer for p in built.values() for op in p.ops)


def test_names_are_those_of_layers_and_no_two_are_equal():
    """The embedding and the logits are made by one weight."""
    for model, pairs in ((LLAMA, {"wte", "wte.2"}), (MODEL, {"embedding", "h.1.add", "h.1.add.2"})):
        names = [(t.kind, t.name) for t in tensors_with_stats(programs(model)["forward_backward_stats"])]
        assert len(set(names)) == len(names)
        assert {("activation", name) for name in pairs} <= set(names)
