"""Runs with frozen weights on the command line: what checkpoints hold, resuming, bases, adapters in other commands, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import barellm
from barellm import models
from barellm.checkpoint import checkpoint, tensorfile
from barellm.cli.main import main
from barellm.config import AdapterConfig, overrides
from barellm.errors import UserError
from barellm.interop.sources import open_weights, with_adapter
from barellm.program import quantization
from barellm.program.builder import Program, Store
from barellm.program.ops.gemm.low_rank import LowRankUpdate

SIZES = (
    *("--model.layers", "2", "--model.heads", "4", "--model.kv_heads", "2", "--model.d_model", "16", "--model.d_ff", "20"),
    *(
        "--model.max_seq",
        "16",
        "--seq",
        "8",
        "--batch",
        "2",
        "--train.minutes",
        "0",
        "--eval-every",
        "0",
        "--train.sample_every",
        "0",
    ),
    *("--train.eval_tokens", "64", "--device", "reference", "--data.tokenizer", "bytes", "--optim.warmup", "0"),
)
LORA = ("--adapt", "lora:3", "--adapter.targets", "q_proj,down_proj", "--adapter.dropout", "0.2", "--lr", "0.05", "--steps", "6")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(300)))
    command = ["train", "llama-15m", "--data", str(folder / "text.txt"), "--out", str(folder / "run"), *SIZES, "--steps", "2"]
    assert main(command) == 0
    return folder / "run"


@pytest.fixture
def tune(base, tmp_path):
    """Trains on top of the base into `out`, and gives the folder."""

    def run(*words: str, out: str = "tuned") -> Path:
        options = [word for name, word in zip(SIZES[::2], SIZES[1::2], strict=True) if "model" not in name for word in (name, word)]
        command = ["train", "llama-15m", "--data", str(base.parent / "text.txt"), *options, "--init-from", str(base), *words]
        assert main([*command, "--out", str(tmp_path / out)]) == 0
        return tmp_path / out

    return run


def step_of(run: Path) -> Path:
    return checkpoint.find(run)[0]


def logits(path: Path, **how) -> np.ndarray:
    with barellm.load(path, device="reference", dtype="fp32", **how) as model:
        return model.logits(np.arange(8)[None] + 60)


def test_a_checkpoint_holds_the_adapter_alone_and_names_its_base(tune, base):
    step = step_of(tune(*LORA))
    arrays = tensorfile.mapped(step / checkpoint.WEIGHTS)
    shapes = {"attn.qkv.weight.lora_A": (3, 16), "attn.qkv.weight.lora_B.q_proj": (16, 3)}
    shapes |= {"mlp.down.weight.lora_A": (3, 20), "mlp.down.weight.lora_B.down_proj": (16, 3)}
    assert {name: a.shape for name, a in arrays.items()} == {f"h.{i}.{k}": shape for i in (0, 1) for k, shape in shapes.items()}
    moments = {name.rpartition(".")[0] for name in tensorfile.mapped(step / checkpoint.OPTIMIZER)}
    assert moments == set(arrays) | {""}
    named = checkpoint.read_meta(step)["base"]
    assert named == {"path": str(step_of(base)), "hash": open_weights(base).digest()}
    assert all(np.abs(a).max() > 0 for a in arrays.values())


def test_a_resumed_run_ends_with_the_same_bytes(tune):
    whole, again = tune(*LORA), tune(*LORA, "--train.checkpoint_every", "3", out="again")
    last = step_of(again)
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    assert main(["train", "--out", str(again), "--resume", "--device", "reference"]) == 0
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        assert (step_of(again) / name).read_bytes() == (step_of(whole) / name).read_bytes()


def test_train_only_changes_these_parameters_and_no_others(tune, base):
    run = tune("--train-only", "h.1.*|norm.weight", "--steps", "3", "--lr", "0.01")
    before, after = open_weights(base), open_weights(run)
    changed = {
        n for n, t in before.tensors.items() if (before.arrays[n][0 : t.valid_rows] != after.arrays[n][0 : t.valid_rows]).any()
    }
    assert changed == {name for name in before.tensors if name.startswith("h.1.") or name == "norm.weight"}
    assert set(tensorfile.mapped(step_of(run) / checkpoint.WEIGHTS)) == changed


def test_what_is_lowest_has_no_gradient_of_its_input(base):
    """Below the lowest adapted layer nothing goes back: no gradient of the norm, and no attention backward there."""
    from barellm.assembly.build import build_programs
    from barellm.config import AdapterConfig, Config, TrainConfig

    model, train = open_weights(base).model, TrainConfig(micro_batch_size=2, seq=8, dtype="fp32")
    programs = build_programs(Config("made", model, train=train, adapter=AdapterConfig("lora:2", targets="layers.1.mlp.down_proj")))
    names = [op.name for op in programs["forward_backward"].ops]
    assert "attention_backward" not in names and "swiglu_backward" not in names and names.count("matmul_dw") == 2
    assert {t.name for t in programs["forward_backward"].store.of_role("gradient")} == {
        "h.1.mlp.down.weight.lora_A.grad", "h.1.mlp.down.weight.lora_B.down_proj.grad"
    }  # fmt: skip


@pytest.mark.parametrize("base_format", ["auto", "int4", pytest.param("nf4", marks=pytest.mark.extended)])
def test_a_base_with_an_adapter_is_one_model_everywhere(tune, base, base_format, tmp_path, capsys):
    """By the run's name, by --adapter, as PEFT's folder, and merged into a folder of Hugging Face's or a GGUF file."""
    run = tune(*LORA, "--adapter.base", base_format)
    weights, plain = open_weights(run), open_weights(base)
    arrays = tensorfile.mapped(step_of(run) / checkpoint.WEIGHTS)
    name = "h.1.mlp.down.weight"
    whole = plain.read_rows(name, 0, 16)
    if base_format != "auto":
        how = quantization.scheme(base_format)
        whole = quantization.dequantize(*quantization.quantize(whole, how), how)
    added = 8 / 3 * arrays[f"{name}.lora_B.down_proj"] @ arrays[f"{name}.lora_A"]
    np.testing.assert_allclose(weights.read_rows(name, 0, 16), whole + added, atol=1e-6)
    expected = logits(run)
    assert np.abs(expected - logits(base)).max() > 1e-3
    assert main(["export", str(run), "--merge", "--format", "hf", "--out", str(tmp_path / "merged")]) == 0
    np.testing.assert_allclose(logits(tmp_path / "merged", tokenizer="bytes"), expected, atol=1e-5)
    assert main(["export", str(run), "--merge", "--format", "gguf", "--out", str(tmp_path / "merged.gguf")]) == 0
    merged = open_weights(tmp_path / "merged.gguf")
    for each, t in weights.tensors.items():
        np.testing.assert_array_equal(merged.read_rows(each, 0, t.valid_rows), weights.read_rows(each, 0, t.valid_rows))
    capsys.readouterr()
    losses = []
    for words in ([run], [base, "--adapter", run], *([] if base_format != "auto" else [[base, "--adapter", tmp_path / "peft"]])):
        if str(words[-1]).endswith("peft"):
            assert main(["export", str(run), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
            capsys.readouterr()
        assert main(["eval", *map(str, words), "--device", "reference", "--tokens", "64", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["nats"])
    assert losses == pytest.approx(losses[:1] * len(losses), abs=1e-6)


@pytest.mark.parametrize("kind", ["run", "peft"])
def test_an_adapter_goes_on_being_trained(tune, base, tmp_path, kind, refused, capsys):
    """With a learning rate of 0 the model stays the one that the adapter made, and the run is on top of the same base; `--adapt
    lora` takes rank, scale and modules from it."""
    first = tune(*LORA, "--adapter.alpha", "2")
    if kind == "peft":
        assert main(["export", str(first), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    source = {"run": first, "peft": tmp_path / "peft"}[kind]
    still = tune("--init-from", str(source), "--adapt", "lora", "--lr", "0", "--steps", "1", out="still")
    assert f"initialized with the weights of {step_of(base)} and the adapter of {source}" in capsys.readouterr().out
    np.testing.assert_array_equal(logits(still), logits(first))
    one, two = (tensorfile.mapped(step_of(run) / checkpoint.WEIGHTS) for run in (first, still))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    assert checkpoint.read_meta(step_of(still))["base"] == checkpoint.read_meta(step_of(first))["base"]
    more = tune("--init-from", str(source), "--adapt", "lora:3", "--adapter.targets", "*q_proj,*down_proj", "--lr", "0.05",
                "--steps", "2", out="more")  # fmt: skip
    assert np.abs(logits(more) - logits(first)).max() > 1e-3
    start = ("train", "llama-15m", "--init-from", source, "--data", base.parent / "text.txt", "--device", "reference")
    for words in (
        ("--adapt", "lora:4"),
        ("--adapt", "lora", "--adapter.alpha", "3.0", "--adapter.rslora", "true"),
        ("--adapt", "lora", "--adapter.targets", "q_proj"),
    ):
        said = refused(*start, *words, "--out", tmp_path / "no")
        assert (
            f"of rank 3, scale {2 / 3:g}, on q_proj,down_proj, and the command line asks for another by {' '.join(words)}: " in said
        )


def test_adapters_of_several_ranks_and_whole_parameters_do_not_go_on(tune, tmp_path, refused, base):
    assert main(["export", str(tune(*LORA)), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": {"q_proj": 5}}))
    start = ("train", "llama-15m", "--data", base.parent / "text.txt", "--device", "reference", "--adapt", "lora")
    assert "different ranks or scales" in refused(*start, "--init-from", tmp_path / "peft", "--out", tmp_path / "no")
    some = tune("--train-only", "norm.weight", "--steps", "1", "--lr", "0.1", out="some")
    over = tune("--init-from", str(some), "--adapt", "lora:2", "--steps", "1", out="over")  # a new adapter on top of all of it
    assert checkpoint.read_meta(step_of(over))["base"]["path"] == str(step_of(some))


@pytest.mark.extended
def test_adapters_of_one_base_by_name(tune, base):
    one, two = tune(*LORA), tune(*LORA, "--seed", "5", out="two")
    with barellm.load(base, device="reference", dtype="fp32", adapters={"one": one, "two": two}) as model:
        ids = np.arange(8)[None] + 60
        plain = model.logits(ids)
        for name, run in (("two", two), ("one", one)):
            model.use(name)
            np.testing.assert_array_equal(model.logits(ids), logits(run))
        model.use(None)
        np.testing.assert_array_equal(model.logits(ids), plain)
        with pytest.raises(ValueError, match="adapter is 'three', expected one of None, 'one', 'two'"):
            model.use("three")


@pytest.mark.extended
def test_mistakes_are_one_line_and_cost_nothing(tune, base, refused, tmp_path):
    run, text, out = tune(*LORA), str(base.parent / "text.txt"), str(tmp_path / "no")
    start = ("train", "llama-15m", "--init-from", base, "--data", text, "--device", "reference", "--out", out)
    assert "names 'q_prj', which matches no linear layer, did you mean 'q_proj'?" in refused(
        *start, "--adapt", "lora:2", "--adapter.targets", "q_prj"
    )
    assert "lora:RANK" in refused(*start, "--adapt", "lora:0")
    assert "matches no parameter" in refused(*start, "--train-only", "h.9.*")
    assert "expected one of them" in refused(*start, "--train-only", "h.1.*", "--adapt", "lora")
    assert "name them with --init-from" in refused("train", "llama-15m", "--data", text, "--adapt", "lora", "--out", out)
    assert "nothing is frozen" in refused(*start, "--adapter.base", "int4")
    assert "optim.powersgd is 2: expected 0" in refused(*start, "--adapt", "lora", "--optim.powersgd", "2")
    assert "export it as peft, or add --merge" in refused("export", run, "--format", "hf", "--out", out)
    assert "leave out --merge" in refused("export", base, "--format", "hf", "--merge", "--out", out)
    folder = tmp_path / "base-hf"
    assert main(["export", str(base), "--format", "hf", "--out", str(folder)]) == 0
    for path, named in (base, step_of(base)), (folder, folder):
        assert f"{named} has no adapter of barellm's, expected a run" in refused("export", path, "--format", "peft", "--out", out)
    other = tune("--steps", "1", out="other")  # of the same sizes, with other weights
    said = refused("eval", other, "--adapter", run, "--device", "reference")
    assert (
        f"was trained on top of {step_of(base)}, with the hash " in said
        and f"name {step_of(base)} with this adapter, or {run}" in said
    )
    assert "holds all weights" in refused("eval", base, "--adapter", other, "--device", "reference")
    assert not (tmp_path / "no").exists()


@pytest.mark.extended
def test_a_base_that_is_another_one_now_is_refused(tune, base, refused, tmp_path):
    run = tune(*LORA)
    path = step_of(run) / checkpoint.META
    meta = json.loads(path.read_text())
    saved = path.read_text()
    for change, said in ({"hash": "0" * 16}, "expected 0000"), ({"path": str(tmp_path / "gone")}, "is not there"):
        path.write_text(json.dumps(meta | {"base": meta["base"] | change}))
        (step_of_manifest := step_of_raw(run) / checkpoint.MANIFEST).write_text(_manifest(step_of_manifest, path))
        assert said in refused("eval", run, "--device", "reference")
        assert said in refused("train", "--out", run, "--resume", "--steps", "9", "--device", "reference")
    path.write_text(saved)


def step_of_raw(run: Path) -> Path:
    return checkpoint.steps(run / "checkpoints")[0]


def _manifest(path: Path, meta: Path) -> str:
    """The manifest with the size and the checksum of a changed meta.json."""
    from xxhash import xxh3_64

    manifest = json.loads(path.read_text())
    manifest["files"][checkpoint.META] = {"bytes": meta.stat().st_size, "xxh3_64": xxh3_64(meta.read_bytes()).hexdigest()}
    return json.dumps(manifest)


def test_a_file_of_another_model_or_rank_is_refused(tune, base, refused, tmp_path):
    assert main(["export", str(tune(*LORA)), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    file = tmp_path / "peft" / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["target_modules"] == ["q_proj", "down_proj"] and config["r"] == 3
    for change, said in (
        ({"r": 4}, "is (3, 16), expected (4, 16) of this model and rank 4"), ({"r": "x"}, "r of model.layers.0"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"), ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"), ({"rank_pattern": {"q_proj": 5}}, "expected (5, 16)"),
    ):  # fmt: skip
        file.write_text(json.dumps(config | change))
        assert said in refused("eval", base, "--adapter", tmp_path / "peft", "--device", "reference"), change


def test_what_an_adapter_adds_is_times_alpha_over_rank_or_its_root():
    assert AdapterConfig("lora:4", alpha=0.5).scale == 0.125 and AdapterConfig("lora:4", alpha=0.5, rslora=True).scale == 0.25
    assert (AdapterConfig("lora").rank, AdapterConfig("lora").scale, AdapterConfig().rank) == (8, 1.0, 0)
    for found in ("lora:", "lora:0", "lora:1025", "lora:x", "dora:4"):
        with pytest.raises(UserError, match=rf"adapter.method \(--adapt\) is '{found}', expected lora:RANK"):
            AdapterConfig(found)


@pytest.mark.parametrize("name, found", [("targets", "q_proj"), ("alpha", 16.0), ("dropout", 0.1), ("rslora", True)])
def test_options_of_adapters_need_an_adapter(name, found, base, refused):
    """Else they would be ignored, and all weights trained. Defaults, which saved configurations have, are taken."""
    given = str(found).lower()
    said = refused("train", "llama-15m", "--init-from", base, f"--adapter.{name}", given)
    assert said == f"adapter.{name} is {found!r}, and no adapter is asked for: add --adapt lora:16"
    with pytest.raises(UserError, match=f"adapter.{name} is .*: add --adapt"):
        AdapterConfig(train_only="norm.weight", **{name: found})
    assert getattr(AdapterConfig("lora:16", **{name: found}), name) == found
    assert overrides.from_json(overrides.to_json(models.preset("llama-15m"))).adapter == AdapterConfig()


def test_peft_s_folder_of_a_run_says_what_opens_its_base(tune, base, tmp_path, capsys):
    run, folder, out = tune(*LORA), tmp_path / "base-hf", tmp_path / "a peft"
    capsys.readouterr()
    assert main(["export", str(run), "--format", "peft", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    command = next(line.split() for line in said.splitlines() if "barellm export" in line)
    assert f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base-hf"), "{out}")' in said
    assert command[:3] == ["barellm", "export", str(step_of(base))] and command[-1] == "base-hf"
    assert main([*command[1:-1], str(folder)]) == 0 and open_weights(folder).digest() == open_weights(base).digest()
    over = tune(*LORA, "--init-from", str(folder), "--data.tokenizer", "bytes", out="over")  # a base that transformers opens
    capsys.readouterr()
    assert main(["export", str(over), "--format", "peft", "--out", str(tmp_path / "two")]) == 0
    assert "transformers" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "named, warned",
    [("org/Other", True), ("/elsewhere/Other/checkpoints/step-000002", True), ("org/RUN", False), (None, False), ("itself", False)],
)
def test_a_peft_adapter_of_a_base_with_another_name_is_warned_of(tune, base, tmp_path, capsys, named, warned):
    """Of equal shapes no tensor tells."""
    assert main(["export", str(tune(*LORA)), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    file = tmp_path / "peft" / "adapter_config.json"
    if named != "itself":
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": named}))
    capsys.readouterr()
    with_adapter(open_weights(base), tmp_path / "peft")
    expected = f"barellm: warning: {tmp_path / 'peft'} names {named} as its base, and is laid over {step_of(base)}\n"
    assert capsys.readouterr().err == (expected if warned else "")


def test_formats_of_a_frozen_base_and_their_groups(tune, refused, base):
    for found in ("int8", "int4/32", "nf4/128", "bf16"):
        assert AdapterConfig("lora", base=found).base == found
    for found in ("int4/48", "bf16/32", "int2", "int4/"):
        with pytest.raises(UserError, match=r"adapter.base is"):
            AdapterConfig("lora", base=found)
    said = refused("train", "llama-15m", "--init-from", base, "--data", base.parent / "text.txt", *SIZES, "--adapt", "lora:2",
                   "--dtype", "fp32", "--adapter.base", "bf16", "--steps", "1")  # fmt: skip
    assert "adapter.base is 'bf16', and train.dtype fp32" in said


def test_an_adapter_s_file_without_a_rank_has_pefts(tune, base, tmp_path):
    """8 of both, as PEFT's LoraConfig; a scale of 1 then."""
    run = tune("--adapt", "lora:8", "--adapter.targets", "q_proj", "--lr", "0.05", "--steps", "2")
    assert main(["export", str(run), "--format", "peft", "--out", str(tmp_path / "peft")]) == 0
    file = tmp_path / "peft" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in ("r", "lora_alpha")}))
    found = with_adapter(open_weights(base), tmp_path / "peft")
    name = "h.1.attn.qkv.weight"
    np.testing.assert_array_equal(found.read_rows(name, 0, 16), open_weights(run).read_rows(name, 0, 16))


def test_whole_parameters_are_no_adapter_for_peft(tune, refused, tmp_path):
    run = tune("--train-only", "norm.weight", "--lr", "0.05", "--steps", "2")
    assert "it has whole parameters" in refused("export", run, "--format", "peft", "--out", tmp_path / "peft")


def test_a_block_beyond_the_columns_is_refused():
    p = Program(Store())
    y, u, b = (p.input(name, shape, "fp32") for name, shape in (("y", (3, 8)), ("u", (3, 2)), ("b", (5, 2))))
    for first in (3, 4):
        attrs = {"firsts": (first,)}
        if first + 5 > 8:
            with pytest.raises(ValueError, match="low_rank_update expects"):
                LowRankUpdate({"y": y, "u": u, "b0": b}, attrs).infer(y, u, b0=b)
        else:
            assert LowRankUpdate({"y": y, "u": u, "b0": b}, attrs).infer(y, u, b0=b)["y"][0] == (3, 8)
