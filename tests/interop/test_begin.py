"""Training that begins with weights from elsewhere, and commands that read an imported checkpoint."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import barellm
from barellm.checkpoint import checkpoint
from barellm.cli.main import main
from barellm.errors import UserError
from barellm.interop import card
from barellm.interop.sources import open_weights
from barellm.training import metrics
from tests.interop.models import TINY, checkpoint_of, hugging_face, llmc_file, random_arrays, their_tensors, weights_of

ARRAYS = random_arrays(TINY)
COUNT = sum(array.size for array in ARRAYS.values())  # 256 ids need no padding
REFERENCE = ("--device", "reference")
LOOKS = ("--batch", "2", "--steps", "4", "--train.eval_every", "2", "--train.eval_tokens", "0", *REFERENCE)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(100)))
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    return hugging_face(tmp_path / "hf", TINY, their_tensors(ARRAYS))


@pytest.fixture
def begin(text, tmp_path):
    """The words of a command that begins with weights."""

    def words(start: Path, *more: object, out: str = "run") -> list[str]:
        given = ("train", "--data", text, "--init-from", start, "--out", tmp_path / out, *LOOKS, *more)
        return [str(word) for word in given]

    return words


def evaluations(run: Path) -> list[float]:
    return [row["val_nats"] for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "eval"]


def last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.extended
def test_every_kind_of_source_begins_the_same_run(tmp_path, begin, source, text, capsys):
    """Sizes, positions and tokenizer are the source's; the loss before the first step is what `eval` says of it."""
    file = llmc_file(tmp_path / "gpt2.bin", TINY, ARRAYS, version=3, padded=384)
    own = checkpoint_of(tmp_path / "own", TINY, ARRAYS)
    kinds = {"theirs": (source, "--data.tokenizer", "bytes"), "llmc": (file, "--data.tokenizer", "bytes"), "step": (own,)}
    for name, start in (kinds | {"folder": (tmp_path / "own",)}).items():
        assert main(begin(*start, out=name)) == 0
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["model"] == vars(TINY) and config["train"]["seq"] == TINY.max_seq
        assert config["data"]["tokenizer"] == "bytes" and config["train"]["init_from"] == str(start[0])
    losses = evaluations(tmp_path / "theirs")
    assert losses[0] > losses[-1] and len(losses) == 3
    assert all(evaluations(tmp_path / name) == losses for name in ("llmc", "step", "folder"))
    capsys.readouterr()
    assert main(["eval", str(own), "--data", str(text), "--json", *REFERENCE]) == 0
    assert last_json(capsys)["nats"] == pytest.approx(losses[0], rel=1e-6)
    # The other seed is of the order of the text, not of the weights.
    assert main(begin(own, "--seed", "5", "--steps", "1", out="seed")) == 0
    assert evaluations(tmp_path / "seed")[0] == losses[0]


def test_the_next_commands_can_be_typed_whatever_the_folder_is_called(tmp_path, source, text, capsys):
    run = tmp_path / "ein Lauf"
    assert main(["import", str(source), "--out", str(run), "--tokenizer", "bytes"]) == 0
    words = shlex.split(capsys.readouterr().out.partition("next     barellm ")[2].replace("FILE", str(text)))
    assert words[:4] == ["train", "gpt2-124m", "--init-from", str(run)] and len(words) == 6


@pytest.mark.parametrize("options", [(), ("--json",), ("--per-document", "rows.jsonl"), ("--hellaswag", "swag.jsonl", "--json")])
def test_weights_that_are_not_finite_have_no_loss(tmp_path, text, refused, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swag.jsonl").write_text(json.dumps({"ctx": "a b", "endings": ["c", "d", "e", "f"], "label": 0}) + "\n")
    step = checkpoint_of(tmp_path / "own", TINY, ARRAYS | {"ln_f.weight": np.full_like(ARRAYS["ln_f.weight"], np.nan)})
    data = () if "--hellaswag" in options else ("--data", text, "--split", "all")
    said = refused("eval", step, *data, *options, *REFERENCE)
    assert said == f"the loss of {step} is nan, expected a finite number: are the weights finite?"
    assert not (tmp_path / "rows.jsonl").exists()


def test_an_imported_checkpoint_is_sampled_and_exported(tmp_path, source, text, capsys):
    run = tmp_path / "run"
    assert main(["import", str(source), "--out", str(run), "--tokenizer", "bytes"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{run}/checkpoints/step-000000: gpt2, {COUNT:,} parameters, 20 positions, tokenizer bytes")
    path, wrong = checkpoint.find(run)
    assert not wrong and checkpoint.read_meta(path)["source"] == str(source)
    assert main(["sample", str(run), "--prompt", "1 sq", "--max-new-tokens", "9", "--json", *REFERENCE]) == 0
    assert len(last_json(capsys)["tokens"]) == 9
    assert main(["plan", "--init-from", str(run), "--json"]) == 0
    assert last_json(capsys)["parameters"] == COUNT


def test_a_checkpoint_of_weights_alone_is_damaged_like_any(tmp_path, source, refused):
    run = tmp_path / "run"
    assert main(["import", str(source), "--out", str(run), "--tokenizer", "bytes"]) == 0
    file = run / "checkpoints/step-000000/weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "the checksum of weights.safetensors is" in refused("train", "--init-from", run)


def test_it_is_resumed_like_any_run(tmp_path, begin):
    start = checkpoint_of(tmp_path / "start", TINY, ARRAYS)
    assert main(begin(start, out="whole")) == 0
    assert main(begin(start, "--train.checkpoint_every", "2", out="cut")) == 0
    shutil.rmtree(tmp_path / "cut/checkpoints/step-000004")
    shutil.rmtree(tmp_path / "start")  # needed no more
    assert main(["train", "--out", str(tmp_path / "cut"), "--resume", *REFERENCE]) == 0
    files = [tmp_path / name / "checkpoints/step-000004/weights.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_killed_before_its_first_checkpoint_it_begins_with_the_weights_again(tmp_path, begin, source):
    assert main(begin(source, "--data.tokenizer", "bytes")) == 0
    run = tmp_path / "run"
    first = load_file(run / "checkpoints/step-000004/weights.safetensors")
    shutil.rmtree(run / "checkpoints")
    assert main(["train", "--out", str(run), "--resume", *REFERENCE]) == 0
    again = load_file(run / "checkpoints/step-000004/weights.safetensors")
    assert all((first[name] == again[name]).all() for name in first)


# --- what is refused ---


def test_options_that_contradict_the_source(tmp_path, begin, refused):
    start = checkpoint_of(tmp_path / "start", TINY, ARRAYS)
    assert f"model.layers is 2 in {start}, the command line says 6" in refused(*begin(start, "--model.layers", "6"))
    assert "model.max_seq is 20 in" in refused(*begin(start, "--model.max_seq", "10"))
    assert "train.seq 21 is above model.max_seq 20" in refused(*begin(start, "--seq", "21"))
    assert "data.tokenizer is 'bytes' in" in refused(*begin(start, "--data.tokenizer", "gpt2"))
    assert not (tmp_path / "run").exists()
    more = ("--model.layers", "2", "--model.dropout", "0.1", "--data.tokenizer", "bytes", "--seq", "10")
    assert main(begin(start, *more)) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"] == vars(replace(TINY, dropout=0.1)) and config["train"]["seq"] == 10


def test_sources_that_are_none(tmp_path, begin, refused):
    known = (
        "expected a run or checkpoint of barellm, a folder of Hugging Face's, a file of llama.cpp (GGUF) or llm.c, or hf:OWNER/NAME"
    )
    assert refused(*begin(tmp_path / "nowhere")) == f"{tmp_path / 'nowhere'} does not exist, {known}"
    (tmp_path / "empty").mkdir()
    assert refused(*begin(tmp_path / "empty")) == f"{tmp_path / 'empty'} holds no model, {known}"
    assert "is not a model of llm.c" in refused(*begin(tmp_path / "text.txt"))


def test_weights_alone_are_no_run_to_go_on_with(tmp_path, refused):
    checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    message = refused("train", "--out", tmp_path / "run", "--resume", *REFERENCE)
    assert message.endswith(f"holds weights alone: begin a run with them, with --init-from {tmp_path / 'run'}")


def test_what_import_and_export_refuse(tmp_path, refused, monkeypatch):
    step = checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    out = ("--out", tmp_path / "new")
    assert refused("import", step, *out) == f"{step} is a checkpoint of barellm already"
    assert "run is not empty" in refused(
        "import", hugging_face(tmp_path / "hf", TINY, their_tensors(ARRAYS)), "--out", tmp_path / "run", "--tokenizer", "bytes"
    )  # fmt: skip
    assert refused("export", step, "--format", "hugginface", *out) == (
        "--format is 'hugginface', did you mean 'huggingface'? "
        "(known: huggingface or hf, peft, llmc or llm.c, gguf or llama.cpp, llmc-tokenizer, llmc-checkpoint)"
    )
    assert "--dtype is 'fp16'" in refused("export", step, "--format", "llmc", "--dtype", "fp16", *out)
    model = replace(TINY, bias=False)
    bare = checkpoint_of(tmp_path / "bare", model, {n: a for n, a in ARRAYS.items() if not n.endswith("bias")})
    for kind in ("huggingface", "llmc"):
        assert refused("export", bare, "--format", kind, *out) == (
            f"{bare}: model.bias is false, GPT-2 has biases there, expected true"
        )
    sparse = checkpoint_of(tmp_path / "sparse", replace(TINY, activation="relu2"), ARRAYS)
    message = f"{sparse}: model.activation is 'relu2', expected gelu, as GPT-2 has it"
    assert refused("export", sparse, "--format", "huggingface", *out) == message
    assert "llmc-tokenizer has no place for it" in refused("export", step, "--format", "llmc-tokenizer", "--license", "mit", *out)
    deep = ("--out", tmp_path / "new" / "deep.bin")
    assert "have an end of text" in refused("export", step, "--format", "llmc-tokenizer", *deep)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        assert "needs the package gguf" in refused("export", step, "--format", "gguf", *deep)
    assert not (tmp_path / "new").exists()


def test_a_card_says_what_the_run_says_of_itself(tmp_path):
    """Also where the run was killed while it wrote a line. A step beside which no run is has no such numbers; words of the
    licence mean nothing in the card's head."""
    rows = [{"kind": "eval", "step": 0, "val_nats": 3.25, "val_bits_per_byte": None}, {"kind": "eval", "step": 9}]
    step = checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines) + lines[0][:9])
    meta = json.loads((step / "meta.json").read_text()) | {"samples": 7, "tokens": 1234, "data": {"name": "a text"}}
    weights = open_weights(step)
    (step / "meta.json").write_text(json.dumps(meta))
    said = [
        card.text(replace(weights, path=place), dtype="fp32", licence="mit # [x]")
        for place in (step, shutil.copytree(step, tmp_path / "elsewhere"))
    ]
    assert '\nlicense: "mit # [x]"\n' in said[0] and "| validation loss | 3.2500 nats per token |" in said[0]
    assert "# run\n" in said[0] and "| tokens trained on | 1,234 |" in said[0]
    assert "# elsewhere\n" in said[1] and "validation loss" not in said[1]


def test_a_card_names_files_without_their_folders(tmp_path):
    step = checkpoint_of(tmp_path / "run", TINY, ARRAYS)
    weights, meta = open_weights(step), json.loads((step / "meta.json").read_text())
    data, train = {"source": "/home/secret/plays.txt"}, {"init_from": "../secret/runs/base", "hellaswag": "val.jsonl"}
    meta |= {"samples": 7, "tokens": 1234, "data": {"name": "/home/secret/plays.txt"}}
    meta["config"]["data"] |= data
    meta["config"]["train"] |= train
    (step / "meta.json").write_text(json.dumps(meta))
    said = card.text(weights, dtype="fp32", licence=None)
    assert "secret" not in said and "| text | plays.txt |\n" in said
    for line in ('"source": "plays.txt"', '"init_from": "base"', '"hellaswag": "val.jsonl"'):
        assert line in said


def test_rows_of_padded_ids_are_zero_whatever_the_file_says():
    model = replace(TINY, vocab_size=250, padded_vocab=256)
    weights = weights_of(model, ARRAYS)
    rows = weights.read_rows("wte", 245, 256)
    assert (rows[:5] == ARRAYS["wte"][245:250]).all() and not rows[5:].any()
    assert not weights.read_rows("wte", 252, 256).any()


@pytest.mark.parametrize(
    "name, hint",
    [
        ("gpt2", "gpt2 is a preset, whose weights barellm.train('gpt2') makes; the one on the hub is hf:gpt2"),
        ("gpt2-774m", "the one on the hub is hf:gpt2-large"),
        ("meta-llama/Llama-3.2-1B", "the one on the hub is hf:meta-llama/Llama-3.2-1B"),
    ],
)
def test_the_name_of_a_model_on_the_hub_gets_the_way_to_it(name, hint):
    with pytest.raises(UserError) as error:
        barellm.load(name)
    assert hint in str(error.value)
