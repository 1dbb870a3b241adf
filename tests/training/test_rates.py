"""The learning rates of a run: --lr is that of the run, and Muon's follows it, on the command line and from step to step."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64

from barellm.assembly.build import open_model
from barellm.assembly.programs import build
from barellm.checkpoint import checkpoint
from barellm.cli.main import main, parsed
from barellm.cli.parsing.options import configuration
from barellm.config import OptimConfig, overrides
from barellm.cpu.step import CpuSession
from barellm.errors import UserError
from barellm.models import HIDDEN, preset
from barellm.models.training_schedule import model_schedule
from barellm.optim.recipes import optimize
from barellm.training import metrics
from barellm.training.console import Console
from barellm.training.schedule import learning_rate, rates
from tests.cpu.test_models import MODEL
from tests.training.test_muon import opened, train

OLD = Path(__file__).with_name("old_muon_config.json")  # of version 0.1.0, before muon_lr_ratio: --lr 0.004
MUON = ("--optim.name", "muon", "--optim.muon_lr", "0.003")  # three times the lr of shakespeare-char


def resolved(*words: object) -> OptimConfig:
    return configuration(parsed(["train", *map(str, words)])).optim


def pair(*words: object) -> tuple[float, float]:
    found = resolved(*words)
    return found.lr, found.muon_lr


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "rates.toml"
        path.write_text(f"preset = 'default'\n[optim]\n{text}\n")
        return str(path)

    return write


def test_lr_alone_takes_muon_along_in_the_ratio_of_the_preset():
    assert pair("default") == (0.008, 0.03)
    assert pair("default", "--lr", 0.004) == (0.004, 0.015)
    assert pair("default", "--optim.lr", 0.0123) == (0.0123, 0.046125)
    assert pair("default", "--lr", 0.008) == (0.008, 0.03)
    assert pair("speedrun-small", "--lr", 0.004) == (0.004, 0.0115)
    assert pair("default", "--lr", 0) == (0, 0)


def test_muon_lr_fixes_it_and_so_does_the_ratio():
    assert pair("default", "--lr", 0.004, "--optim.muon_lr", 0.03) == (0.004, 0.03)
    assert pair("default", "--optim.muon_lr", 0) == (0.008, 0)
    assert pair("default", "--lr", 0, "--optim.muon_lr", 0.03) == (0, 0.03)
    assert pair("default", "--optim.muon_lr_ratio", 2) == (0.008, 0.016)
    assert pair("default", "--optim.muon_lr_ratio", 2, "--lr", 0.1) == (0.1, 0.2)
    assert pair("default", "--optim.muon_lr_ratio", 0, "--lr", 0.1) == (0.1, 0)
    assert pair("default", "--optim.muon_lr_ratio", 2, "--lr", 0.1, "--optim.muon_lr", 0.2) == (0.1, 0.2)
    assert resolved("default", "--lr", 0.004).muon_lr_ratio == 3.75


def test_a_file_s_ratio_holds_where_the_command_line_has_another_lr(toml, tmp_path):
    assert pair("--config", toml("lr = 0.01\nmuon_lr = 0.02"), "--lr", 0.02) == (0.02, 0.04)
    assert pair("--config", toml("lr = 0.004"), "--lr", 0.002) == (0.002, 0.0075)
    assert pair("--config", toml("muon_lr_ratio = 2"), "--lr", 0.002) == (0.002, 0.004)
    assert pair("--config", toml("muon_lr_ratio = 2"), "--optim.muon_lr", 0.03) == (0.008, 0.03)
    assert pair("--config", toml("muon_lr = 0.01"), "--optim.muon_lr_ratio", 2) == (0.008, 0.016)
    path = tmp_path / "config.json"  # of a run: it has all three
    path.write_text(json.dumps(overrides.to_json(preset("default"))))
    assert pair("--config", path) == (0.008, 0.03) and pair("--config", path, "--lr", 0.004) == (0.004, 0.015)
    assert pair("--config", OLD) == (0.004, 0.045) and pair("--config", OLD, "--lr", 0.008) == (0.008, 0.09)


def test_rates_that_do_not_fit_together_are_refused(toml, refused):
    assert refused("plan", "default", "--optim.muon_lr_ratio", 3, "--optim.muon_lr", 0.03) == (
        "optim.muon_lr is 0.03 and optim.muon_lr_ratio 3, which is 0.024 with optim.lr 0.008: expected one of them"
    )
    assert refused("plan", "default", "--optim.muon_lr_ratio", -1) == "optim.muon_lr_ratio is -1.0, expected at least 0"
    said = refused("plan", "--config", toml("lr = 0"), "--lr", 0.01)
    assert said == "optim.lr was 0, of which optim.muon_lr 0 is no multiple: expected optim.muon_lr too"
    assert pair("--config", toml("lr = 0\nname = 'adamw'"), "--lr", 0.01)[0] == 0.01
    assert pair("--config", toml("lr = 0"), "--lr", 0.01, "--optim.muon_lr", 0.02) == (0.01, 0.02)


@pytest.mark.parametrize("name", ["default", "shakespeare-muon", "sparse-char"])
def test_the_rates_of_a_preset_are_to_the_bit_those_that_a_kernel_has_computed(name):
    """Until they were scalars, a kernel multiplied the schedule's rate by the constant muon_lr / lr."""
    optim = preset(name).optim
    for step in range(11):
        lr = learning_rate(step, total=11, optim=optim)
        assert rates(step, total=11, optim=optim) == {"lr": lr, "muon_lr": lr * (optim.muon_lr / optim.lr)}


def test_the_rates_of_stages_are_in_their_ratio_too():
    config = preset("speedrun-small")
    training_schedule = model_schedule(config)
    assert training_schedule is not None
    for step in (0, 133, 399):
        found = training_schedule.step(step, 400)
        assert found.rates["muon_lr"] == found.rates["lr"] * (0.023 / 0.008)
        assert found.updates[0][1].items() >= found.rates.items()


def test_a_rate_of_zero_leaves_the_other_its_schedule():
    shape = {"name": "muon", "schedule": "linear", "warmup": 1, "min_lr": 0.0}
    muon = OptimConfig(lr=0.0, muon_lr=0.4, **shape)
    assert [rates(i, total=6, optim=muon) for i in (0, 1, 3, 5)] == [
        {"lr": 0.0, "muon_lr": pytest.approx(rate)} for rate in (0.2, 0.4, 0.2, 0.0)
    ]
    adamw = OptimConfig(lr=0.4, muon_lr=0.0, **shape)
    assert rates(3, total=6, optim=adamw) == {"lr": pytest.approx(0.2), "muon_lr": 0.0}
    assert rates(3, total=6, optim=OptimConfig(lr=0.4, min_lr=0.0)).keys() == {"lr"}


@pytest.mark.parametrize("frozen", ["lr", "muon_lr"])
@pytest.mark.extended
def test_a_rate_of_zero_leaves_its_parameters_alone(frozen):
    both = {"lr": 3e-3, "muon_lr": 0.02} | {frozen: 0.0}
    optim = OptimConfig(name="muon", min_lr=0.0, **both)
    session = opened(CpuSession, "fp32", optim, threads=2)
    session.run("init", seed=3)
    names = [name for name, t in session.tensors.items() if t.role == "parameter"]
    before = {name: session.read(name) for name in names}
    train(session, optim)
    matrices = {name for name in names if name.startswith("h.") and before[name].ndim == 2}
    changed = {name for name in names if not np.array_equal(session.read(name), before[name])}
    assert changed == (matrices if frozen == "lr" else {*names} - matrices)
    session.close()


def test_another_rate_compiles_nothing():
    """Each op of the update has the attributes that it has with other rates."""
    found = []
    for lr, muon_lr in ((0.008, 0.03), (0.001, 0.0), (0.0, 0.5)):
        config = OptimConfig(name="muon", lr=lr, muon_lr=muon_lr, min_lr=0.0)
        _, programs = build(MODEL, batch=1, seq=3, optimizer=lambda p, c=config: optimize(p, c, HIDDEN))
        found.append([(op.name, str(op.attrs)) for op in programs["optimizer_step"].ops])
    assert found[0] == found[1] == found[2]


def test_both_rates_are_on_the_screen_and_in_the_metrics(fake, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Console, "PLAIN_S", 0.0)
    assert main(command("run", *MUON, "--lr", "0.002")) == 0
    rows = [row for row in metrics.read(tmp_path / "run/metrics.jsonl") if row["kind"] == "train"]
    optim = resolved("shakespeare-char", *MUON, "--lr", 0.002, "--optim.warmup", 2)
    assert [{key: row[key] for key in ("lr", "muon_lr")} for row in rows] == [
        rates(step, total=12, optim=optim) for step in range(12)
    ]
    given = [{key: scalars[key] for key in ("lr", "muon_lr")} for entry, scalars in fake.runs if entry == "optimizer_step"]
    assert given == [{key: row[key] for key in ("lr", "muon_lr")} for row in rows]
    said = capsys.readouterr().out
    assert "lr       0.002 (AdamW), Muon 0.003 (1.5 times that), cosine to 0.0001 after 2 steps of warmup\n" in said
    assert "  lr 6.7e-04  muon_lr 1.0e-03\n" in said
    assert main(command("plain")) == 0
    said = capsys.readouterr().out
    assert "lr       0.001, cosine to 0.0001 after 2 steps of warmup\n" in said and "uon" not in said
    assert "muon_lr" not in (tmp_path / "plain/metrics.jsonl").read_text()


def test_plot_draws_both_rates(fake, command, tmp_path, capsys):
    assert main(command("run", *MUON)) == 0
    run = tmp_path / "run"
    rows = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "train"]
    capsys.readouterr()
    assert main(["plot", str(run), "--y", "lr"]) == 0
    said = capsys.readouterr().out
    for name, key in (("AdamW", "lr"), ("Muon", "muon_lr")):
        assert f"{run}, {name}: step 12, learning rate {rows[-1][key]:,.4g}\n" in said
    assert main(["plot", str(run), "--y", "loss"]) == 0
    assert "Muon" not in capsys.readouterr().out
    # The first steps were done by a version that did not write Muon's.
    older = [{k: v for k, v in row.items() if k != "muon_lr"} if row["step"] < 6 else row for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in older))
    assert main(["plot", str(run), "--y", "lr"]) == 0
    assert f"{run}, Muon: step 12" in capsys.readouterr().out


def test_a_run_of_an_older_version_is_resumed_at_its_rates(tmp_path, text, monkeypatch, capsys):
    """Its --lr had left Muon's rate where it was."""
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "cache"))
    old = json.loads(OLD.read_text())
    old["data"]["source"] = str(text)
    old["model"] |= {"vocab_size": 25, "padded_vocab": 25}  # of this text's characters
    words = ["--lr", "0.004", "--optim.muon_lr", "0.045", "--device", "reference"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert main(["train", "--config", str(tmp_path / "old.json"), "--out", str(tmp_path / "whole"), *words]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "old")
    shutil.rmtree(tmp_path / "old/checkpoints/step-000012")
    saved = tmp_path / "old/checkpoints/step-000008"
    meta, manifest = (json.loads((saved / name).read_text()) for name in (checkpoint.META, checkpoint.MANIFEST))
    meta["config"]["optim"] = old["optim"]  # as that version has written it
    content = json.dumps(meta).encode()
    manifest["files"][checkpoint.META] = {"bytes": len(content), "xxh3_64": xxh3_64(content).hexdigest()}
    (saved / checkpoint.META).write_bytes(content)
    (saved / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    same = ["train", "shakespeare-muon", "--out", str(tmp_path / "old"), "--resume", "--device", "reference"]
    assert main([*same, "--lr", "0.004"]) == 0, "its own command line"
    assert "resumed from" in capsys.readouterr().out
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        one, other = (tmp_path / run / "checkpoints/step-000012" / name for run in ("whole", "old"))
        assert one.read_bytes() == other.read_bytes(), name
    row = next(row for row in metrics.read(tmp_path / "old/metrics.jsonl") if row.get("step") == 10 and "lr" in row)
    assert row["muon_lr"] == row["lr"] * (0.045 / 0.004)
    assert overrides.from_json(json.loads((tmp_path / "old/config.json").read_text())).optim.muon_lr == 0.045


def test_a_resumed_run_keeps_its_rates(fake, command, refused, tmp_path):
    ratio = ("--optim.name", "muon", "--lr", "0.00123", "--optim.muon_lr_ratio", "3.75")
    assert main(command("run", *ratio)) == 0
    assert main(command("run", *ratio, "--resume", "--steps", "14")) == 0, "its own command line"
    for option, value, found in (("lr", 0.002, 0.00123), ("muon_lr", 0.003, 0.0046125), ("muon_lr_ratio", 2.0, 3.75)):
        said = refused(*command("run", "--resume", "--steps", "16", f"--optim.{option}", value))
        assert said.startswith(f"optim.{option} is {found}") and f"the command line says {value}: a resumed" in said


def test_what_the_command_line_has_changed_of_a_file_is_no_other_run(fake, command, toml, tmp_path):
    """Neither the file's rate of Muon nor its other limit is asked for again."""
    file = toml("name = 'muon'\nlr = 0.002\nmuon_lr = 0.006\n[train]\nminutes = 5")
    Path(file).write_text(Path(file).read_text().replace("default", "shakespeare-char"))
    words = command("run", "--config", file, "--lr", "0.001")
    assert main(words) == 0
    optim = overrides.from_json(json.loads((tmp_path / "run/config.json").read_text())).optim
    assert (optim.lr, optim.muon_lr) == (0.001, 0.003)
    assert main([*words, "--resume", "--steps", "14"]) == 0


@pytest.mark.parametrize(
    "words, advice",
    [
        (MUON, "--lr 0.0005 --optim.muon_lr 0.0015 or a longer --optim.warmup"),
        ((), "--lr 0.0005 or a longer --optim.warmup"),
        (("--optim.min_lr", "0.0008"), "--lr 0.0005 --optim.min_lr 0.0005 or a longer --optim.warmup"),
    ],
)
def test_the_advice_against_a_norm_that_is_not_finite_works_as_told(fake, command, refused, words, advice):
    real = fake.read
    fake.read = lambda name: np.array([np.nan, np.nan], np.float32) if name == "clip" else real(name)
    said = refused(*command("run", *words))
    assert f"restart with a lower learning rate, {advice}" in said
    fake.read = real
    assert main(command("again", *words, *shlex.split(advice.partition(" or ")[0]))) == 0


def test_a_machine_is_built_from_rates_that_are_zero():
    config = overrides.changed(preset("shakespeare-muon"), {"optim.lr": 0.0, "optim.muon_lr": 0.01})
    with open_model(overrides.changed(config, {"model.layers": 1}), device="reference") as compiled:
        assert {"lr", "muon_lr"} <= set(compiled.programs["optimizer_step"].scalars)


def test_a_run_whose_lr_was_0_says_so_before_the_ratio_is_used():
    config = overrides.changed(preset("default"), {"optim.lr": 0.0, "optim.muon_lr": 0.03})
    with pytest.raises(UserError, match=r"optim\.lr was 0, of which optim\.muon_lr 0\.03 is no multiple"):
        overrides.changed(config, {"optim.lr": 0.01})
