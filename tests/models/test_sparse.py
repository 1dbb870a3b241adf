"""The model with a layout: against its reference at several lengths, against the dense model, and what it asks of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.config import OptimConfig
from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.models import hidden
from barellm.models.sparse import Config, _graphs
from barellm.optim.recipes import rules_for
from barellm.optim.rules import assign_rules
from barellm.runtime.reference import ReferenceSession

SMALL = Config(
    layers=2, heads=3, d_model=24, vocab_size=13, padded_vocab=13, max_seq=70, block=16,
    layout="local:9, watts-strogatz:2:0.5:1, fixed:20:3",
)  # fmt: skip


def sessions(config: Config, *kinds, **more):
    """A session of each kind with the same weights."""
    programs = {name: p for name, p in build(config, **more)[1].items() if p.ops}
    found = [kind(programs) for kind in kinds]
    found[0].run("init", seed=3)
    for name, t in found[0].tensors.items():
        for other in found[1:]:
            if t.role == "parameter":
                other.write(name, found[0].read(name))
    return found


@pytest.mark.parametrize("relative", [0, 21])
@pytest.mark.extended
def test_every_length_has_the_gradients_of_the_reference(relative):
    config = replace(SMALL, relative=relative)
    ours, oracle = sessions(config, CpuSession, ReferenceSession, batch=2, seq=70, optimizer=lambda p: None)
    for seq in (70, 37, 1):
        tokens = np.random.default_rng(seq).integers(0, 13, (2, seq))
        for s in (ours, oracle):
            s.write("tokens", tokens)
            s.write("targets", tokens)
            s.run("forward_backward", batch=2, seq=seq, accumulate=0, pos=0, inv_targets=0.1)
        found = [name for name, t in ours.tensors.items() if t.role == "gradient"]
        for name in found:
            np.testing.assert_allclose(ours.read(name), oracle.read(name), rtol=1e-3, atol=2e-5, err_msg=name)
        assert sum("relative" in name for name in found) == (2 if relative else 0), "one tensor for each layer"
    ours.close()


def test_relative_terms_begin_as_none_and_change_what_is_seen():
    """At 0 the model is the one without them; adamw, not muon, updates them."""
    tokens, found = np.random.default_rng(0).integers(0, 13, (1, 70)), []
    (s,) = sessions(replace(SMALL, relative=8), ReferenceSession, batch=1, seq=70)
    for value in (0.0, 1.0):
        vectors = np.zeros((8, 24))
        vectors[3] = value
        s.write("h.1.attn.relative", vectors)
        found.append(loss_of(s, tokens))
    assert found[0] == pytest.approx(losses(SMALL, tokens), rel=1e-12) and abs(found[1] - found[0]) > 1e-9
    rules_of = {t.name: type(rule.optimizer).__name__ for t, rule in _assigned(replace(SMALL, relative=8))}
    assert rules_of["h.0.attn.relative"] == "AdamW"


MLPS = replace(SMALL, d_model=48, mlp_layout="watts-strogatz:2:0.5:1", mlp_block=8, mlp_width=5)


def test_a_small_world_has_the_gradients_of_the_reference():
    ours, oracle = sessions(MLPS, CpuSession, ReferenceSession, batch=2, seq=37, optimizer=lambda p: None)
    tokens = np.random.default_rng(1).integers(0, 13, (2, 37))
    for s in (ours, oracle):
        s.write("tokens", tokens)
        s.write("targets", tokens)
        s.run("forward_backward", batch=2, seq=37, accumulate=0, pos=0, inv_targets=0.1)
    blocks = [name for name, t in ours.tensors.items() if t.role == "gradient" and ".blocks" in name]
    assert len(blocks) == 4, "two matrices in each of two layers"
    for name in blocks:
        assert ours.tensors[name].shape == (30 * 2 * 8, 8), "each of 30 blocks of hidden columns has two links"
        np.testing.assert_allclose(ours.read(name), oracle.read(name), rtol=1e-3, atol=2e-5, err_msg=name)
    ours.close()


def test_a_whole_graph_is_a_dense_mlp():
    """With every block linked, and the same numbers in the matrices, the losses are equal: no layer and no side is mixed up."""
    config = replace(SMALL, mlp_layout="spread:3:1", mlp_block=8)
    (sparse,), (dense,) = (sessions(c, ReferenceSession, batch=1, seq=70) for c in (config, SMALL))
    for name, t in sparse.tensors.items():
        if t.role != "parameter":
            continue
        values = sparse.read(name)
        if name.endswith(".blocks"):
            fc, proj = _graphs(config, int(name.split(".")[1]))
            values, name = (fc if "c_fc" in name else proj).dense(values).T, name.replace("blocks", "weight")
        dense.write(name, values)
    tokens, found = np.random.default_rng(0).integers(0, 13, (1, 70)), []
    for s in (sparse, dense):
        s.write("tokens", tokens)
        s.write("targets", tokens)
        s.run("eval", batch=1, seq=70, pos=0, inv_targets=1 / 70)
        found.append(float(s.read("loss")[0]))
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_graphs_of_layers_differ_and_muon_leaves_blocks_alone():
    first, second = (_graphs(MLPS, layer)[0].places for layer in (0, 1))
    assert not np.array_equal(first, second)
    found = {t.name: rule.optimizer for t, rule in _assigned(MLPS)}
    kinds = {name: type(found[f"h.0.{name}"]).__name__ for name in ("attn.c_proj.weight", "mlp.c_fc.blocks")}
    assert kinds == {"attn.c_proj.weight": "Muon", "mlp.c_fc.blocks": "AdamW"}


def _assigned(config: Config):
    params = build(config, batch=1, seq=8)[0].of_role("parameter")
    return assign_rules(rules_for(OptimConfig(name="muon"), hidden(config)), params)


def losses(config: Config, tokens: np.ndarray) -> float:
    (s,) = sessions(config, ReferenceSession, batch=1, seq=70)
    return loss_of(s, tokens)


def loss_of(s: ReferenceSession, tokens: np.ndarray) -> float:
    s.write("tokens", tokens)
    s.write("targets", tokens)
    s.run("eval", batch=1, seq=70, pos=0, inv_targets=1 / 70)
    return float(s.read("loss")[0])


def test_a_layout_of_all_blocks_is_the_dense_model():
    tokens = np.random.default_rng(0).integers(0, 13, (1, 70))
    dense, whole, few = (losses(replace(SMALL, layout=text), tokens) for text in ("", "all", SMALL.layout))
    assert whole == pytest.approx(dense, rel=1e-12) and abs(few - dense) > 1e-9


def test_fewer_planned_positions_give_the_same_logits():
    """A graph of fewer blocks is the first part of the whole one, not another graph."""
    tokens, logits = np.random.default_rng(0).integers(0, 13, (1, 41)), []
    for planned in (70, 41):
        (s,) = sessions(SMALL, ReferenceSession, decode_batch=1, decode_seq=planned)
        s.write("tokens", tokens)
        s.run("decode", batch=1, seq=41, pos=0)
        logits.append(s.read("logits"))
    np.testing.assert_allclose(*logits, rtol=1e-12)


def test_memory_is_linear_in_the_length():
    from barellm.cpu.step import lower_and_plan

    def arena(seq: int) -> int:
        config = replace(SMALL, max_seq=8192, block=64, layout="local:128", relative=100)
        _, programs = build(config, batch=1, seq=seq, optimizer=lambda p: None)
        built = lower_and_plan(programs, threads=2)
        return built.plan.arena_bytes - built.thread_scratch.nbytes  # threads' scratch follows from the blocks that are chosen

    sizes = [arena(seq) for seq in (2048, 4096, 8192)]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.01)


def test_a_layout_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"model\.layout: unknown pattern 'lokal'"):
        replace(SMALL, layout="lokal:3")
    with pytest.raises(UserError, match=r"model\.block is 40, expected a multiple of 16 up to 128"):
        replace(SMALL, block=40)
    with pytest.raises(UserError, match=r"model\.relative is 71, expected from 0 to model\.max_seq, 70"):
        replace(SMALL, relative=71)
    with pytest.raises(UserError, match=r"model\.relative is 8 and model\.layout is empty, expected a layout"):
        replace(SMALL, relative=8, layout="")
    with pytest.raises(UserError, match=r"model\.mlp_layout is 'local:3', expected one of watts-strogatz"):
        replace(SMALL, mlp_layout="local:3")
    with pytest.raises(UserError, match=r"model\.mlp_block is 32, expected a divisor of model\.d_model, 24"):
        replace(SMALL, mlp_layout="spread:2:1")
