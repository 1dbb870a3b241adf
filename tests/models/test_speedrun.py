"""The speedrun's stages and runs: the record's schedule, errors of a table, bits for any number of threads and after a resume,
parts left out. That the model is the record's is shown in tests/oracle/test_speedrun.py."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import log
from pathlib import Path

import numpy as np
import pytest

from barellm.assembly.programs import build
from barellm.cli.main import main
from barellm.config import Config as Run
from barellm.config import OptimConfig, TrainConfig
from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.models.speedrun import RECORD, Config, declare, speedrun, speedrun_small, training_schedule
from barellm.models.stages import Stage, parse, table
from barellm.optim.recipes import updates
from barellm.program.builder import Program, Store
from barellm.program.dtypes import round_to_bf16
from barellm.program.ops.gemm.fp8 import Static
from barellm.runtime.reference import ReferenceSession
from barellm.training import metrics
from tests.training.conftest import TEXT

STAGES = table(
    [
        Stage(24, (1, 2), Fraction(1, 2), mtp=(1.0, 0.5, 0.25), mtp_end=(1.0, 0.5, 0.0)),
        Stage(40, (2, 4), Fraction(1, 2), lr=1.5),
        Stage(40, (2, 5)),
    ]
)
SMALL = Config(heads=4, d_model=64, d_ff=96, vocab_size=61, max_seq=40, block=4, stages=STAGES, separator=3, extension=2, untie=1)
LEFT_OUT = {
    "lanes": {"lanes_from": 11},
    "smear": {"smear": False},
    "bigram": {"bigram": False},
    "values": {"values": ""},
    "pairs": {"paired": ""},
    "softcap": {"softcap": False},
    "backout": {"backout": 11},
    "attention in every layer": {"skipped": "", "values": "1,6"},
    "documents": {"separator": -1},
}

# What pull request 233 lists as tried, and what its record left out.
VARIANTS = {
    "factors of attention": {"post_attn": True},
    "folded factor of the MLP": {"post_mlp": "folded"},
    "x0 before attention": {"inject": "before"},
    "x0 without attention": {"inject_skipped": True},
    "all": {"post_attn": True, "post_mlp": "folded", "inject": "before", "inject_skipped": True},
}


def test_the_record_s_schedule():
    """Its published steps: stages begin at 483, 967 and 1450; the rate falls from step 580 to 0.15; the embedding leaves at 967."""
    run = replace(speedrun(), data=replace(speedrun().data, source="x"))
    steps, schedule = training_schedule(run), training_schedule(run).schedule(1490)
    assert schedule.ends == [483, 967, 1450, 1490]
    assert [steps.step(i, 1490).seq for i in (0, 482, 483, 966, 967, 1489)] == [16384] * 2 + [32768] * 2 + [49152] * 2
    assert [schedule.lr(i) for i in (0, 482, 483, 579, 1450, 1489)] == [1.0, 1.0, 1.52, 1.52, 0.15, 0.15]
    assert schedule.lr(1015) == pytest.approx(1.73 / 2 + 0.075)
    assert schedule.weights(0) == (1.0, 0.5, 0.25) and schedule.weights(967) == (1.0, 0.0, 0.0)
    assert schedule.weights(725) == pytest.approx((1.0, 0.25, 0.0))
    names = [[name for name, _ in steps.step(i, 1490).updates] for i in (965, 966, 967, 968, 969)]
    assert names == [
        ["optimizer_step_tied"],
        ["optimizer_step"],
        ["optimizer_step_tied", "untie"],
        ["optimizer_step"],
        ["optimizer_step_untied"],
    ]
    assert [steps.step(i, 1490).updates[0][1]["step"] for i in (1, 3, 967)] == [1, 2, 484]
    assert [steps.step(i, 1490).adds for i in (0, 1, 2)] == [False, True, False]
    momenta = [steps.step(i, 1490).updates[0][1]["momentum"] for i in (0, 150, 300, 1440, 1465)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95, 0.9])


class Told:
    """A session that keeps what it is told."""

    def __init__(self):
        self.default_scalars, self.written = {}, {}

    def write(self, name, values):
        self.written[name] = values


def test_what_each_stage_tells_a_session():
    """Windows in tokens; scales of attention as the anchor of the record has them; angles only when the long window changes."""
    told, steps = Told(), training_schedule(speedrun())
    for step, short, long, scale, changes in (
        (0, 128, 384, 0.1, True), (482, 128, 384, 0.1, False), (483, 384, 896, 0.1169, True), (967, 640, 1408, 0.1275, True),
        (1450, 768, 1664, 0.1318, True), (1490, 768, 2560, 0.1318, False),
    ):  # fmt: skip
        told.written = {}
        steps.on_step(told, step, 1490)
        assert (told.default_scalars["window_short"], told.default_scalars["window_long"]) == (short, long)
        assert told.default_scalars["attention_scale"] == pytest.approx(scale, abs=6e-5)
        assert bool(told.written) == changes
    assert told.default_scalars["mtp_0"] == 1.0 and told.default_scalars["mtp_2"] == 0.0


@pytest.mark.parametrize(
    "text, message",
    [
        ("seq=8 windows=1,2", "expected some that add up to 1, and a last stage without one"),
        ("share=1/2 seq=8 windows=1,2; seq=8 windows=1,2", "has shares 1/2, 0"),
        ("share=1 seq=8; seq=8 windows=1,2", "stage 1 of model.stages has no windows"),
        ("share=1 seq=8 windows=1,2; seq=8 window=1,2", "stage 2 of model.stages has 'window=1,2', expected one each of"),
        ("share=1 seq=8 windows=1; seq=8 windows=1,2", "has 'windows=1', expected for example windows=1,3"),
        ("share=1/0 seq=8 windows=1,2; seq=8 windows=1,2", "has 'share=1/0', expected for example share=1/3"),
        ("share=1 seq=0 windows=1,2; seq=8 windows=1,2", "expected sizes of at least 1"),
        ("share=1 seq=8 windows=1,2 mtp=1,1>1; seq=8 windows=1,2", "expected for example mtp=1,0.5>1,0"),
        ("share=1 seq=99 windows=1,2; seq=8 windows=1,2", "model.stages has seq=99, above model.max_seq 40"),
    ],
)
def test_a_wrong_table_is_refused_in_a_line(text, message):
    with pytest.raises(UserError) as error:
        replace(SMALL, stages=text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_table_is_read_as_it_was_written():
    assert parse(table(RECORD), key="") == RECORD


@pytest.mark.parametrize("wrong, message", [
    ({"seq": 30}, "model.stages has seq=40, above train.seq 30"),
    ({"minutes": 1.0}, "expected train.minutes 0"),
    ({"steps": 2}, "model.extension is 2, expected fewer than train.steps 2"),
])  # fmt: skip
def test_a_run_that_the_table_does_not_fit_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        training_schedule(Run(preset="", model=SMALL, train=replace(TrainConfig(micro_batch_size=1, seq=40, steps=9), **wrong)))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"long": "3,11"}, "model.long names layer 11, expected 0 to 10"),
        ({"values": "1;2"}, "model.values is '1;2', expected numbers of layers: 1,2,8"),
        ({"heads": 1}, "model.heads is 1, expected an even number, as model.paired names layers"),
        ({"heads": 32}, "model.heads 32 makes heads of 2 columns, expected a multiple of 4"),
    ],
)
def test_a_wrong_model_is_refused_in_a_line(wrong, message):
    with pytest.raises(UserError) as error:
        replace(SMALL, **wrong)
    assert message in str(error.value) and "\n" not in str(error.value)


def trained(session, model: Config, steps: int = 4, total: int = 6) -> list[float]:
    """Losses of some steps on drawn text, through the course of a run."""
    run = Run(preset="", model=model, optim=OPTIM, train=TrainConfig(micro_batch_size=1, seq=40, steps=total))
    ours, rng, losses = training_schedule(run), np.random.default_rng(3), []
    session.run("init", seed=1)
    for index in range(steps):
        step = ours.step(index, total)
        ours.on_step(session, index, total)
        row = rng.integers(0, 61, (1, step.seq + 1)).astype(np.int32)
        row[0, [5, 6, 17]] = 3  # documents
        session.write("tokens", row[:, :-1])
        session.write("targets", row[:, 1:])
        shape = {"batch": 1, "seq": step.seq, "inv_targets": step.inv_targets}
        session.run("forward_backward", accumulate=int(step.adds), **shape)
        losses.append(float(session.read("loss")[0]) * step.shown)
        for program, scalars in step.updates:
            session.run(program, **scalars)
    return losses


OPTIM = OptimConfig(name="speedrun", lr=0.008, muon_lr=0.023, weight_decay=1.2, cautious=True, normuon=0.95, clip=0.0)


def programs_of(model: Config, compute: str):
    return build(model, batch=1, seq=40, compute=compute, optimizer=updates(OPTIM, ""), decode_batch=1)[1]


@cache
def loss_of_the_whole() -> float:
    """Of the first step."""
    return trained(ReferenceSession(programs_of(SMALL, "fp32"), dtype="float64"), SMALL, 1)[0]


@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.extended
def test_each_part_can_be_left_out(left_out):
    """The CPU's losses are the references' with any part missing."""
    model = replace(SMALL, **LEFT_OUT[left_out])
    session = CpuSession(programs_of(model, "fp32"))
    found, wanted = (trained(session, model, 2), trained(ReferenceSession(programs_of(model, "fp32"), dtype="float64"), model, 2))
    session.close()
    assert found == pytest.approx(wanted, rel=3e-5)
    assert abs(loss_of_the_whole() - wanted[0]) > 1e-6  # it made a difference


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_of_a_variant_is_the_slope_of_its_loss(variant):
    """Along a random direction through all parameters, in float64; and the loss is another one than the record's."""
    rng, results = np.random.default_rng(0), []
    row = rng.integers(0, 61, (1, 41)).astype(np.int32)
    for model in (replace(SMALL, **VARIANTS[variant]), SMALL):
        programs = programs_of(model, "fp32")
        session = ReferenceSession({name: programs[name] for name in ("init", "forward_backward")}, dtype="float64")
        session.run("init", seed=1)
        training_schedule(Run(preset="", model=model, optim=OPTIM, train=TrainConfig(micro_batch_size=1, seq=40, steps=6))).on_step(
            session, 0, 6
        )
        weights = {name: t.shape for name, t in sorted(session.tensors.items()) if t.role == "parameter"}
        rng = np.random.default_rng(1)
        base = {name: session.read(name) + rng.normal(0, 0.3 / len(shape) ** 3, shape) for name, shape in weights.items()}
        along = {name: 0.02 * rng.standard_normal(shape) for name, shape in weights.items()}

        def loss(at: float, session=session, base=base, along=along) -> float:
            for name in base:
                session.write(name, base[name] + at * along[name])
            session.write("tokens", row[:, :-1])
            session.write("targets", row[:, 1:])
            session.run("forward_backward", batch=1, seq=40, inv_targets=1 / 40, accumulate=0)
            return float(session.read("loss")[0])

        h = 1e-5
        slope = (loss(h) - loss(-h)) / (2 * h)
        here = loss(0.0)
        assert sum((session.read(f"{name}.grad") * along[name]).sum() for name in along) == pytest.approx(slope, rel=1e-6)
        results.append(here)
    assert abs(results[0] - results[1]) > 1e-5


@pytest.mark.parametrize("compute, variant", [("fp32", name) for name in VARIANTS] + [("bf16", "all")])
@pytest.mark.extended
def test_a_variant_trains_like_the_references(compute, variant):
    model = replace(SMALL, **VARIANTS[variant])
    digests = set()
    for threads in (1, 2):
        session = CpuSession(programs_of(model, compute), threads=threads)
        found = trained(session, model, 4)
        digests.add(session.digest())
        session.close()
    wanted = trained(ReferenceSession(programs_of(model, compute), dtype="float64"), model, 4)
    assert found == pytest.approx(wanted, rel=3e-5 if compute == "fp32" else 3e-3) and len(digests) == 1


FACTORS = {"qkv.scale": 11, "proj.scale": 11, "resid.attn": 11, "resid.mlp": 11, "post.mlp": 11, "x0.scale": 11}
FACTORS |= {"lanes.attn0": 11, "lanes.attn1": 11, "lanes.mlp1": 11, "bigrams.scale": 11}
FACTORS |= {"smear.scale": 1, "backout.scale": 1, "skip.scale": 1}
OF = {"lanes": "lanes.", "smear": "smear.", "bigram": "bigrams.", "backout": "backout.", "attention in every layer": "skip."}


@pytest.mark.parametrize("left_out", [None, *OF])
def test_a_part_that_is_left_out_leaves_no_factors_behind(left_out):
    store = Store()
    declare(Program(store), replace(SMALL, **LEFT_OUT.get(left_out, {})))
    sizes = {name: t.shape[0] for name, t in store.tensors.items() if len(t.shape) == 1}
    assert sizes == {name: n for name, n in FACTORS.items() if left_out is None or not name.startswith(OF[left_out])}


def test_the_record_s_scales_of_8_bits():
    """PR #233 scales x by 100 / 448, the weight by 1.6 / 448 and the logits' gradients by 0.75 / 448."""
    programs = programs_of(replace(SMALL, fp8="static"), "bf16")
    (found,) = {op.attrs["scaling"] for op in programs["forward_backward"].ops if op.attrs.get("scaling")}
    assert found == Static("head", x=100 / 448, weight=1.6 / 448, dy=0.75 / 448)


@pytest.mark.parametrize("compute, fp8", [("fp32", "delayed"), ("bf16", "off"), ("bf16", "static"), ("fp32", "floating")])
@pytest.mark.extended
def test_equal_bits_for_any_number_of_threads(compute, fp8):
    digests, model = set(), replace(SMALL, fp8=fp8)
    for threads in (1, 2, 5):
        session = CpuSession(programs_of(model, compute), threads=threads)
        trained(session, model, 6)
        digests.add(session.digest())
        session.close()
    assert len(digests) == 1


SIZES = {"heads": 4, "d_model": 64, "d_ff": 64, "max_seq": 40, "block": 4, "extension": 2, "untie": 1, "stages": STAGES}


def small_run(tmp_path: Path, **model: str) -> list[str]:
    """The words of a run of 8 steps into `whole`, with a checkpoint after each."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ["train", "speedrun-small", "--data", str(text), "--data.tokenizer", "bytes"]
    words += [word for key, value in (SIZES | model).items() for word in (f"--model.{key}", str(value))]
    words += ["--train.seq", "40", "--train.steps", "8", "--train.checkpoint_every", "1", "--train.save_total_limit", "9"]
    return [*words, "--train.eval_every", "4", "--out", str(tmp_path / "whole")]


@pytest.mark.extended
def test_a_run_stopped_between_two_steps_that_share_an_update_goes_on_to_the_same_bits(tmp_path, monkeypatch, capsys):
    """A checkpoint after an even number of steps, and one after an odd, which has gradients; then samples and an evaluation. The
    scales of the classifier's 8 bits are states, and part of it."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    assert main(small_run(tmp_path, fp8="delayed")) == 0
    last = Path("checkpoints/step-000008")
    for step in (3, 4):
        here = tmp_path / "whole" / f"checkpoints/step-{step:06d}"
        assert (here / "gradients.safetensors").exists() == (step == 3)
        shutil.copytree(tmp_path / "whole", tmp_path / f"from{step}")
        for later in range(step + 1, 9):
            shutil.rmtree(tmp_path / f"from{step}" / f"checkpoints/step-{later:06d}")
        assert main(["train", "--out", str(tmp_path / f"from{step}"), "--resume"]) == 0
        for name in ("weights.safetensors", "optimizer.safetensors"):
            whole, parts = (tmp_path / run / last / name for run in ("whole", f"from{step}"))
            assert whole.read_bytes() == parts.read_bytes(), (step, name)
    assert "resumed from" in capsys.readouterr().out
    assert main(["sample", str(tmp_path / "whole"), "--prompt", "a", "--max-new-tokens", "50"]) == 0
    assert main(["eval", str(tmp_path / "whole"), "--json"]) == 0


@pytest.mark.extended
def test_the_loss_that_a_user_sees_is_that_of_the_next_token(tmp_path, monkeypatch):
    """It begins at the logarithm of the classifier's columns, where the weighted sum of three begins at 1.75 times as much."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    assert main([*small_run(tmp_path), "--dtype", "fp32"]) == 0
    losses = [row["loss"] for row in metrics.read(tmp_path / "whole" / "metrics.jsonl") if row["kind"] == "train"]
    columns = json.loads((tmp_path / "whole" / "config.json").read_text())["model"]["padded_vocab"]
    assert losses[0] == pytest.approx(log(columns), rel=0.02) and losses[-1] < losses[0]


VARIED = ("post_attn", "post_mlp", "inject", "inject_skipped")
NEW = {"model": ("bigram_first", "adam_weights", *VARIED), "data": ("span_shards",), "train": ("eval_from", "eval_seq")}


@pytest.mark.extended
def test_a_run_that_began_before_these_keys_goes_on_as_it_began(tmp_path, monkeypatch):
    """Its configuration does not name them: to it pairs are hashed with the first token, and Adam keeps all bits. A new run does
    neither. Both ends have the bits of a run that was never stopped."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    old = {"bigram_first": "token", "adam_weights": "fp32"}
    assert {key: getattr(speedrun_small().model, key) for key in old} == {"bigram_first": "reserved", "adam_weights": "bf16"}
    assert main([*small_run(tmp_path, **old), "--dtype", "fp32"]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "old")
    for later in range(5, 9):
        shutil.rmtree(tmp_path / f"old/checkpoints/step-{later:06d}")
    at = tmp_path / "old/checkpoints/step-000004"
    meta = json.loads((at / "meta.json").read_text())
    for section, keys in NEW.items():
        for key in keys:
            del meta["config"][section][key]
    (at / "meta.json").write_text(json.dumps(meta))
    assert main(["train", "--out", str(tmp_path / "old"), "--resume"]) == 0
    last = Path("checkpoints/step-000008/weights.safetensors")
    assert (tmp_path / "old" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_what_the_presets_do_as_the_record_does():
    run = speedrun()
    assert (run.data.order, run.data.span_shards, run.model.max_seq) == ("documents", False, run.train.eval_seq)
    assert (run.model.bigram_first, run.model.adam_weights) == ("reserved", "bf16")


def test_which_weights_are_bf16():
    """Lines 1869 to 1876 and 1203: modules and banks of gates; vectors of single numbers are fp32, and matrices of layers have a
    mantissa."""
    store = Store()
    declare(Program(store), replace(SMALL, adam_weights="bf16"))
    names = {name.split(".")[-1] for name, t in store.tensors.items() if t.bf16}
    assert names == {"embed", "bigrams", "gate", "head", *"01234"}
    exact = {name.split(".")[-1] for name, t in store.tensors.items() if not t.bf16 and len(t.shape) == 2}
    assert exact == {"qkv", "proj", "up", "down"} and not any(t.bf16 for t in store.tensors.values() if len(t.shape) == 1)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.extended
def test_adam_s_weights_are_bf16_after_each_step_if_they_shall(compute):
    model = replace(SMALL, adam_weights="bf16")
    session = CpuSession(programs_of(model, compute))
    reference = ReferenceSession(programs_of(model, compute), dtype="float32")
    for of in (session, reference):
        trained(of, model, 4)
        for name, t in of.tensors.items():
            if t.role == "parameter":
                values = np.asarray(of.read(name), np.float32)
                assert t.bf16 == bool((round_to_bf16(values) == values).all()) or not values.any(), name
    session.close()
