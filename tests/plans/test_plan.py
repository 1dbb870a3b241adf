"""barellm plan: the numbers add up, and are those of the session that runs."""

import json
import time
from dataclasses import replace

import pytest

from barellm.assembly.build import build_programs, open_model
from barellm.cli import main
from barellm.config import overrides
from barellm.models import preset
from barellm.models.training_schedule import only_stage
from barellm.tools.plan import plan
from tests.presets import planned
from tests.profiling.conftest import ADAMW, made_up

SMALL = {"model.layers": 2, "model.heads": 2, "model.d_model": 32, "model.vocab_size": 50, "model.max_seq": 16}


def config_of(name="gpt2-124m", *, dtype="bf16", batch=4, seq=64, recompute=False, **model):
    config = overrides.changed(preset(name), {"train.micro_batch_size": batch, "train.seq": seq, "train.recompute": recompute})
    config = overrides.changed(config, {k.replace("__", "."): v for k, v in model.items()})
    return replace(config, train=replace(config.train, dtype=dtype))


def small(dtype, recompute):
    config = overrides.changed(config_of(dtype=dtype, batch=3, seq=7, recompute=recompute), SMALL)
    return overrides.changed(config, {"train.gradient_accumulation_steps": 2})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", planned())
@pytest.mark.extended
def test_arena_is_within_three_percent_of_what_is_alive(name, recompute):
    train = preset(name).train
    numbers, _ = plan.report(config_of(name, batch=train.micro_batch_size, seq=train.seq, recompute=recompute))
    assert numbers["live_peak_bytes"] <= numbers["arena_bytes"] <= 1.03 * numbers["live_peak_bytes"]
    assert sum(numbers["memory"].values()) == numbers["arena_bytes"]
    assert min(numbers["memory"].values()) >= 0


def test_the_largest_preset_is_planned_in_seconds():
    config = config_of("gpt2-1558m", seq=1024, recompute=True)
    start = time.process_time()
    plan.report(config)
    assert time.process_time() - start < 5  # 1.5 on an idle core


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.extended
def test_plan_is_what_a_session_maps(dtype, recompute, monkeypatch):
    monkeypatch.setenv("BARELLM_THREADS", "2")
    config = small(dtype, recompute)
    numbers, built = plan.report(config)
    with open_model(config, device="cpu") as compiled:
        session = compiled.session
        assert session.arena.nbytes == numbers["arena_bytes"]
        offsets = {(t.name, at) for t, at in session.plan.offsets.items()}
        assert offsets == {(t.name, at) for t, at in built.plan.offsets.items()}
        assert numbers["model_flops"] == compiled.flops_per_step


def test_model_operations_are_six_per_weight_and_token_and_attention():
    config = config_of(batch=4, seq=64)
    numbers, _ = plan.report(config)
    model, tokens = config.model, 4 * 64
    weights = model.padded_vocab * model.d_model + model.layers * 12 * model.d_model**2
    attention = model.layers * 6 * tokens * (64 + 1) * model.d_model
    assert numbers["model_flops"] == config.train.gradient_accumulation_steps * (6 * weights * tokens + attention)


def test_recompute_saves_memory_and_leaves_the_models_operations():
    plain, _ = plan.report(config_of(seq=1024))
    again, _ = plan.report(config_of(seq=1024, recompute=True))
    assert again["arena_bytes"] < 0.75 * plain["arena_bytes"]
    assert again["model_flops"] == plain["model_flops"]
    executed = [sum(row["flops"] for row in n["ops"]) for n in (plain, again)]
    assert executed[1] > executed[0]


@pytest.mark.parametrize("moments", ["16bit", "16bit-stochastic"])
@pytest.mark.extended
def test_moments_of_16_bits_take_half_the_memory_and_the_updates_bytes_fall(moments):
    wide, _ = plan.report(config_of())
    packed, _ = plan.report(overrides.changed(config_of(), {"optim.moments": moments}))
    model = config_of().model
    parameters = wide["parameters"] + (model.padded_vocab - model.vocab_size) * model.d_model  # padding is stored, not counted
    vectors = model.layers * 13 * model.d_model + 2 * model.d_model
    assert packed["memory"]["optimizer_state"] - 4 * (parameters - vectors) == pytest.approx(8 * vectors, abs=1 << 14)
    saved = wide["memory"]["optimizer_state"] - packed["memory"]["optimizer_state"]
    assert packed["arena_bytes"] == pytest.approx(wide["arena_bytes"] - saved, abs=1 << 14)
    moved = [next(row["bytes"] for row in n["ops"] if row["op"] == "adamw") for n in (wide, packed)]
    assert moved[0] / parameters == pytest.approx(28, abs=0.01)
    assert moved[1] / parameters == pytest.approx(20, abs=0.02)


@pytest.mark.parametrize("most, positions", [(2048, 512), (512, 512), (300, 300)])
def test_the_cache_is_as_long_as_samples_need(most, positions):
    config = config_of(model__max_seq=most)
    numbers, built = plan.report(config)
    model = config.model
    assert numbers["memory"]["caches"] == 2 * model.layers * positions * model.d_model * 2
    tokens = built.programs["decode"].named["tokens"]
    assert [int(n) for n in tokens.shape] == [1, positions]
    assert int(build_programs(config, training=False)["decode"].named["tokens"].shape[1]) == most


def test_fusions_and_ops_are_counted():
    numbers, built = plan.report(config_of())
    assert numbers["fusions"]["linear_gelu"] == 12
    assert numbers["fusions"]["classifier"] == 1
    micro = [row for row in numbers["ops"] if row["program"] == "forward_backward"]
    accumulate = numbers["accumulate"]
    assert sum(row["count"] for row in micro) == accumulate * len(built.lowered["forward_backward"].ops)
    primitive = built.programs["forward_backward"].ops
    assert numbers["programs"]["forward_backward"]["ops"] == len(primitive)
    flops = sum(row["flops"] for row in micro)
    assert flops == accumulate * sum(op.flops() for op in primitive)


def test_expected_time_is_the_larger_of_operations_and_bytes():
    ceiling = made_up()
    config = overrides.changed(config_of(), {"train.gradient_accumulation_steps": 1})
    numbers, _ = plan.report(config, ceiling=ceiling)
    rows = {row["op"]: row for row in numbers["ops"]}
    assert rows["adamw"]["expected_s"] == pytest.approx(rows["adamw"]["bytes"] / ADAMW, rel=1e-6)
    assert rows["linear"]["expected_s"] == pytest.approx(rows["linear"]["flops"] / 4e11, rel=1e-2)
    assert numbers["expected_s"] == pytest.approx(sum(row["expected_s"] for row in numbers["ops"]))


def test_a_step_of_a_run_with_stages_is_the_mean_of_its_cycle():
    config = overrides.changed(preset("speedrun-small"), {"train.gradient_accumulation_steps": 3})
    config = replace(only_stage(config, 1), train=replace(only_stage(config, 1).train, dtype="fp32"))
    numbers, built = plan.report(config, ceiling=made_up())
    assert numbers["step"] == {"forward_backward": 3.0, "optimizer_step": 0.5, "optimizer_step_tied": 0.5}
    assert numbers["model_flops"] == 3 * build_programs(config)["forward_backward"].flops  # Muon's products are not counted
    adam = next(row for row in numbers["ops"] if row["op"] == "cautious_adam")
    assert adam["program"] == "optimizer_step_tied"
    ops = [op for op in built.lowered["optimizer_step_tied"].ops if op.name == "cautious_adam"]
    assert (adam["count"], adam["bytes"]) == (len(ops) / 2, sum(op.bytes() for op in ops) / 2)


def test_a_card_that_is_not_here_is_counted_by_its_data_sheet(capsys, refused):
    argv = ["plan", "gpt2-124m", "--device", "cuda", "--dtype", "bf16", "--json"]
    found = {}
    for card in ("h100", "h200"):
        assert main.main([*argv, "--card", card]) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert numbers["ceiling"]["from"].startswith(card)
        found[card] = {row["op"]: row for row in numbers["ops"]}
    product, adamw = (found["h100"][op] for op in ("linear", "adamw"))
    assert product["expected_s"] == pytest.approx(product["flops"] / 989.4e12, rel=1e-2)
    assert adamw["expected_s"] == pytest.approx(adamw["bytes"] / (0.9 * 3.35e12))
    assert found["h200"]["adamw"]["expected_s"] == pytest.approx(adamw["expected_s"] * 3.35 / 4.8)
    assert "unknown card 'h10', did you mean 'h100'?" in refused(*argv, "--card", "h10")


@pytest.mark.parametrize("card, isa, sms, fits", [("rtx3060", "sm_86", 28, False), ("rtx5090", "sm_120", 170, True)])
def test_a_card_decides_what_fits_and_which_tiles_there_are(card, isa, sms, fits, capsys):
    argv = ["plan", "gpt2-124m", "--batch", "32", "--seq", "1024", "--card", card, "--json"]
    assert main.main(argv) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["device"], numbers["isa"], numbers["multiprocessors"]) == ("cuda", isa, sms)
    assert (
        numbers["limit_source"] == f"{card}'s memory"
        and numbers["fits"] is (numbers["arena_bytes"] <= numbers["limit_bytes"]) is fits
    )
    assert all(gemm["sms"] == sms and gemm["card"] == card for gemm in numbers["gemms"])


def test_the_map_covers_every_tensor_once_and_lists_lifetimes():
    numbers, built = plan.report(small("bf16", False))
    rows = plan.memory_map(built)
    assert len(rows) == len(built.plan.persistent) + sum(len(lives) for lives in built.plan.lifetimes.values())
    assert max(row["offset"] + row["bytes"] for row in rows) <= numbers["arena_bytes"]


def test_command_prints_json_and_tables(capsys):
    argv = ["plan", "gpt2-124m", "--batch", "2", "--seq", "33", "--dtype", "fp32", "--model.layers", "2"]
    assert main.main([*argv, "--json", "--map"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["batch"], numbers["seq"], numbers["dtype"]) == (2, 33, "fp32")
    assert numbers["map"]
    assert main.main([*argv, "--map"]) == 0
    table = capsys.readouterr().out
    assert f"{numbers['arena_bytes']:,}" in table and "linear_residual" in table


def test_which_parameter_gets_which_optimizer(capsys):
    command = ["plan", "shakespeare-char", "--optim.name", "muon", "--lr", "0.002", "--optim.muon_lr", "0.03", "--optim"]
    assert main.main([*command, "--json"]) == 0
    rows = {row["names"]: row for row in json.loads(capsys.readouterr().out)["optimizers"]}
    assert (rows["wte"]["optimizer"], rows["wte"]["rate"]) == ("AdamW", 0.002)
    assert rows["h.*.ln_1.weight"]["count"] == 4 and rows["h.*.ln_1.weight"]["options"]["weight_decay"] == 0
    qkv = rows["h.*.attn.c_attn.weight"]
    assert (qkv["optimizer"], qkv["shape"], qkv["count"]) == ("Muon", [384, 128], 4)
    assert qkv["rate"] == pytest.approx(0.03) and qkv["options"]["orthogonalization"] == "polar-express"
    assert sum(row["count"] for row in rows.values()) == 2 + 4 * 6 + 1
    assert main.main(command) == 0
    table = capsys.readouterr().out
    _, muon = table.split("\nMuon, 0.03, nesterov True")
    assert [line.split() for line in muon.splitlines() if "c_attn" in line] == [["h.*.attn.c_attn.weight", "384", "x", "128", "4"]]
    assert main.main(["plan", "shakespeare-char"]) == 0
    assert "peak learning rate" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [
    "plan gpt2-124m --map --optim --card h100", "plan llama3-8b --seq 128 --optim --card h200",
    "plan gpt2-124m --batch 64 --device cuda", "plan --device cuda --gemm 1024 128256 4096",
    "plan gpt2-1558m --ranks 1024 --interconnect ib400", "inspect --preset llama-15m", "inspect linear_gelu",
])  # fmt: skip
def test_tables_fit_into_a_terminal_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main.main(command.split()) == 0
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert not wide, "\n".join(wide)


def test_the_speedrun_s_groups_have_their_own_rates(capsys):
    assert main.main(["plan", "speedrun-small", "--lr", "0.004", "--optim", "--json"]) == 0
    rows = {row["names"]: row for row in json.loads(capsys.readouterr().out)["optimizers"]}
    found = {name: (rows[name]["optimizer"], rows[name]["rate"]) for name in ("h.*.mlp.down", "head", "values.*")}
    assert found == {"h.*.mlp.down": ("NorMuon", 0.0115), "head": ("Adam", 0.004), "values.*": ("Adam", 0.3)}


def test_a_plan_beyond_memory_is_shown_and_says_so(capsys, monkeypatch):
    monkeypatch.setenv("BARELLM_MEMORY_LIMIT", "1G")
    assert main.main(["plan", "gpt2-124m", "--batch", "4", "--seq", "64"]) == 0
    assert "DOES NOT FIT: BARELLM_MEMORY_LIMIT is 1,073,741,824 bytes" in capsys.readouterr().out


@pytest.mark.parametrize("argv, words", [
    (["--seq", "2000"], ["train.seq 2000", "1024"]),
    (["--batch", "0"], ["train.micro_batch_size", "at least 1"]),
    (["--model.heads", "7"], ["model.heads 7", "768"]),
])  # fmt: skip
def test_mistakes_are_one_line(argv, words, capsys):
    assert main.main(["plan", "gpt2-124m", *argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and all(word in text for word in words)
