"""bench --baselines: who is measured and how, mistakes told; the tables of docs/speed.md come from the files."""

import importlib
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from barellm.assembly.build import build_programs, resolved
from barellm.assembly.programs import build
from barellm.cli import bench, main
from barellm.cli.parsing.options import Parser, configuration
from barellm.config.overrides import changed
from barellm.cpu import isa
from barellm.errors import UserError
from barellm.models import preset, training_schedule
from barellm.optim.adamw import adamw
from barellm.runtime.reference import ReferenceSession
from barellm.tools.bench import description
from benchmarks import baselines, interleaved
from benchmarks.interleaved import Variant
from tests.profiling.conftest import made_up

FAKE = """
import json, sys
seconds = float(sys.argv[1])
print(json.dumps({"first_step_s": 1.0, "version": "0"}), flush=True)
for line in sys.stdin:
    answer = {"step_s": [seconds] * int(line), "cpu_s": 0, "minor_faults": 0, "peak_rss_bytes": 10**6}
    print(json.dumps(answer), flush=True)
"""


def config(name="shakespeare-char", **keys):
    return resolved(changed(preset(name), {k.replace("__", "."): v for k, v in keys.items()}), "cpu")


def fake(name, seconds):
    return Variant(name, [sys.executable, "-c", FAKE, str(seconds)], {}, "a stand-in")


@pytest.fixture
def result(monkeypatch):
    monkeypatch.setattr("barellm.tools.plan.roofline.measured_ceiling", made_up)
    monkeypatch.setattr(interleaved, "SETTLE_SECONDS", 0.0)
    made = [fake("barellm", 0.25), fake("slow", 0.5), fake("slower", 0.75)]
    monkeypatch.setattr(baselines, "variants", lambda config, baselines, device: made)
    return baselines.measure(config(), {"torch": ""}, rounds=3, report=lambda line: None)


def test_every_sample_is_kept(result):
    assert result["ours_s"] == 0.25 and result["ratios"] == {"slow": 2.0, "slower": 3.0}
    assert (result["best_peer"], result["ratio_to_best"]) == ("slow", 2.0)
    for v in result["variants"]:
        assert [len(turn["step_s"]) for turn in v["turns"]] == [result["steps_per_turn"]] * 3
        assert v["peak_rss_bytes"] == 10**6
    assert result["tokens_per_s"] == 12 * 64 / 0.25
    assert result["percent_of_bound"] == pytest.approx(100 * result["bound_s"] / 0.25)
    machine = result["machine"]
    assert {"processor", "cores", "threads", "isa", "system"} <= set(machine) and "gpu" not in machine
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())["MemTotal"]
    assert machine["memory_bytes"] == 1024 * int(memory.split()[0])


def test_the_tables_and_the_chart_are_made_from_the_files(result, table, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table.chart, "FILE", tmp_path / "bench.svg")
    monkeypatch.setattr(table.chart.write, "__defaults__", (tmp_path / "bench.svg",))
    assert "Nothing is measured yet" in table.parts()[table.SPEED]
    (tmp_path / "a.json").write_text(json.dumps(result))
    (tmp_path / "b.json").write_text(json.dumps(result | {"ratios": {"slow": 17.5}, "best_peer": "slow"}))
    (tmp_path / "other.json").write_text('{"kind": "other"}')
    (tmp_path / "xeon-amx").mkdir()
    (tmp_path / "xeon-amx" / "c.json").write_text(json.dumps(result | {"ours_s": 0.0625}))
    (tmp_path / "xeon-amx" / "many.json").write_text('{"kind": "other", "batch": [1, 16]}')
    speed, details = tmp_path / "speed.md", tmp_path / "results.md"
    for name, path in (("ROOT", tmp_path), ("SPEED", speed), ("DETAILS", details)):
        monkeypatch.setattr(table, name, path)
        if path != tmp_path:
            path.write_text(f"before\n{table.BEGIN}\nearlier lines\n{table.END}\nafter\n")
    assert run(table, "--check", monkeypatch) == 1
    assert run(table, "--write", monkeypatch) == 0
    assert "median of" in details.read_text() and "earlier" not in details.read_text()
    text = speed.read_text()
    assert "| **2.00x** | 3.00x | benchmarks/results/a.json |" in text
    assert text.endswith("after\n") and "earlier" not in text
    zen, xeon = text.split("**On two cores of an Intel Xeon with AMX:**")
    assert "benchmarks/results/b.json" in zen and "62.5 ms" not in zen and "first step from cold caches" in zen
    assert "| 62.5 ms |" in xeon and "results/xeon-amx/c.json" in xeon and "first step from cold caches" not in xeon
    assert "first step from cold caches" in details.read_text()
    assert run(table, "--check", monkeypatch) == 0
    picture = (tmp_path / "bench.svg").read_text()
    assert all(f">{words}</text>" in picture for words in ("1.00x", "2.00x", "3.00x", "17.50x (cut)"))
    (tmp_path / "bench.svg").write_text(picture.replace("slower 3.00", "slower 3.10"))
    assert run(table, "--check", monkeypatch) == 1


def run(table, option, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table.py", option])
    return table.main()


def test_the_readme_and_the_results_are_what_the_files_give(table, monkeypatch):
    assert run(table, "--check", monkeypatch) == 0


def test_both_environments_of_the_peer_are_measured(monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object())
    made = {v.name: v for v in baselines.variants(config(), {"torch": ""})}
    assert set(made) == {"barellm", *(f"torch {m}, {e}" for m in ("eager", "compile") for e in ("installed", "tuned"))}
    assert made["torch eager, tuned"].environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "{" not in made["torch eager, tuned"].environment["GOMP_CPU_AFFINITY"]
    assert made["torch eager, installed"].environment == {"OMP_PROC_BIND": "true"}


def options_of(variant):
    """The options of a peer's command: name -> value."""
    return dict(word.removeprefix("--").split("=") for word in variant.command[2:])


def test_the_peer_is_the_twin_of_the_presets_architecture(monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object())
    gpt2 = baselines.variants(config(model__bias=False), {"torch": ""})[1]
    assert Path(gpt2.command[1]).name == "torch_gpt2.py"
    assert options_of(gpt2) == {
        "layers": "4", "heads": "4", "d_model": "128", "bias": "0", "vocab": "65", "batch": "12", "seq": "64",
        "dtype": config().train.dtype, "device": "cpu", "mode": "eager",
    }  # fmt: skip
    keys = {"train__batch": 4, "train__seq": 256, "train__dtype": "bf16", "model__tied": False, "model__rope_factor": 8}
    llama = baselines.variants(config("llama-124m", **keys), {"torch": ""}, "cuda")[2]
    assert Path(llama.command[1]).name == "torch_llama.py"
    assert options_of(llama) == {
        "layers": "12", "heads": "12", "kv_heads": "4", "d_model": "768", "d_ff": "2048", "tied": "0",
        "norm_eps": "1e-05", "rope_theta": "500000.0", "rope_factor": "8.0", "rope_low": "1.0", "rope_high": "4.0",
        "rope_old_seq": "8192", "vocab": "50304", "batch": "4", "seq": "256", "dtype": "bf16", "device": "cuda",
        "mode": "compile",
    }  # fmt: skip


def test_what_no_twin_has_is_told(monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delattr("barellm.models.llama3.TORCH_TWIN")
    with pytest.raises(UserError, match="no peer in PyTorch: the preset 'llama-15m' is llama3"):
        baselines.variants(config("llama-15m"), {"torch": ""})
    with pytest.raises(UserError, match="is fp16, expected fp32 or bf16"):
        baselines.variants(config(train__dtype="fp16"), {"torch": ""})
    with pytest.raises(UserError, match="gpt2 only, the preset 'llama-15m' is llama3"):
        baselines.variants(config("llama-15m"), {"llmc": "train_gpt2"})


def test_our_side_has_every_key_that_was_chosen():
    chosen = config(train__batch=3, model__channels=64, train__recompute=True, train__dtype="fp32")
    parser = Parser(prog="bench")
    bench.configure(parser)
    words = baselines.ours(chosen).command
    assert configuration(parser.parse(words[words.index("bench") + 1 :])) == chosen


def test_which_peers_are_chosen(monkeypatch, tmp_path):
    program = tmp_path / "train_gpt2"
    program.touch(mode=0o755)
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object())
    assert baselines.chosen("all") == baselines.chosen("torch") == {"torch": ""}
    assert baselines.chosen(f"all,llmc={program}") == {"torch": "", "llmc": str(program)}
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    assert baselines.chosen(f"all, llmc={program}") == {"llmc": str(program)}
    assert [v.name for v in baselines.variants(config(model__bias=True), {"llmc": str(program)})] == [
        "barellm",
        "llm.c, fp32, as in its README",
        "llm.c, fp32, tuned",
    ]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--baselines all", "finds none here"),
        ("--baselines torch", "PyTorch is not installed"),
        ("--baselines tourch", "'tourch', did you mean 'torch'?"),
        ("--baselines llmc", "llmc=PATH"),
        ("--baselines llmc=/nowhere/at/all", "/nowhere/at/all is no file"),
        (f"--baselines llmc={__file__}", "is not executable"),
        (f"--baselines llmc={sys.executable}", "llm.c's model has biases"),
        (f"--baselines llmc={sys.executable} --model.dropout 0.1", "no dropout"),
        ("--interleave 3", "--interleave is for"),
        ("--baselines all --interleave 0", "--interleave is 0"),
        ("ops --baselines llmc=/x", "is no file"),
        (f"ops --baselines llmc={sys.executable}", "PyTorch's ops only"),
    ],
)
def test_mistakes_are_told_in_a_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    kind = [] if words.startswith("ops") else ["step"]
    first, *rest = [*kind, *words.split()]
    assert main.main(["bench", first, "shakespeare-char", *rest]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_an_installed_package_has_no_baselines(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(description, "CHECKOUT", tmp_path)
    for what in ("step", "ops", "gemm", "attention"):
        assert "--baselines needs a checkout of the project" in refused("bench", what, "shakespeare-char", "--baselines", "torch")


def test_peers_need_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(baselines, "FOLDER", tmp_path)
    with pytest.raises(UserError, match="checkout"):
        baselines.chosen("torch")


@pytest.mark.parametrize("tiles, folder", [(False, "results"), (True, "results/xeon-amx")])
def test_without_words_the_step_is_measured_and_all_of_it_is_written(tiles, folder, result, monkeypatch, tmp_path):
    """`bench --interleave 3 --baselines all --publish`: a file among the results of such processors, then the tables."""
    wrote = []
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(baselines, "measure", lambda c, p, rounds, report, device: wrote.append((p, rounds)) or result)
    monkeypatch.setattr(baselines, "write_tables", lambda: wrote.append("tables"))
    monkeypatch.setattr(baselines, "baseline_script", Path)
    monkeypatch.setattr(baselines, "FOLDER", tmp_path)
    host = isa.host()
    monkeypatch.setattr(isa, "host", lambda: replace(host, tiles=tiles))
    assert main.main(["bench", "--interleave", "3", "--baselines", "all", "--publish"]) == 0
    assert wrote == [({"torch": ""}, 3), "tables"]
    name = f"default-8x256-{config('default').train.dtype}.json"
    assert json.loads((tmp_path / folder / name).read_text()) == json.loads(json.dumps(result))


@pytest.mark.parametrize(
    "words, name",
    [
        ("--batch 3 --dtype fp32 --recompute --optim.moments 16bit", "shakespeare-char-3x64-fp32-recompute-moments-16bit.json"),
        ("--model.layers 3", "shakespeare-char-changed-12x64-{dtype}.json"),
        ("--model.layers 3 --out {folder}/mine.json", "../../mine.json"),
    ],
)
def test_results_have_names_of_their_own(words, name, result, monkeypatch, tmp_path):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(baselines, "measure", lambda c, p, rounds, report, device: result)
    monkeypatch.setattr(baselines, "write_tables", lambda: pytest.fail("nobody said --publish"))
    monkeypatch.setattr(baselines, "baseline_script", Path)
    monkeypatch.setattr(baselines, "FOLDER", tmp_path / "benchmarks")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    words = words.format(folder=tmp_path).split()
    assert main.main(["bench", "step", "shakespeare-char", "--baselines", "all", *words]) == 0
    name = name.format(dtype=config().train.dtype)
    assert list(tmp_path.rglob("*.json")) == [(tmp_path / "runs" / "bench" / name).resolve()]


@pytest.mark.parametrize(
    "words, message",
    [
        ("step --baselines torch --out a.json", "leave out --out"),
        ("step", "--publish is for step --baselines and attention --baselines"),
        ("attention", "--publish is for step --baselines and attention --baselines"),
        ("gemm", "--publish is for step --baselines and attention --baselines"),
        ("step --baselines torch --model.layers 3", "this one is not shakespeare-char's"),
    ],
)
def test_what_has_no_place_among_the_results_is_refused_before_it_is_measured(words, message, refused):
    what, *more = words.split()
    assert message in refused("bench", what, "shakespeare-char", *more, "--publish")


def test_publishing_needs_a_checkout(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(description, "CHECKOUT", tmp_path)
    assert "--publish needs a checkout of the project" in refused(
        "bench", "step", "shakespeare-char", "--baselines", "torch", "--publish"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
def test_our_side_serves_turns(tmp_path):
    ours = baselines.ours(config())
    interleaved.interleave([ours], rounds=2, report=lambda line: None)
    steps = len(ours.turns[0]["step_s"])
    assert steps > 1 and all(len(t["step_s"]) == steps and len(t["losses"]) == steps + 1 for t in ours.turns)
    assert ours.facts["first_step_s"] > 0 and ours.peak_rss_bytes > ours.facts["arena_bytes"]


TWINS = {
    "gpt2": ("shakespeare-char", {"layers": 2, "heads": 2, "d_model": 32, "bias": True, "max_seq": 11}),
    "llama, tied": ("llama-15m", {"layers": 2, "heads": 4, "kv_heads": 2, "d_model": 32, "d_ff": 24, "max_seq": 11}),
    "llama, own head": ("llama-15m", {"layers": 1, "heads": 3, "kv_heads": 1, "d_model": 12, "d_ff": 20, "max_seq": 11,
                                      "tied": False, "norm_eps": 0.1, "rope_theta": 100.0, "rope_factor": 8.0,
                                      "rope_low": 2.0, "rope_high": 5.0, "rope_old_seq": 64}),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", TWINS)
def test_twins_have_our_parameters_and_our_loss(name, monkeypatch):
    """The peer's own arguments, as bench gives them; its parameters come in the order of ours. fp32, weights away from 0 and 1."""
    torch = pytest.importorskip("torch")
    base, keys = TWINS[name]
    sizes = {f"model__{key}": value for key, value in (keys | {"vocab_size": 64, "padded_vocab": 64}).items()}
    chosen = config(base, train__batch=2, train__seq=11, train__dtype="fp32", **sizes)
    command = baselines.variants(chosen, {"torch": ""})[1].command
    monkeypatch.syspath_prepend(Path(command[1]).parent)
    twin = importlib.import_module(Path(command[1]).stem)
    step = importlib.import_module("torch_step")
    assert {key: getattr(type(chosen.model)(), key) for key in twin.OWN} == twin.OWN  # the defaults
    model = twin.build(step.arguments(twin.OWN, command[2:]))
    _, programs = build(chosen.model, batch=2, seq=11, optimizer=partial(adamw, config=chosen.optim))
    session = ReferenceSession(programs, dtype="float64")
    ours = [(name, t) for name, t in session.tensors.items() if t.role == "parameter"]
    theirs = list(model.parameters())
    rng = np.random.default_rng(1)
    assert [tuple(map(int, t.shape)) for _, t in ours] == [tuple(p.shape) for p in theirs]
    decayed, kept = step.adamw(model).param_groups
    assert decayed["weight_decay"] > kept["weight_decay"] == 0 and {p.dim() for p in kept["params"]} == {1}
    assert len(decayed["params"]) == sum(p.dim() == 2 for p in theirs)
    for (name, t), p in zip(ours, theirs, strict=True):
        residual = name.endswith(("proj.weight", "down.weight"))
        std = 0.02 / (2 * chosen.model.layers) ** 0.5 if residual else 0.02
        assert p.dim() == 1 or p.std().item() == pytest.approx(std, rel=0.25)
        assert p.dim() == 2 or name.endswith("bias") or bool((p == 1).all())
        w = (0.3 * rng.normal(size=p.shape) + (t.name.endswith("norm.weight"))).astype(np.float32)
        session.write(name, w)
        p.data = torch.tensor(w)
    tokens, targets = rng.integers(0, 64, (2, 2, 11), dtype=np.int32)
    session.write("tokens", tokens)
    session.write("targets", targets)
    session.run("forward_backward", batch=2, seq=11, accumulate=0, inv_targets=1 / targets.size, step=1)
    loss = model(torch.tensor(tokens).long(), torch.tensor(targets).long()).item()
    assert loss == pytest.approx(float(session.read("loss")[0]), rel=1e-5)


SPEEDRUN = {"heads": 2, "d_model": 32, "d_ff": 48, "block": 1, "vocab_size": 64, "max_seq": 24, "separator": 5}
STAGES = "share=1 seq=24 windows=3,9 mtp=1,0.5,0.25; seq=24 windows=3,9"


@pytest.mark.oracle
def test_the_twin_of_the_speedrun_has_our_parameters_and_our_loss(monkeypatch):
    """Short windows are done in chunks of 3 and 6 tokens, long ones in chunks of 12 (of pairs) and of all."""
    torch = pytest.importorskip("torch")
    # The twin holds all weights in 32 bits: what bf16 weights of Adam cost is measured elsewhere.
    changes = SPEEDRUN | {"stages": STAGES, "adam_weights": "fp32"}
    sizes = {f"model__{key}": value for key, value in changes.items()}
    chosen = config("speedrun-small", train__batch=2, train__seq=24, train__dtype="fp32", **sizes)
    command = baselines.variants(chosen, {"torch": ""})[1].command
    monkeypatch.syspath_prepend(Path(command[1]).parent)
    twin, step = importlib.import_module(Path(command[1]).stem), importlib.import_module("torch_step")
    assert [twin.chunk(24, 3), twin.chunk(24, 9), twin.chunk(48, 9), twin.chunk(11, 3)] == [3, 24, 12, 11]
    a = step.arguments(twin.OWN, command[2:])
    model = twin.Speedrun(a)
    programs = build_programs(chosen)
    session = ReferenceSession(programs, dtype="float64")
    training_schedule.on_step(session, chosen, 0, chosen.train.steps)
    ours = {name: tuple(map(int, t.shape)) for name, t in session.tensors.items() if t.role == "parameter"}
    assert ours == {name: tuple(model[name].shape) for name in model.names} and list(ours) == model.names
    rng = np.random.default_rng(1)
    for name, shape in ours.items():
        w = (0.3 * rng.normal(size=shape) + name.startswith(("resid", "post", "lanes"))).astype(np.float32)
        session.write(name, w)
        model[name].data = torch.tensor(w)
    tokens, targets = rng.integers(0, 64, (2, 2, 24), dtype=np.int32)
    tokens[0, 7] = SPEEDRUN["separator"]
    session.write("tokens", tokens)
    session.write("targets", targets)
    session.run("forward_backward", batch=2, seq=24, accumulate=0, inv_targets=1.0, step=1)
    loss = model(torch.tensor(tokens).long(), torch.tensor(targets).long())
    assert loss.item() == pytest.approx(float(session.read("loss")[0]), rel=1e-5)
    loss.backward()
    end, before = twin.ending(model), {name: model[name].detach().clone() for name in ours}
    found = {name: model[name].grad for name in ours}
    assert all(np.linalg.norm(found[name].numpy() - session.read(f"{name}.grad")) < 2e-4 * found[name].norm() for name in ours)
    steps = training_schedule.model_schedule(chosen)
    assert steps
    (_, scalars), ((adam, more),) = steps.step(0, 400).updates[0], steps.step(1, 400).updates
    rates = {"lr": twin.RATE, "momentum": twin.MOMENTUM}
    session.run("optimizer_step", **{**scalars, **rates})
    end()
    changed = {name for name in ours if not torch.equal(model[name], before[name])}
    assert changed == {name for name in ours if twin.MATRICES.fullmatch(name)}
    near(session, model)
    session.run("forward_backward", batch=2, seq=24, accumulate=1, inv_targets=1.0, step=2)
    model(torch.tensor(tokens).long(), torch.tensor(targets).long()).backward()
    session.run(adam, **{**more, **rates})
    end()
    near(session, model)


def near(session, model):
    """The twin's weights are ours but for the rounding of NorMuon's products and of what stood near 0 in Adam's root."""
    for name in model.names:
        ours, theirs = session.read(name), model[name].detach().numpy()
        assert np.linalg.norm(ours - theirs) < 2e-3 * np.linalg.norm(theirs), name


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["shakespeare-char", "llama-15m"])
def test_pytorch_serves_turns(name, tmp_path):
    small = {"train__batch": 2, "train__seq": 16, "model__layers": 2}
    made = {v.name: v for v in baselines.variants(config(name, **small), {"torch": ""})}["torch eager, tuned"]
    began = time.perf_counter()
    made.start(tmp_path)
    assert 0 < made.facts["import_s"] < made.facts["first_step_s"] < time.perf_counter() - began + 0.1
    made.turn(2)
    made.end()
    (turn,) = made.turns
    assert len(turn["step_s"]) == 2 and made.peak_rss_bytes > 1e8
    losses = [made.facts["loss"], *turn["losses"]]
    assert losses == sorted(losses, reverse=True)  # the same tokens at each step: they are learnt


@pytest.mark.oracle
def test_pytorch_has_most_ops():
    names = ["linear", "matmul_dw", "attention_backward", "layernorm_backward", "adamw", "clip_scale"]
    rows = [{"program": "forward_backward", "op": n, "shape": "128x128", "count": 2, "s": 1e-3, "alone_s": 1e-3} for n in names]
    assert "PyTorch" in baselines.torch_ops(config(), rows)["peer"]
    assert [row["op"] for row in rows if row["peer_s"] is None] == ["clip_scale"]
    assert all(row["times_peer"] > 0 for row in rows if row["peer_s"])
