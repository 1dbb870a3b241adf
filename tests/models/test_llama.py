"""Llama as a program: names, shapes, caches; and its presets from the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.models import gpt2
from barellm.models.llama3 import Config
from barellm.runtime.reference import ReferenceSession
from barellm.training import metrics

SMALL = Config(layers=3, heads=4, kv_heads=2, d_model=64, d_ff=72, vocab_size=90, padded_vocab=128, max_seq=40, tied=False)


def test_names_shapes_and_order():
    store, _ = build(SMALL)
    shapes = {t.name: tuple(t.shape) for t in store.of_role("parameter")}
    block = {
        "attn_norm.weight": (64,),
        "attn.qkv.weight": ((4 + 2 * 2) * 16, 64),
        "attn.proj.weight": (64, 64),
        "mlp_norm.weight": (64,),
        "mlp.gate_up.weight": (2 * 72, 64),
        "mlp.down.weight": (64, 72),
    }
    blocks = {f"h.{i}.{name}": shape for i in range(3) for name, shape in block.items()}
    expected = {"wte": (128, 64), **blocks, "norm.weight": (64,), "head": (128, 64)}
    assert list(shapes.items()) == list(expected.items())
    tied, _ = build(replace(SMALL, tied=True))
    assert [t.name for t in tied.of_role("parameter")] == list(expected)[:-1]


OPTIONS = {  # what changes -> names and shapes of one block's parameters
    "heads of their own size": ({"head_dim": 10}, {"attn.qkv.weight": (80, 64), "attn.proj.weight": (64, 40)}),
    "norms of heads": (
        {"qk_norm": "head", "attention_bias": "qkv"},
        {
            "attn.q.weight": (64, 64), "attn.q.bias": (64,), "attn.k.weight": (32, 64), "attn.k.bias": (32,),
            "attn.v.weight": (32, 64), "attn.v.bias": (32,), "attn.q_norm.weight": (16,), "attn.k_norm.weight": (16,),
        },
    ),
    "norms of rows, and behind": (
        {"qk_norm": "row", "norm_position": "post"},
        {
            "attn.q_norm.weight": (64,), "attn.k_norm.weight": (32,), "attn_post_norm.weight": (64,),
            "mlp_post_norm.weight": (64,),
        },
    ),
    "biases and LayerNorms": (
        {"norm": "layer", "attention_bias": "all", "mlp_bias": True, "mlp": "plain", "activation": "gelu_erf"},
        {
            "attn_norm.bias": (64,), "attn.qkv.bias": (128,), "attn.proj.bias": (64,), "mlp.up.weight": (72, 64),
            "mlp.up.bias": (72,), "mlp.down.bias": (64,),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_parameters(name):
    change, block = OPTIONS[name]
    shapes = {t.name: tuple(t.shape) for t in build(replace(SMALL, **change))[0].of_role("parameter")}
    assert block == {key: shapes.get(f"h.2.{key}") for key in block}
    if change.get("norm_position") == "post":
        assert not any("attn_norm" in key or "mlp_norm" in key for key in shapes)


def test_layers_without_rope_and_a_part_of_a_head():
    """A column that does not turn has cosine 1 and sine 0; layers with a window have tables of their own."""
    cfg = replace(SMALL, rotary_fraction=0.5, nope_layers="0", sliding_window=5, window_layers="1", rope_local_theta=90.0)
    store, programs = build(cfg, batch=1, seq=8, optimizer=lambda p: None)
    tables = [op.cos.name for op in programs["forward_backward"].ops if op.name == "rope" and not op.inverse]
    assert tables == ["rope_local.cos", "rope.cos"]
    windows = {op.name: op.sliding_window for op in programs["forward_backward"].ops if op.name == "attention"}
    assert windows == {"attention": 0} and [cfg.window_of(i) for i in range(3)] == [0, 5, 0]
    cos, sin = (store.tensors[f"rope.{name}"].value for name in ("cos", "sin"))
    assert cos is not None and sin is not None
    assert (sin[:, 4:] == 0).all() and (cos[:, 4:] == 1).all() and np.allclose(np.hypot(cos, sin), 1)
    plain = build(replace(SMALL, nope_layers="0,2"), batch=1, seq=8, optimizer=lambda p: None)[1]["forward_backward"]
    assert sum(op.name == "rope" and not op.inverse for op in plain.ops) == 1


def test_caches_hold_the_heads_of_keys_alone():
    store, programs = build(SMALL, decode_batch=2, decode_seq=24)
    caches = {t.name: tuple(t.shape) for t in store.of_role("cache")}
    assert caches == {f"h.{i}.{kind}_cache": (2, 24, 2 * 16) for i in range(3) for kind in "kv"}
    assert {op.kv_heads for op in programs["decode"].ops if op.name == "attention_cached"} == {2}


def test_tables_are_as_long_as_the_longest_program():
    cfg = replace(SMALL, max_seq=1 << 17)
    store, _ = build(cfg, batch=1, seq=32, eval_batch=1, eval_seq=64, decode_batch=1, decode_seq=48)
    assert store.tensors["rope.cos"].shape == (64, 8)
    assert build(SMALL, decode_batch=1)[0].tensors["rope.cos"].shape == (40, 8)


def test_model_operations_are_six_per_weight_and_token_and_attention():
    cfg, tokens = SMALL, 2 * 8
    _, programs = build(cfg, batch=2, seq=8, optimizer=lambda p: None)
    D = cfg.head_size
    weights = cfg.padded_vocab * cfg.d_model
    weights += cfg.layers * cfg.d_model * ((cfg.heads + 2 * cfg.kv_heads) * D + cfg.d_model + 3 * cfg.d_ff)
    attention = cfg.layers * 6 * tokens * (8 + 1) * cfg.d_model
    assert programs["forward_backward"].flops == 6 * weights * tokens + attention


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 3}, "model.heads 3 does not divide model.d_model 64"),
        ({"d_model": 60}, "model.heads 4 divides model.d_model 60 into parts of 15, expected an even size"),
        ({"kv_heads": 3}, "model.kv_heads 3 does not divide model.heads 4"),
        ({"kv_heads": 0}, "model.kv_heads is 0, expected at least 1"),
        ({"norm_eps": 0.0}, "model.norm_eps is 0.0, expected above 0"),
        ({"rope_theta": -1.0}, "model.rope_theta is -1.0, expected above 0"),
        ({"rope_low": 4.0}, "model.rope_high is 4.0, expected above model.rope_low 4.0"),
        ({"rope_factor": -2.0}, "model.rope_factor is -2.0, expected at least 0"),
        ({"head_dim": 7}, "model.head_dim is 7, expected an even number: RoPE rotates pairs"),
        ({"rotary_fraction": 0.2}, "model.rotary_fraction 0.2 rotates 3 of 16 columns, expected an even number"),
        ({"rotary_fraction": 1.5}, "model.rotary_fraction is 1.5, expected above 0 and at most 1"),
        ({"nope_layers": "0,3"}, "model.nope_layers is '0,3', expected numbers from 0 to 2 with commas between them"),
        ({"rope_type": "longrope", "rope_factor": 2.0}, "model.rope_short has 0 numbers, expected 8, one for each pair of"),
        ({"rope_short": "a"}, "model.rope_short is 'a', expected numbers from 0 on with commas between them"),
        ({"sliding_window": -1}, "model.sliding_window is -1, expected at least 0"),
        ({"window_layers": "3"}, "model.window_layers is '3', expected numbers from 0 to 2 with commas between them"),
        ({"logits_softcap": 40.0}, "model.logits_softcap is 40.0, expected at most 35"),
        ({"qk_norm": "rows"}, "model.qk_norm is 'rows', expected none, head or row"),
    ],
)
def test_sizes_that_no_llama_has(change, message):
    with pytest.raises(UserError) as found:
        replace(SMALL, **change)
    assert str(found.value).startswith(message)


def test_norms_around_one_and_caps_have_the_gradients_of_the_reference():
    """Every option of Gemma's, with the classifier in one op and its score. The weight of such a norm is no parameter itself."""
    cfg = replace(
        SMALL, norm_unit_offset=True, norm_position="both", qk_norm="head", logits_softcap=3.0, attention_softcap=2.0,
        attention_multiplier=0.3, sliding_window=3, window_layers="0,2", rope_local_theta=50.0,
    )  # fmt: skip
    r = np.random.default_rng(0)
    found = []
    for session in (CpuSession, ReferenceSession):
        store, programs = build(cfg, batch=2, seq=8, score_batch=2, score_seq=8, optimizer=lambda p: None)
        del programs["optimizer_step"]
        opened = session(programs)
        for t in store.of_role("parameter"):
            opened.write(t.name, 0.3 * np.random.default_rng(len(t.name)).normal(size=t.shape))
        for name in ("tokens", "targets"):
            opened.write(name, r.integers(0, 90, (2, 8), dtype=np.int32) if not found else found[0][name])
        opened.run("forward_backward", batch=2, seq=8, accumulate=0, inv_targets=1 / 16, step=1)
        names = ["tokens", "targets", "loss", *(t.name for t in store.of_role("gradient"))]
        found.append({name: opened.read(name).copy() for name in names})
        opened.run("score", batch=2, seq=8)
        found[-1] |= {name: opened.read(name).copy() for name in ("losses", "margins")}
        if isinstance(opened, CpuSession):
            opened.close()
    for name, want in found[1].items():
        assert np.linalg.norm(found[0][name] - want) <= 1e-5 * np.linalg.norm(want), name
    assert np.isclose(found[0]["losses"].mean(), found[0]["loss"]).all()


def test_gpt2_has_not_heard_of_it():
    assert not {"kv_heads", "rope_theta", "hidden"} & set(gpt2.Config.__dataclass_fields__)


TINY = ("--model.layers", 2, "--model.heads", 4, "--model.kv_heads", 2, "--model.d_model", 32, "--model.d_ff", 48)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.extended
def test_it_trains_resumes_samples_and_evaluates(tmp_path, own_cache, capsys, device):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    on = ("--device", device, "--train.dtype", "fp32", "--data", text, "--data.tokenizer", "bytes", "--optim.warmup", 0)
    more = ("--batch", 4, "--seq", 16, "--train.eval_tokens", 64, "--train.sample_every", 0, "--lr", 1e-2)
    words = ["train", "llama-15m", *TINY, *on, *more, "--out"]

    def run(*more: object) -> None:
        assert main([str(word) for word in more]) == 0

    run(*words, tmp_path / "run", "--steps", 30)
    run(*words, tmp_path / "other", "--steps", 30, "--train.checkpoint_every", 10, "--train.save_total_limit", 9)
    for step in ("step-000020", "step-000030"):
        checkpoint.storage.remove(tmp_path / "other" / "checkpoints" / step)
    run("train", "--resume", "--device", device, "--out", tmp_path / "other")
    losses = [row["loss"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    weights = [checkpoint.find(tmp_path / name)[0] / "weights.safetensors" for name in ("run", "other")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    capsys.readouterr()
    run("sample", tmp_path / "run", "--device", device, "--max-new-tokens", 40, "--json")
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 40
    run("eval", tmp_path / "run", "--device", device, "--json")
    assert 0 < json.loads(capsys.readouterr().out)["nats"] < losses[0]
