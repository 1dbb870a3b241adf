"""Fused programs give the same bits as unfused ones, and what must not fuse does not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.assembly.quantized import quantize_programs
from barellm.config import OptimConfig
from barellm.cpu.fuse import FUSIONS
from barellm.models.gpt2 import Config as ModelConfig
from barellm.optim.adamw import adamw
from barellm.program import ops
from barellm.program.builder import Program, Store
from barellm.program.fusion import FusedOp, Fusion, fuse
from barellm.program.tensor import PERSISTENT
from barellm.runtime.reference import ReferenceSession
from tests.cases import network, scaled_network
from tests.fp8_cases import STATIC
from tests.llama import llama
from tests.program.graphs import Leaf, random_graph, run_graph
from tests.softcap_cases import transposed_network

LINEAR_GELU = Fusion(
    "linear_gelu",
    sequence=[("matmul", {}), ("bias", {"x": "0.y"}), ("gelu", {"x": "1.y"})],
    inputs={"x": "0.x", "weight": "0.weight", "bias": "1.bias"},
    outputs={"pre": "1.y", "y": "2.y"},
)
TABLE = [
    LINEAR_GELU,
    Fusion(
        "linear_add",
        sequence=[("matmul", {}), ("bias", {"x": "0.y"}), ("add", {"b": "1.y"})],
        inputs={"x": "0.x", "weight": "0.weight", "bias": "1.bias", "a": "2.a"},
        outputs={"y": "2.y"},
    ),
    Fusion(
        "linear",
        sequence=[("matmul", {}), ("bias", {"x": "0.y"})],
        inputs={"x": "0.x", "weight": "0.weight", "bias": "1.bias"},
        outputs={"y": "1.y"},
    ),
    Fusion(
        "add_layernorm",
        sequence=[("add", {}), ("layernorm", {"x": "0.y"})],
        inputs={"a": "0.a", "b": "0.b", "weight": "1.weight", "bias": "1.bias"},
        outputs={"sum": "0.y", "y": "1.y", "mean": "1.mean", "rstd": "1.rstd"},
        optional=("bias",),
    ),
    Fusion(  # siblings: linked through a tensor that both read
        "layernorm_backward",
        sequence=[("layernorm_dx", {}), ("layernorm_dparams", {"dy": "0.dy", "x": "0.x"})],
        inputs={**{k: f"0.{k}" for k in ("dy", "x", "weight", "mean", "rstd")}, "mean2": "1.mean", "rstd2": "1.rstd"},
        outputs={"dx": "0.dx", "dweight": "1.dweight", "dbias": "1.dbias"},
    ),
    Fusion(
        "classifier",
        sequence=[
            ("matmul", {}),
            ("cross_entropy", {"logits": "0.y"}),
            ("cross_entropy_backward", {"logits": "0.y", "lse": "1.lse", "targets": "1.targets"}),
            ("matmul_dx", {"dy": "2.dlogits", "weight": "0.weight"}),
            ("matmul_dw", {"dy": "2.dlogits", "x": "0.x"}),
        ],
        inputs={"x": "0.x", "weight": "0.weight", "targets": "1.targets"},
        outputs={"loss": "1.loss", "dx": "3.dx", "dweight": "4.dweight"},
    ),
]
MODEL = ModelConfig(layers=2, heads=2, d_model=8, vocab_size=11, padded_vocab=13, max_seq=6)


def run_model(table, *, recompute: bool = False, dropout: float = 0.0, bias: bool = True, compute: str = "bf16", **options):
    optimizer = partial(adamw, config=OptimConfig())
    _, programs = build(
        replace(MODEL, dropout=dropout, bias=bias), batch=2, seq=5, optimizer=optimizer, recompute=recompute, compute=compute
    )
    session = ReferenceSession(programs, table=table, **options)
    rng = np.random.default_rng(0)
    session.run("init", seed=2)
    for accumulate in (0, 1):
        session.write("tokens", rng.integers(0, 11, (2, 5)))
        session.write("targets", rng.integers(-1, 11, (2, 5)))
        session.run("forward_backward", accumulate=accumulate, inv_targets=0.1, step=1, sample=2 * accumulate)
    session.run("optimizer_step", step=1, lr=1e-3)
    return session, {name: session.read(name) for name in session.tensors}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_fused_model_gives_the_same_bits(recompute, dropout):
    _, expected = run_model([], recompute=recompute, dropout=dropout)
    session, found = run_model(TABLE, recompute=recompute, dropout=dropout)
    names = [op.name for op in session.ops["forward_backward"]]
    missing = {row.name for row in TABLE} - set(names)
    assert missing == {"linear_add" if dropout else "add_layernorm"}  # the earlier row took the adds
    assert "cross_entropy" not in names and "gelu" not in names
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_tables_of_the_backends_give_the_same_bits(bias, dropout, compute):
    options = {"dropout": dropout, "bias": bias, "compute": compute, "recompute": True}
    _, expected = run_model([], **options)
    session, found = run_model(FUSIONS, **options)
    assert any(isinstance(op, FusedOp) for op in session.ops["forward_backward"])
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_every_row_of_the_backends_tables_is_used():
    used = set()
    for bias, dropout, compute in product((True, False), (0.0, 0.2), ("bf16", "fp32")):
        session, _ = run_model(FUSIONS, bias=bias, dropout=dropout, compute=compute)
        used |= {op.fusion for ops_ in session.ops.values() for op in ops_ if isinstance(op, FusedOp)}
    for activation, bias in product(ops.ACTIVATIONS, (True, False)):
        p = Program(Store())
        network(p, bias=bias, C=4, F=8, V=7, activation=activation)
        p.backward(p.named["loss"])
        used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    for activation, train in product(ops.ACTIVATIONS, (True, False)):
        p = Program(Store())
        transposed_network(p, C=4, F=8, V=7, activation=activation, transposed=activation != "silu")
        if train:
            p.backward(p.named["loss"])
        used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    p = Program(Store())
    transposed_network(p, C=4, F=8, V=7, activation="relu2", scaling=STATIC)
    p.backward(p.named["loss"])
    used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    for compute in ("bf16", "fp32"):
        p = Program(Store(), compute=compute)
        llama(p)
        p.backward(p.named["loss"])
        used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    for activation in ops.ACTIVATIONS:
        p = Program(Store())
        scaled_network(p, C=4, F=8, V=7, activation=activation)
        p.backward(p.named["loss"])
        used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    for activation, bias in product(ops.ACTIVATIONS, (True, False)):
        p = Program(Store())
        network(p, bias=bias, C=4, F=8, V=7, activation=activation)
        quantize_programs({"eval": p}, "int8")
        used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    for coded in (True, False):
        p = Program(Store())
        network(p, bias=True, C=4, F=8, V=7)
        p.score_tokens()
        if coded:
            quantize_programs({"score": p}, "int8")
        used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    p = Program(Store(), compute="bf16")  # with frozen parameters but for the first matrix
    p.store.trains = lambda name: name == "in.weight"
    network(p, bias=True, C=4, F=8, V=7)
    p.backward(p.named["loss"])
    used |= {op.fusion for op in fuse(p.ops, FUSIONS) if isinstance(op, FusedOp)}
    assert len(used) == len(FUSIONS), [row.name for row in FUSIONS if row not in used]


def test_fused_ops_keep_costs_names_and_attributes():
    session, _ = run_model(TABLE)
    plain, _ = run_model([])
    for program in ("forward_backward", "eval"):
        assert sum(o.flops() for o in session.ops[program]) == sum(o.flops() for o in plain.ops[program])
    fused = next(op for op in session.ops["forward_backward"] if op.name == "classifier")
    assert set(fused.inputs) == {"x", "weight", "targets"} and set(fused.outputs) == {"loss", "dx", "dweight"}
    assert fused.modes == {"loss": "store", "dx": "store", "dweight": "start"}
    assert fused.attrs["valid_vocab"] == 11 and fused.valid_vocab == 11
    assert fused.scalars == ("inv_targets",) and fused.rounded == ("weight",)
    block = next(op for op in session.ops["forward_backward"] if op.name == "linear_gelu")
    assert block.segment == "h.0" and block.pre.shape == block.y.shape


def test_a_fused_reference_is_its_sequence():
    rng = np.random.default_rng(0)
    session, _ = run_model(TABLE)
    op = next(op for op in session.ops["forward_backward"] if op.name == "linear_gelu")
    x, w, b = rng.normal(size=(2, 5, 8)), rng.normal(size=(32, 8)), rng.normal(size=32)
    found = op.reference(x=x, weight=w, bias=b)
    np.testing.assert_array_equal(found["pre"], x @ w.T + b)
    np.testing.assert_array_equal(found["y"], ops.ACTIVATIONS["gelu"].forward.reference(op.sequence[2], x=x @ w.T + b)["y"])


def graph_with_gelu() -> tuple[Program, dict]:
    p = Program(Store())
    x = p.apply(Leaf, x=p.parameter("x", (2, 3, 4))).y
    made = {"x": x, "m": p.apply(ops.Matmul, x=x, weight=p.parameter("w", (4, 4))).y}
    made["b"] = p.apply(ops.Bias, x=made["m"], bias=p.parameter("bias", (4,))).y
    return p, made


def names(p: Program, table=(LINEAR_GELU,)) -> list[str]:
    return [op.name for op in fuse(p.ops, table)]


def test_ops_need_not_be_neighbours():
    p, made = graph_with_gelu()
    p.add(made["x"], made["x"])
    p.gelu(made["b"])
    assert names(p) == ["leaf", "add", "linear_gelu"]


def test_an_intermediate_read_elsewhere_is_not_fused():
    p, made = graph_with_gelu()
    p.gelu(made["b"])
    p.gelu(made["m"])
    assert names(p) == ["leaf", "matmul", "bias", "gelu", "gelu"]


def test_an_intermediate_that_is_an_output_is_not_fused():
    p, made = graph_with_gelu()
    p.gelu(made["b"])
    p.output("seen", made["m"])
    assert "linear_gelu" not in names(p)


def test_an_output_read_before_the_last_op_is_not_fused():
    p, made = graph_with_gelu()
    p.gelu(p.apply(Leaf, x=made["b"]).y)  # reads "pre" before the gelu that would be fused with it
    p.gelu(made["b"])
    assert names(p) == ["leaf", "matmul", "bias", "leaf", "gelu", "gelu"]


@pytest.mark.parametrize("target", ["x", "b"])
def test_crossing_a_writer_is_refused(target):
    p, made = graph_with_gelu()
    p.apply(Leaf, x=made["x"], into={"y": (made[target], "add")})
    p.gelu(made["b"])
    assert "linear_gelu" not in names(p)


def test_only_optional_operands_may_be_absent_and_every_operand_must_be_listed():
    p = Program(Store())
    x = p.apply(Leaf, x=p.parameter("x", (2, 3, 4))).y
    p.layernorm(p.add(x, x), p.parameter("g", (4,)))
    row = next(r for r in TABLE if r.name == "add_layernorm")
    assert "add_layernorm" in names(p, [row])
    strict = Fusion(row.name, row.sequence, row.inputs, row.outputs)
    assert "add_layernorm" not in names(p, [strict])
    short = Fusion(row.name, row.sequence, {k: v for k, v in row.inputs.items() if k != "weight"}, row.outputs)
    assert "add_layernorm" not in names(p, [short])
    never = Fusion(row.name, row.sequence, row.inputs, row.outputs, row.optional, when=lambda match: False)
    assert "add_layernorm" not in names(p, [never])


def test_a_row_that_hangs_together_by_nothing_is_refused():
    with pytest.raises(ValueError, match="must be linked"):
        Fusion("two", [("matmul", {}), ("gelu", {})], {}, {})
    with pytest.raises(ValueError, match="must be linked"):
        Fusion("ahead", [("matmul", {}), ("gelu", {"x": "1.y"})], {}, {})


def random_row(ops_: list, rng: np.random.Generator) -> Fusion | None:
    """A row cut out of a program: a few ops that hang together, any subset of their outputs shown."""
    chosen = [ops_[rng.integers(len(ops_))]]
    for _ in range(rng.integers(1, 4)):
        near = [
            op
            for op in ops_
            if op not in chosen
            and any(t in c.outputs.values() or t in c.inputs.values() for c in chosen for t in op.inputs.values())
        ]
        if near:
            chosen.append(near[rng.integers(len(near))])
    if len(chosen) < 2:
        return None
    if rng.integers(2):
        chosen.sort(key=ops_.index)
    sequence, inputs, seen = [], {}, {}
    for i, op in enumerate(chosen):
        links = {}
        for name, t in op.inputs.items():
            if t in seen:
                links[name] = seen[t]
            else:
                inputs[f"in{i}_{name}"] = f"{i}.{name}"
        seen |= {t: f"{i}.{name}" for name, t in op.inputs.items() if t not in seen}
        seen |= {t: f"{i}.{name}" for name, t in op.outputs.items()}
        sequence.append((op.name, links))
    shown = {f"out{i}_{n}": f"{i}.{n}" for i, op in enumerate(chosen) for n in op.outputs if rng.integers(4)}
    try:
        return Fusion("random", sequence, inputs, shown)
    except ValueError:
        return None


@pytest.mark.extended
def test_random_rows_on_random_graphs_change_nothing():
    fused = 0
    for seed in range(150):
        p = random_graph(seed, length=2 + seed % 8)
        p.backward(p.named["loss"], recompute=seed % 3 == 0)
        rng = np.random.default_rng(seed)
        table = [row for row in (random_row(p.ops, rng) for _ in range(8)) if row]
        fused += sum(isinstance(op, FusedOp) for op in fuse(p.ops, table))
        expected, found = run_graph(p), run_graph(p, table=table)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"seed {seed}: {name}")
    assert fused > 150


def test_no_fused_op_hides_a_persistent_tensor():
    session, _ = run_model(TABLE, recompute=True)
    plain, _ = run_model([], recompute=True)
    for a, b in zip(session.ops.values(), plain.ops.values(), strict=True):
        written = [{t.name for op in x for t in op.outputs.values() if t.role in PERSISTENT} for x in (a, b)]
        assert written[0] == written[1]
