"""What the compiler makes of every kernel, against golden.json: registers, spills, shared memory, tensor-core and TMA instructions.

BARELLM_GOLDEN=write python -m pytest tests/cuda/test_golden.py     accepts what it makes now; the commit shows it

Code that a machine has compiled once is in barellm's cache: there, only what has changed is compiled again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from barellm.assembly.build import build_programs
from barellm.assembly.programs import build
from barellm.assembly.quantized import quantize_programs
from barellm.config import OptimConfig
from barellm.cuda import compile as cuda_compile
from barellm.cuda import step, tuning
from barellm.cuda.compile import compiled
from barellm.cuda.kernel import MODES, Lowering, Specialisation, Target
from barellm.cuda.kernels.gemm.hopper import fits_hopper_gemm, launch_hopper_gemm
from barellm.cuda.step import lower_and_plan
from barellm.cuda.tuner.candidates import KERNELS
from barellm.models import HIDDEN, preset
from barellm.models.gpt2 import Config as ModelConfig
from barellm.models.llama3 import Config as Llama
from barellm.optim import normuon
from barellm.optim.adamw import adamw
from barellm.optim.normuon import speedrun_update
from barellm.optim.recipes import optimize
from barellm.program import block_layouts, layouts
from barellm.program.builder import Program, Store
from barellm.program.dtypes import PRECISIONS, Precision
from barellm.program.ops import LayerNormDx, RMSNormDx
from barellm.program.ops.base import Op
from barellm.program.ops.pointwise.tausworthe import GENERATORS
from barellm.program.tensor import Dim, Tensor
from barellm.runtime.ranks import Planned
from tests.cases import COMMON, attention_both, bounded
from tests.cuda.sass import Row, label, row_of, rows, wrong
from tests.gates_cases import small_model
from tests.layout_cases import layout_both
from tests.softcap_cases import transposed_network

pytestmark = pytest.mark.extended

GOLDEN = Path(__file__).with_name("golden.json")
# One block has every shape that twelve have.
GPT2 = ModelConfig(layers=1)
ODD = ModelConfig(layers=1, heads=3, d_model=51, vocab_size=101, padded_vocab=101, max_seq=37)
LLAMA = Llama(layers=1, tied=False)
ODD_LLAMA = Llama(layers=1, heads=6, kv_heads=2, d_model=60, d_ff=51, vocab_size=101, padded_vocab=101, max_seq=37, tied=False)
SMALL = ModelConfig(layers=1, heads=2, d_model=64, vocab_size=320, padded_vocab=320, max_seq=64)


def specs(
    model: ModelConfig | Llama, batch: int, compute: str | Precision, arch: int, *, moments: str = "fp32", tf32: bool = False
) -> dict[Specialisation, str]:
    """Everything that training, evaluation and decoding of a model launch, with the op that needs it."""
    _, programs = build(
        model,
        batch=batch,
        seq=model.max_seq,
        compute=compute,
        optimizer=lambda p: adamw(p, OptimConfig(moments=moments)),
        decode_batch=1,
    )
    return lower_and_plan(programs, Target(arch, tf32=tf32)).specs


def one_of_each(found: dict[Specialisation, str]) -> dict[Specialisation, str]:
    """The first of those that differ in numbers only."""
    forms: dict[tuple, Specialisation] = {}
    for spec in found:
        flat = [(k, v) for k, group in spec.constants for v in (group if isinstance(group, tuple) else (group,))]
        words = tuple((k, v) for k, v in flat if v is None or isinstance(v, str | bool))
        forms.setdefault((spec.name, words, tuple(kind for _, kind in spec.signature)), spec)
    return {spec: found[spec] for spec in forms.values()}


def hopper_products() -> dict[Specialisation, str]:
    """What a product may take along, at GPT-2's widths: also what its programs do not ask for."""
    tokens, N, K = 65536, 3072, 768
    c = Lowering(Op({}, {}), Target(90))

    def matrix(rows: int, cols: int, dtype: str = "bf16") -> Tensor:
        return Tensor("matrix", (rows, cols), dtype, "input")

    def product(role: str, out: Tensor, N: int = N, **operands: Any) -> None:
        shapes = {"nt": ((tokens, K), (N, K)), "nn": ((tokens, N), (N, K)), "tn": ((tokens, N), (tokens, K))}[role]
        given = {"out": out, "a": matrix(*shapes[0]), "b": matrix(*shapes[1]), "rows": lambda s: s.tokens, "most": tokens}
        given |= {"N": N, "K": K, **operands}
        assert fits_hopper_gemm(c, role, **given)
        launch_hopper_gemm(c, role, **given)

    bias = Tensor("bias", (N,), "fp32", "parameter")
    for name in COMMON:
        product("nt", matrix(tokens, N), bias=bias, pre=matrix(tokens, N), epilogue=name)
        product("nt", matrix(tokens, N), pre=matrix(tokens, N), epilogue=name)
        product("nn", matrix(tokens, K), pre=matrix(tokens, K), epilogue=f"{name}_backward")
    product("nt", matrix(tokens, N, "fp32"), bias=bias, residual=matrix(tokens, N, "fp32"), epilogue="residual")
    product("nt", matrix(tokens, N, "fp32"))
    product("nn", matrix(tokens, K, "fp32"), mode=MODES["add"])
    for mode in MODES.values():
        product("tn", matrix(50304, K, "fp32"), N=50304, mode=mode)
    return {launch.spec: "product" for launch in c.launches}


def muon_specs(compute: str) -> dict[Specialisation, str]:
    """What updates GPT-2's matrices by Muon, with everything that it may do."""
    config = OptimConfig(name="muon", normuon=0.95, cautious=True)
    _, programs = build(GPT2, batch=1, seq=8, compute=compute, optimizer=partial(optimize, config=config, hidden=HIDDEN))
    found = lower_and_plan({"optimizer_step": programs["optimizer_step"]}, Target(90)).specs
    return one_of_each({spec: op for spec, op in found.items() if "muon" in op or "gram" in op})


def record_specs() -> dict[Specialisation, str]:
    """What updates the parameters of modded-nanogpt's record 74: a bank of truncated matrices, and its Adam."""
    store, ends = Store(), {}
    for adam in (False, True):
        p = ends[f"adam {adam}"] = Program(store, compute="bf16")
        p.parameter("h.0.attn.qkv", (2304, 768), dtype="bf16_u16")
        p.parameter("values.0", (50304, 768), dtype="bf16_u16", bf16=True)
        for name, shape in (("head", (768, 50304)), ("h.0.attn.gate", (6, 12)), ("resid.attn", (11,))):
            p.parameter(name, shape, bf16=len(shape) == 2)
        speedrun_update(p, normuon.speedrun_rules(OptimConfig(name="muon")), adam=adam)
    return one_of_each({s: op for s, op in lower_and_plan(ends, Target(90)).specs.items() if s.name in RECORD_S})


RECORD_S = ("muon_update", "adamw", "scales_of_means")
LLAMA_S = ("rmsnorm", "layernorm_backward", "rope", "swiglu", "swiglu_backward", "embedding", "append_to_caches",
           "attention_split_kv", "combine_split_kv", *(f"attention_{name}" for name in ("forward", "dkv", "dq")))  # fmt: skip


def llama_specs(model: Llama, batch: int, compute: str) -> dict[Specialisation, str]:
    """Of what a Llama launches that which GPT-2 does not."""
    found = specs(model, batch, compute, 90)
    return one_of_each({spec: op for spec, op in found.items() if spec.name in LLAMA_S})


def transposed_specs(compute: str) -> dict[Specialisation, str]:
    """The speedrun's head, loss and second MLP weight, stored the other way round than GPT-2's."""
    p = Program(Store(), compute=compute)
    transposed_network(p, C=768, F=3072, V=50304, activation="relu2", sizes=(1, 16384))
    p.backward(p.named["loss"])
    found = lower_and_plan({"forward_backward": p}, Target(90)).specs
    return one_of_each({s: op for s, op in found.items() if op.startswith(("softcapped", "matmul"))})


GATES = ("mix", "mix_backward", "gate_logits", "gate_logits_backward", "gated", "gated_backward", "cast_rows")


def gates_specs(compute: str) -> dict[Specialisation, str]:
    """Gates and mixes at GPT-2's width."""
    found = lower_and_plan({"p": small_model(compute, (64, 1024), 768, 6)}, Target(90)).specs
    return {spec: op for spec, op in found.items() if spec.name in GATES}


def unit_scaling_specs() -> dict[Specialisation, str]:
    """What unit scaling launches that GPT-2 does not."""
    found = specs(replace(GPT2, bias=False, unit_scaling=True), 64, "bf16", 90)
    return one_of_each({spec: op for spec, op in found.items() if spec.name == "rescale"})


def ranks_specs() -> dict[Specialisation, str]:
    """What the second of three ranks launches in the update that one process does not, and what it launches on shares."""
    config = preset("gpt2-124m")
    config = replace(config, model=GPT2, train=replace(config.train, micro_batch_size=6, dtype="bf16"))
    found = lower_and_plan({"optimizer_step": build_programs(config, ranks=Planned(1, 3))["optimizer_step"]}, Target(90)).specs
    return one_of_each({s: op for s, op in found.items() if s.name in ("sum_over_ranks", "sum_squares", "adamw")})


def exponents_specs() -> dict[Specialisation, str]:
    """Histograms of an activation in bf16 and of a gradient in fp32."""
    p = Program(Store(), compute="bf16")
    for dtype in ("bf16", "fp32"):
        for t in p.exponent_stats(p.input(dtype, (Dim("batch", 64), Dim("seq", 1024), 768), dtype)):
            p.output(f"{dtype}.{t.dtype}", t)
    return lower_and_plan({"p": p}, Target(90)).specs


def few_bits_specs() -> dict[Specialisation, str]:
    """What decodes with weights of few bits, by each format and in both dtypes of 16 bits."""
    found: dict[Specialisation, str] = {}
    for weights, compute in (("int4", "bf16"), ("int4", "fp16"), ("nf4", "bf16"), ("int8", "bf16")):
        _, programs = build(GPT2, batch=1, seq=8, compute=compute, decode_batch=1)
        programs = {"decode": programs["decode"]}
        quantize_programs(programs, weights)
        found |= {s: op for s, op in lower_and_plan(programs, Target(90)).specs.items() if s.name in FEW_BITS}
    return one_of_each(found)


FEW_BITS = ("quantized_skinny_gemm", "quantized_mma", "dequantize")


def stream_specs() -> dict[Specialisation, str]:
    """Dropout by both generators at GPT-2's width."""
    found: dict[Specialisation, str] = {}
    for bits in GENERATORS:
        model = replace(GPT2, dropout=0.1, dropout_bits=bits)
        found |= {s: op for s, op in specs(model, 64, "bf16", 90).items() if op.startswith("tausworthe_dropout")}
    return found


def layout_specs(compute: str, distances: int = 0) -> dict[Specialisation, str]:
    """Block-sparse attention of heads of 64 columns, forward and backward, in blocks of 64; `distances` have a relative term."""
    layout = layouts.parse("local:128+fixed:256:64", length=1024, block=64, heads=4)
    p = Program(Store(), compute=compute)
    saved, dqkv = layout_both(p, (Dim("batch", 2), Dim("seq", 1024)), layout, D=64, dtype=compute, distances=distances)
    p.output("out", saved.out)
    p.output("dqkv", dqkv)
    return {s: op for s, op in lower_and_plan({"op": p}, Target(90)).specs.items() if s.name.startswith("block_sparse_")}


def block_product_specs(compute: str) -> dict[Specialisation, str]:
    """A product with a matrix of which a quarter of the blocks are there, one column whole, with its gradients."""
    p = Program(Store(), compute=compute)
    rows, side = (Dim("batch", 64), Dim("seq", 1024)), 4096 // 64
    there = block_layouts.spread(side, side, side // 8, 1)
    there[:, 0] = True
    layout = block_layouts.block_layout(there, 64)
    h = p.linear(p.input("x", (*rows, 64), "fp32"), p.parameter("w", (4096, 64)))
    h = p.block_linear(h, p.parameter("blocks", (len(layout) * 64, 64)), layout=layout)
    p.output("loss", p.classifier(h, p.parameter("head", (64, 4096)), p.input("targets", rows), valid_vocab=64))
    p.backward(p.named["loss"])
    found = lower_and_plan({"p": p}, Target(90)).specs
    return one_of_each({s: op for s, op in found.items() if s.function.module.endswith(".block_matmul")})


def row_specs(C: int, compute: str, *, backward: bool) -> dict[Specialisation, str]:
    """Norms of one tensor, forward or backward."""
    p = Program(Store(), compute=compute)
    rows = (Dim("batch", 4096),)
    x, dy, rstd = p.input("x", (*rows, C), compute), p.input("dy", (*rows, C), compute), p.input("rstd", rows, "fp32")
    weight = p.parameter("weight", (C,))
    if backward:
        p.apply(LayerNormDx, dy=dy, x=x, weight=weight, mean=rstd, rstd=rstd)
        p.apply(RMSNormDx, dy=dy, x=x, weight=weight, rstd=rstd)
    else:
        p.layernorm(x, weight, weight), p.rmsnorm(x, weight)
    return lower_and_plan({"p": p}, Target(90)).specs


def branch_scale_specs() -> dict[Specialisation, str]:
    found = specs(GPT2, 64, replace(PRECISIONS["fp16"], branch_scales=True), 90)
    return one_of_each({s: op for s, op in found.items() if s.name in ("gradient_scale", "update_scale")})


TABLES: dict[str, Callable[[], dict[Specialisation, str]]] = {
    "gpt2-124m bf16": lambda: specs(GPT2, 64, "bf16", 90),
    "odd fp32": lambda: one_of_each(specs(ODD, 3, "fp32", 90)),
    "gpt2-124m fp16": lambda: one_of_each(specs(GPT2, 64, "fp16", 90)),
    "branch scales fp16": branch_scale_specs,
    "GEMM in TF32": lambda: one_of_each({s: op for s, op in specs(GPT2, 64, "fp32", 90, tf32=True).items() if s.name == "gemm"}),
    "GEMM on Hopper": hopper_products,
    "llama-124m bf16": lambda: llama_specs(LLAMA, 64, "bf16"),
    "odd Llama fp32": lambda: llama_specs(ODD_LLAMA, 3, "fp32"),
    "speedrun's head bf16": lambda: transposed_specs("bf16"),
    "speedrun's head fp32": lambda: transposed_specs("fp32"),
    "attention over all keys bf16": lambda: attention_specs(64, "bf16", 90, 2, 1, causal=False),
    "attention over all keys fp32": lambda: attention_specs(64, "fp32", 90, 2, 2, causal=False),
    "block-sparse attention bf16": lambda: layout_specs("bf16"),
    "block-sparse attention fp32": lambda: layout_specs("fp32"),
    "attention with relative positions bf16": lambda: layout_specs("bf16", 100),
    "attention with relative positions fp32": lambda: layout_specs("fp32", 100),
    "block-sparse matmul bf16": lambda: block_product_specs("bf16"),
    "block-sparse matmul fp32": lambda: block_product_specs("fp32"),
    "muon bf16": lambda: muon_specs("bf16"),
    "muon fp16": lambda: muon_specs("fp16"),
    "muon fp32": lambda: muon_specs("fp32"),
    "gates bf16": lambda: gates_specs("bf16"),
    "record 74's updates": record_specs,
    "a rank's update": ranks_specs,
    "exponent_stats": exponents_specs,
    "dropout by stream generators": stream_specs,
    "quantized weights": few_bits_specs,
    "unit scaling bf16": unit_scaling_specs,
    "rows of 32k fp32": lambda: row_specs(32768, "fp32", backward=False),
    "rows of 16k bf16": lambda: row_specs(16384, "bf16", backward=False),
    "gradients of rows of 16k fp32": lambda: row_specs(16384, "fp32", backward=True),
    "gradients of rows of 16k bf16": lambda: row_specs(16384, "bf16", backward=True),
}


def golden_table() -> dict[str, dict[str, Row]]:
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def clean(found: dict[str, Row]) -> None:
    """Nothing spills, and nothing else is there that no kernel may have."""
    problems = [text for name, row in found.items() for text in wrong(name, row)]
    assert found and not problems, "\n".join(problems)


def check_golden(name: str, found: dict[str, Row]) -> None:
    clean(found)
    golden = golden_table()
    if os.environ.get("BARELLM_GOLDEN") == "write":
        lines = json.dumps(golden | {name: found}, indent=1, sort_keys=True)
        GOLDEN.write_text(lines + "\n")
        return
    known = golden[name]
    changes = [f"{label}: {found.get(label)}, golden {known.get(label)}" for label in found.keys() | known.keys()
               if found.get(label) != known.get(label)]  # fmt: skip
    assert not changes, "if this is on purpose, BARELLM_GOLDEN=write accepts it:\n" + "\n".join(sorted(changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.extended
def test_kernels_are_the_golden_ones(name):
    check_golden(name, rows(TABLES[name](), 90))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 120])
def test_kernels_of_other_cards_are_the_golden_ones(arch):
    check_golden(f"gpt2-124m bf16 sm_{arch}", rows(one_of_each(specs(GPT2, 64, "bf16", arch)), arch))


FAMILIES = ("columns", "dropout", "elementwise", "embedding", "init", "layernorm", "layernorm_backward", "optimizer")
DROPPED = replace(SMALL, dropout=0.1)
LONG = replace(ODD, heads=330, d_model=33000)  # rows that registers do not hold


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, moments, fused",
    [(DROPPED, "16bit-stochastic", True), (DROPPED, "16bit", False), (LONG, "fp32", False)],
    ids=["dropout and 16-bit moments", "nothing fused", "long rows"],
)
def test_forms_that_the_golden_ones_lack_do_not_spill(model, moments, fused, monkeypatch):
    """Kernels that walk the residual stream and the parameters; what is known of products and attention is above."""
    if not fused:
        monkeypatch.setattr(step, "FUSIONS", [])
    known = {spec.name for spec in specs(ODD, 3, "fp32", 90)} if model is LONG else set()
    needed = one_of_each(specs(model, 2, "bf16", 90, moments=moments))
    families = {s: op for s, op in needed.items() if s.function.module.rpartition(".")[2] in FAMILIES}
    clean(rows({s: op for s, op in families.items() if s.name not in known}, 90))


@pytest.mark.slow
def test_fp32_products_of_a_small_vocabulary_do_not_spill():
    """Widths that no vector divides, and so many tokens that they take the largest tile."""
    model = ModelConfig(layers=1, heads=6, d_model=384, vocab_size=65, padded_vocab=65, max_seq=256)
    found = {s: op for s, op in specs(model, 64, "fp32", 90).items() if s.name == "gemm" and 65 in dict(s.constants).values()}
    assert any(dict(s.constants)["BM"] == 128 for s in found)
    clean(rows(found, 90))


def attention_specs(
    head: int, compute: str, arch: int, heads: int = 1, kv_heads: int = 1, config: Any = None, plain: bool = False, **more
) -> dict[Specialisation, str]:
    """Training's kernels of attention of `heads` heads that share some of keys; `more`: as `bounded` gives it."""
    p = Program(Store(), compute=compute)
    sizes = {"heads": heads, "kv_heads": kv_heads, "D": head, "dtype": compute}
    saved, dqkv = attention_both(p, (Dim("batch", 2), Dim("seq", 64)), **sizes, **more)
    p.output("out", saved.out)
    p.output("dqkv", dqkv)
    found = lower_and_plan({"op": p}, Target(arch, config=config, plain_attention=plain)).specs
    return {s: op for s, op in found.items() if "attention" in s.name}


@pytest.mark.slow
@pytest.mark.parametrize("head, compute", [(256, "fp32"), (512, "fp32"), (512, "bf16")])
def test_attention_of_wide_heads_does_not_spill(head, compute):
    found = attention_specs(head, compute, 90)
    assert len(found) == 4
    clean(rows(found, 90))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, head, paired", [(80, 128, True), (90, 128, False), (90, 64, True), (80, 64, True), (100, 128, True)]
)
@pytest.mark.extended
def test_attention_in_windows_of_documents_does_not_spill(arch, head, paired):
    bounds = bounded(768, scale=0.1, starts=[400], paired=paired)
    found = attention_specs(head, "bf16", arch, 2, 2, **bounds)
    assert len(found) == 4
    clean(rows(found, arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch, head", [(80, 256), (90, 256), (90, 128), (120, 128)])
@pytest.mark.extended
def test_attention_with_a_soft_cap_does_not_spill(arch, head):
    """Heads of Gemma 2, whose keys two queries' heads share: 256 columns, and 128 of the model with 27B parameters."""
    found = attention_specs(head, "bf16", arch, 2, 1, softcap=50.0, scale=head**-0.5)
    assert len(found) == 4
    clean(rows(found, arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch, head", [(90, 64), (90, 128), (80, 128)])
def test_no_tile_that_the_tuner_tries_for_attention_spills(arch, head):
    found: dict[Specialisation, str] = {}
    for role, heads in (*((role, 1) for role in KERNELS), ("keys", 4)):
        key = tuning.AttentionProblem(role, "bf16", 2, 64, heads, head, kv_heads=int(heads > 1))
        for t in key.all_configs(arch):
            specs = attention_specs(head, "bf16", arch, heads, config={role: t})
            found |= {s: op for s, op in specs.items() if heads == 1 or s.name in KERNELS[role]}
    assert len(found) >= 8
    clean(rows(found, arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 100])
@pytest.mark.extended
def test_kernels_compile_for_other_cards(arch):
    """The smallest model whose widths are multiples of 64, in bf16. Products are done by tensor cores there too."""
    needed = one_of_each(specs(SMALL, 2, "bf16", arch))

    def check(found: dict[str, Row]) -> None:
        for spec in list(needed)[::16]:  # all are disassembled together
            assert found[label(spec)] == row_of(compiled([spec], arch, processes=1)[spec])
        assert not [name for name, row in found.items() if row["spills"]]
        products = {name: row for name, row in found.items() if name.startswith("gemm ")}
        assert products and not any(name.startswith("hopper_gemm") for name in found)
        for name, row in products.items():
            assert row.get("HMMA") or row.get("UTCHMMA"), name

    check(rows(needed, arch))


def test_a_kernel_that_spills_is_flagged():
    """A product with 32 registers for each thread."""
    (spec,) = [s for s in specs(ODD, 3, "fp32", 90) if s.name == "gemm" and "'gelu'" in str(s.constants)]
    tight = replace(spec, options=(*spec.options, ("maxnreg", 32)))
    (whole, spilled), found = compiled([spec, tight], 90, processes=1).values(), rows({spec: "", tight: ""}, 90)
    assert [*found.values()] == [row_of(whole), row_of(spilled)]  # disassembled together as alone
    assert not wrong("whole", row_of(whole))
    (problem,) = wrong("spilled", row_of(spilled))
    assert "spill" in problem


def test_products_that_ptxas_ran_one_at_a_time_are_flagged(monkeypatch):
    """Gradients of keys and values, mended and as Triton leaves them. Compiled past the cache, which must not keep the latter."""
    (spec,) = [s for s in attention_specs(64, "bf16", 90, plain=True) if s.name in KERNELS["keys"]]

    def problems() -> list[str]:
        return wrong("keys", row_of(cuda_compile.code_of(spec, cuda_compile.triton_compile(spec, 90), 90)))

    assert not problems()
    monkeypatch.setattr(cuda_compile, "with_wgmma_waits", lambda ptx: ptx)
    (problem,) = problems()
    assert "serialized" in problem
