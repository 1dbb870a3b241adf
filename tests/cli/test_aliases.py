"""Names of older versions and of other trainers: keys, options, values and presets. Runs of older versions load and resume."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import barellm
from barellm import models
from barellm.cli.main import COMMANDS, main, parsed
from barellm.cli.parsing.options import configuration
from barellm.config import aliases, overrides
from barellm.errors import UserError

OLD = Path(__file__).parents[1] / "data" / "old_runs"
TEXT = "To be, or not to be, that is the question.\n" * 200 + "\n"


@pytest.mark.parametrize("path", sorted(OLD.glob("*.json")), ids=lambda path: path.stem)
def test_the_configuration_of_an_old_run_is_that_of_the_preset(path):
    found = overrides.from_json(json.loads(path.read_text()))
    min_lr = float(f"{found.optim.min_lr:.6g}")  # which was computed then: 5.9999999999999995e-05
    wanted = models.preset(path.stem)
    wanted = replace(wanted, data=replace(wanted.data, document_mask="off"))  # examples saw those before them in their row
    assert replace(found, optim=replace(found.optim, min_lr=min_lr)) == wanted


def test_there_is_an_old_run_of_each_preset():
    assert {path.stem for path in OLD.glob("*.json")} <= set(models.presets())


@pytest.mark.parametrize("name", ["default", "shakespeare-muon"])
@pytest.mark.extended
def test_an_old_run_loads_and_resumes(name, tmp_path, capsys):
    run = tmp_path / name
    shutil.copytree(OLD / name, run)
    (tmp_path / "text.txt").write_text(TEXT)
    with barellm.load(run) as model:
        assert model.config.model.d_model == 16 and model.config.train.gradient_accumulation_steps == 2
        assert model.generate("To be", max_new_tokens=3) == model.generate("To be", max_new_tokens=3)
    assert main(["train", "--out", str(run), "--resume", "--steps", "4", "--data", str(tmp_path / "text.txt")]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert "is now" not in capsys.readouterr().err, "the files of a run are nobody's mistake"


def resolved(*words: str):
    return configuration(parsed(["train", *words]))


@pytest.mark.parametrize("old, key", aliases.RENAMED.items())
def test_old_keys_are_accepted_and_told_once(old, key, capsys, tmp_path):
    owner = next(name for name in ("default", "llama-15m", "speedrun") if key in overrides.flat(models.preset(name)))
    value = overrides.flat(models.preset(owner))[key]
    changed = {str: "cublaslt" if "gemm" in key else "jordan", float: 0.5, int: 3}[type(value)] if value != 3 else 4
    if key == "model.d_model":
        changed = 64
    more = [] if "rampup" not in key else ["--gradient_accumulation_steps", "5", "--train.minutes", "0"]
    more += {"train.batch_rampup_from": ["--train.batch_rampup_tokens", "9"],
             "train.batch_rampup_tokens": ["--train.batch_rampup_from", "2"]}.get(key, [])  # fmt: skip
    assert overrides.flat(resolved(owner, f"--{old}", str(changed), *more))[key] == changed
    error = capsys.readouterr().err
    assert error == f"barellm: note: {old} is now {key}: the old name still works, for now\n"
    section, name = old.split(".")
    (tmp_path / "run.toml").write_text(f"[{section}]\n{name} = {json.dumps(changed)}\n")
    assert overrides.flat(resolved(owner, "--config", str(tmp_path / "run.toml"), *more))[key] == changed
    assert capsys.readouterr().err.count("is now") == 1


def test_a_key_by_two_names_is_refused():
    with pytest.raises(UserError, match=r"train\.batch is another name of train\.micro_batch_size, which is given too"):
        overrides.checked({"train.micro_batch_size": 1, "train.batch": 2}, models.preset("default"))


@pytest.mark.parametrize(
    "words, key, value",
    [
        ("--max_iters 7", "train.steps", 7),
        ("--max-steps 7", "train.steps", 7),
        ("--learning_rate 1e-3", "optim.lr", 1e-3),
        ("--batch_size 3", "train.micro_batch_size", 3),
        ("--per_device_train_batch_size=3", "train.micro_batch_size", 3),
        ("--batch 3", "train.micro_batch_size", 3),
        ("--gradient_accumulation_steps 4", "train.gradient_accumulation_steps", 4),
        ("--block_size 32", "train.seq", 32),
        ("--n_layer 2", "model.layers", 2),
        ("--n_head 2", "model.heads", 2),
        ("--n_embd 64", "model.d_model", 64),
        ("--weight_decay 0.3", "optim.weight_decay", 0.3),
        ("--warmup_steps 9", "optim.warmup", 9),
        ("--warmup_iters 9", "optim.warmup", 9),
        ("--eval_interval 9", "train.eval_every", 9),
        ("--grad_clip 0.5", "optim.clip", 0.5),
        ("--dtype bfloat16", "train.dtype", "bf16"),
        ("--dtype float32", "train.dtype", "fp32"),
        ("--dtype half", "train.dtype", "fp16"),
        ("--gradient_checkpointing", "train.recompute", True),
        ("--activation-checkpointing true", "train.recompute", True),
        ("--lr_scheduler_type warmup_stable_decay", "optim.schedule", "wsd"),
        ("--matmul own", "train.gemm_backend", "barellm"),
        ("--seed 5", "train.seed", 5),
        ("--num_train_epochs 1.5", "train.epochs", 1.5),
        ("--epochs 3", "train.steps", 0),
        ("--steps 1e4", "train.steps", 10_000),
        ("--steps 10.0", "train.steps", 10),
        ("--no-recompute", "train.recompute", False),
        ("--no_gradient_checkpointing", "train.recompute", False),
        ("--no-model.bias", "model.bias", False),
        ("--data_path x", "data.source", "x"),
        ("--model_max_length 32", "train.seq", 32),
        ("--optimizer adamw", "optim.name", "adamw"),
        ("--adapt lora:4 --lora_alpha 16", "adapter.alpha", 16.0),
        ("--adapt lora:4 --lora-dropout 0.1", "adapter.dropout", 0.1),
        ("--adapt lora:4 --target_modules q_proj,v_proj", "adapter.targets", "q_proj,v_proj"),
        ("--adapt lora:4 --use_rslora", "adapter.rslora", True),
    ],
)
def test_options_of_other_trainers_are_taken(words, key, value):
    assert overrides.flat(resolved(*words.split()))[key] == value


@pytest.mark.parametrize(
    "words, message",
    [
        ("train --fsdp full_shard", "unknown option --fsdp: barellm has --ranks N"),
        ("train --fsdp_transformer_layer_cls_to_wrap x", "barellm has --ranks N"),
        ("train --use_peft", "barellm has --adapt lora:RANK"),
        ("train --evaluation_strategy no", "barellm has --eval-every N"),
        ("train --packing", "barellm has no need for it: examples are packed into sequences"),
        ("train --bf16", "unknown option --bf16: barellm has --dtype bf16"),
        ("train --fp16 true", "unknown option --fp16: barellm has --dtype fp16"),
        ("train --warmup_ratio 0.1", "barellm has --warmup N, which counts steps"),
        ("train --resume_from_checkpoint x", "barellm has --resume with --out RUN"),
        ("sample --model_name_or_path x y", "barellm has the model as CHECKPOINT, without an option"),
        ("sample x --num_beams 4", "no beam search"),
        ("sample x --load_in_8bit", "barellm has --weights int8"),
        ("train --load_in_4bit", "barellm has --adapter.base nf4, with --adapt lora:RANK"),
        ("train --load_in_8bit true", "barellm has --adapter.base int8, with --adapt lora:RANK"),
        ("train --lora_r 16", "barellm has --adapt lora:RANK"),
        ("train --r 16", "barellm has --adapt lora:RANK"),
        ("train --adapter.rank 16", "barellm has --adapt lora:RANK"),
        ("train --use_dora", "no DoRA"),
    ],
)
def test_options_that_have_no_counterpart_name_what_does_it(words, message, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words, name, value",
    [
        ("sample x -n 5", "max_new_tokens", 5),
        ("sample x --tokens 5", "max_new_tokens", 5),
        ("sample x --max_new_tokens 5", "max_new_tokens", 5),
        ("sample x --repetition 1.5", "repetition_penalty", 1.5),
        ("sample x --num_return_sequences 5", "samples", 5),
        ("sample x --top_k 5", "top_k", 5),
        ("train --output_dir x", "out", "x"),
        ("train --out_dir x", "out", "x"),
        ("eval x --whole", "split", "all"),
        ("eval x --split all", "split", "all"),
        ("eval x", "split", "val"),
        ("eval x --batch_size 2", "batch", 2),
        ("sample x --dtype bfloat16", "dtype", "bf16"),
        ("eval x --torch_dtype float32", "dtype", "fp32"),
        ("export x --out y --format hf --dtype half", "dtype", "fp16"),
        ("inspect --dtype bfloat16", "dtype", "bf16"),
    ],
)
def test_options_of_commands_have_their_names_elsewhere(words, name, value):
    assert getattr(parsed(words.split()), name) == value


@pytest.mark.parametrize("name, preset", aliases.PRESETS.items())
def test_presets_have_their_names_elsewhere(name, preset):
    assert models.preset(name) == models.preset(preset) == resolved(name)


def test_every_alias_leads_to_a_key_and_hides_none():
    keys, options = overrides.every_key(), {name for key in overrides.SHORT_NAMES.values() for name in (key,)}
    for key in (*aliases.RENAMED.values(), *aliases.KEYS.values(), *aliases.VALUES):
        assert key in keys, key
    assert not aliases.RENAMED.keys() & keys.keys() and not aliases.KEYS.keys() & options
    assert not aliases.INSTEAD.keys() & (options | aliases.OPTIONS.keys())


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("doctor",)])
def test_no_command_shows_an_alias(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help-all"])
    shown = capsys.readouterr().out
    assert not [old for old in aliases.RENAMED if f"--{old} " in shown]


@pytest.mark.parametrize("word", ["--foo", "--bar", "--fs", "--gpu", "--verbose", "--x", "--cfg"])
def test_what_is_far_from_every_option_gets_no_suggestion(word, capsys):
    assert main(["train", word]) == 2
    assert capsys.readouterr().err == f"barellm: error: unknown option {word} (see barellm train --help)\n"


def test_from_python_the_names_are_the_same(tmp_path):
    assert overrides.named({"max_iters": 3, "n_layer": 2, "train": {"accumulate": 2}}) == {
        "train.steps": 3, "model.layers": 2, "train.accumulate": 2
    }  # fmt: skip
    with pytest.raises(UserError, match="unknown argument 'warmup_ratio': barellm has --warmup N"):
        overrides.named({"warmup_ratio": 3})


def test_a_model_of_ones_own_may_have_the_old_field(tmp_path, monkeypatch):
    from barellm.models import user_model

    monkeypatch.setattr(models, "ADDED", dict(models.ADDED))
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = Path(__file__).parents[1].joinpath("models", "plain.py").read_text()
    (tmp_path / "of_old.py").write_text(text.replace("d_model", "channels").replace("plain", "of_old"))
    user_model.add(tmp_path / "of_old.py")
    preset = next(name for name in models.presets() if models.name_of(models.preset(name).model) == "of_old")
    config = overrides.changed(models.preset(preset), {"model.channels": 32})
    assert config.model.d_model == 32  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"has no key 'model\.d_model'"):
        overrides.changed(config, {"model.d_model": 32})
    del sys.modules["of_old"]


def test_every_option_that_is_not_known_is_named_at_once(capsys):
    """nanoGPT's command line for its character model has four that are not there."""
    line = "train --device=cpu --compile=False --eval_iters=20 --log_interval=1 --lr_decay_iters=2000 --stepz 3 --dropout=0.0"
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith("(see barellm train --help)\n")
    for option in ("--compile: barellm has no need for it", "--eval_iters: barellm has --train.eval_tokens N: eval_iters x batch",
                   "--log_interval", "--lr_decay_iters: barellm has --steps N", "--stepz, did you mean '--steps'?"):  # fmt: skip
        assert option in said
