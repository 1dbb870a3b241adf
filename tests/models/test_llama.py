"""Llama as a program: names, shapes, caches; and its presets from the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from barellm.assembly.programs import build
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.errors import UserError
from barellm.models import gpt2
from barellm.models.llama3 import Config
from barellm.training import metrics

SMALL = Config(
    layers=3, heads=4, kv_heads=2, d_model=64, d_ff=72, vocab_size=90, padded_vocab=128, max_seq=40, tied=False
)


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


def test_caches_hold_the_heads_of_keys_alone():
    store, programs = build(SMALL, decode_batch=2, decode_seq=24)
    caches = {t.name: tuple(t.shape) for t in store.of_role("cache")}
    assert caches == {f"h.{i}.{kind}_cache": (2, 24, 2 * 16) for i in range(3) for kind in "kv"}
    assert {op.kv_heads for op in programs["decode"].ops if op.name == "attention_cached"} == {2}


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
    ],
)
def test_sizes_that_no_llama_has(change, message):
    with pytest.raises(UserError) as found:
        replace(SMALL, **change)
    assert str(found.value) == message


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
