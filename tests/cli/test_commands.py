"""train, sample, eval and doctor as a user meets them."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from barellm import models
from barellm.assembly.build import open_model
from barellm.checkpoint import checkpoint
from barellm.cli import checkpoints
from barellm.cli.main import main
from barellm.cli.parsing.options import for_terminal
from barellm.config import Config
from barellm.cpu.backend import machine_of
from barellm.generation import decode
from barellm.runtime import rates
from barellm.tools.plan import roofline
from barellm.training import metrics

REFERENCE = ["--device", "reference"]


def last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_leaves_its_checkpoint_metrics_configuration_and_curve(trained):
    assert sorted(path.name for path in trained.iterdir()) == ["checkpoints", "config.json", "loss.png", "metrics.jsonl"]
    (step,) = (trained / "checkpoints").iterdir()
    names = ["manifest.json", "meta.json", "optimizer.safetensors", "tokenizer.json", "weights.safetensors"]
    assert sorted(path.name for path in step.iterdir()) == names
    meta = checkpoint.read_meta(step)
    assert meta["step"] == meta["total_steps"] == 4 and meta["samples"] == 8
    assert set(meta["versions"]) == {"barellm", "python", "numpy", "llvmlite"}
    assert meta["machine"]["isa"] == "numpy" and len(meta["tokenizer"]["hash"]) == 64
    assert meta["config"] | {"device": "reference"} == json.loads((trained / "config.json").read_text())
    assert set(meta["config"]) == {*Config.__dataclass_fields__, "architecture"}


def test_a_run_ends_in_plain_lines_and_its_metrics_in_the_result(tiny, capsys, tmp_path):
    assert main(tiny("--data", "stdlib", "--data.tokenizer", "bytes", "--data.val_fraction", "0.001")) == 0
    out = capsys.readouterr().out
    result = metrics.read(tmp_path / "run" / "metrics.jsonl")[-1]
    end = out[out.index("\ndone ") :]
    assert "{" not in end and f"{result['val_nats']:.4f} nats per token (perplexity " in end
    assert f"gzip -9: {result['gzip_bits_per_byte']:.3f} bits per byte" in end and "4 steps in 0:" in end
    typed = [line.partition("barellm ")[2] for line in end.splitlines() if " barellm " in line]
    assert [words.split()[0] for words in typed] == ["sample", "eval", "train"]
    for words in typed[:1] + typed[2:]:  # what it says to type next works
        assert main([*shlex.split(words), *REFERENCE]) == 0
    assert capsys.readouterr().out.count("\ndone ") == 1
    assert result["kind"] == "result" and result["steps"] == 4
    assert 4 < result["val_bits_per_byte"] < 9 and 1 < result["gzip_bits_per_byte"] < 5
    assert 0 <= result["tokenize_share"] <= 1 and 0.5 < result["tokenize_share_of_validation"] < 1
    assert Path(result["checkpoint"]).is_dir() and result["parameters"] > 0 and result["seconds"] > 0
    for words in ("parameters", "memory", "GFLOP", "validation", "nats per token", "bits per byte", "sample", "saved"):
        assert words in out


def test_a_text_of_one_line_is_sampled_too(tiny, text, tmp_path, capsys):
    """A character model samples from a new line, which this one does not know."""
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    assert main(tiny()) == 0
    assert "sample" in capsys.readouterr().out
    assert main(["sample", str(tmp_path / "run"), "--max-new-tokens", "9", *REFERENCE]) == 0
    assert len(capsys.readouterr().out) == 9 + 1


def test_a_terminal_without_some_characters_gets_question_marks(tiny, text, monkeypatch):
    text.write_text("\u4e00\u4e8c\n" * 200)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(tiny()) == 0
    out.flush()
    assert b"?" in out.buffer.getvalue()


def test_a_constant_rate_may_be_below_the_rate_that_others_fall_to(tiny, tmp_path):
    """The preset's min_lr is 1e-4; the schedule is saved with the run, and a run goes on with it."""
    assert main(tiny("--schedule", "constant", "--lr", "1e-5", "--optim.warmup", "1")) == 0
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", "--steps", "6", *REFERENCE]) == 0
    rows = [row["lr"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert rows == [5e-6, *[1e-5] * 5]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["optim"]["schedule"] == "constant"


def test_json_mode_prints_objects_only(tiny, capsys, tmp_path):
    assert main(tiny("--json")) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["kind"] == "result"


def test_a_folder_is_chosen_where_none_is_named(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = tiny()
    at = words.index("--out")
    del words[at : at + 2]
    assert main(words) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("shakespeare-char-2")
    assert main(["train", "shakespeare-char", "--resume", *REFERENCE]) == 0
    result = metrics.read(run / "metrics.jsonl")[-1]
    assert result["kind"] == "result" and Path(result["checkpoint"]).resolve() == run / "checkpoints/step-000004"


def test_runs_that_begin_in_one_second_have_folders_of_their_own(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("barellm.cli.train.time.strftime", lambda _: "20261122-101112")
    words = tiny()
    at = words.index("--out")
    del words[at : at + 2]
    for _ in range(3):
        assert main(words) == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == [f"shakespeare-char-20261122-101112{end}" for end in ("", "-2", "-3")]
    assert main([*words, "--data.tokenizer", "none"]) == 2  # a run that fails at once leaves no folder
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_samples_are_the_same_for_the_same_seed(trained, capsys):
    def sample(*more: str) -> dict:
        assert main(["sample", str(trained), "--max-new-tokens", "30", "--json", *REFERENCE, *more]) == 0
        return last_json(capsys)

    one = sample("--prompt", "12 squared", "--seed", "5")
    assert one == sample("--prompt", "12 squared", "--seed", "5") | {"tokens_per_s": one["tokens_per_s"]}
    assert one["tokens"] != sample("--prompt", "12 squared", "--seed", "6")["tokens"]
    assert len(one["tokens"]) == 30 and one["prompt"] == "12 squared"
    greedy = sample("--temperature", "0", "--seed", "1")["tokens"]
    assert greedy == sample("--temperature", "0", "--seed", "2")["tokens"] == sample("--top-k", "1")["tokens"]


def test_a_prompt_longer_than_the_positions_is_said_to_be_cut(trained, capsys):
    def said(prompt: str) -> str:
        assert main(["sample", str(trained), "--max-new-tokens", "3", "--prompt", prompt, "--json", *REFERENCE]) == 0
        return capsys.readouterr().err

    assert said("1 squared is 16.") == ""  # 16 positions
    words = "the prompt has 17 tokens: the model has 16 positions and sees the last 8"
    assert said("11 squared is 16.") == f"barellm: warning: {words}\n"


def test_eval_and_sample_take_a_dtype(trained, capsys):
    """A run is judged in the dtype that it was trained in, or in another: the loss of bf16 is near, and not the same."""

    def nats(*more: str) -> float:
        assert main(["eval", str(trained), "--json", *more]) == 0
        return last_json(capsys)["nats"]

    exact = nats("--dtype", "fp32")
    assert exact == nats() == nats("--dtype", "fp32") != nats("--dtype", "bf16")
    assert exact == pytest.approx(nats("--dtype", "bf16"), rel=0.01)
    for dtype in ("fp32", "bf16", "auto"):
        assert main(["sample", str(trained), "--dtype", dtype, "--max-new-tokens", "3"]) == 0
    for command in ("eval", "sample"):
        assert main([command, str(trained), "--dtype", "fp8"]) == 2
        assert "train.dtype is 'fp8', expected auto, fp32, bf16 or fp16" in capsys.readouterr().err


def test_shards_train_with_the_tokenizer_beside_them(tiny, text, tmp_path, capsys):
    """Nobody has to say again what `prepare` was told, and who says something else is refused."""
    out = tmp_path / "shards"
    assert main(["prepare", str(text), "--out", str(out), "--tokenizer", "bpe", "--vocab", "300"]) == 0
    assert main(tiny("--data", str(out))) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["data"]["tokenizer"] == "bpe" and config["model"]["vocab_size"] > 256
    words = ["--out", str(tmp_path / "run"), "--resume", "--steps", "6", *REFERENCE]
    assert main(["train", *words]) == 0
    assert main(tiny("--data", str(out), "--data.tokenizer", "chars", out=tmp_path / "other")) == 2
    assert "were made with tokenizer 'bpe', data.tokenizer is 'chars'" in capsys.readouterr().err


def test_a_checkpoint_is_opened_with_the_cache_that_the_command_needs(trained, monkeypatch):
    """A prompt of 4 ids and 3 tokens make 8 of the 16 positions; an evaluation needs none."""
    planned = []

    def recorded(*args, positions, **options):
        planned.append(positions)
        return open_model(*args, positions=positions, **options)

    monkeypatch.setattr(checkpoints, "open_model", recorded)
    monkeypatch.setattr(decode, "LEAST_POSITIONS", 1)
    for tokens in (3, 200):
        assert main(["sample", str(trained), "--prompt", "7 sq", "--max-new-tokens", str(tokens), *REFERENCE]) == 0
    assert main(["eval", str(trained), "--tokens", "64", *REFERENCE]) == 0
    assert planned == [8, 16, 0]


def test_sample_writes_prompt_and_text(trained, capsys):
    assert main(["sample", str(trained), "--max-new-tokens", "20", "--prompt", "7 sq", "--seed", "3", *REFERENCE]) == 0
    plain = capsys.readouterr().out
    assert main(["sample", str(trained), "--max-new-tokens", "20", "--prompt", "7 sq", "--seed", "3", "--json", *REFERENCE]) == 0
    assert plain == "7 sq" + last_json(capsys)["text"] + "\n"
    assert len(plain) == len("7 sq") + 20 + 1


def test_each_of_several_samples_comes_again_alone(trained, capsys):
    def sample(*more: object) -> tuple[str, list[dict]]:
        words = ["sample", trained, "--max-new-tokens", 40, "--prompt", "7 sq", *REFERENCE, *more]
        assert main([str(word) for word in words]) == 0
        plain = capsys.readouterr().out
        assert main([str(word) for word in [*words, "--json"]]) == 0
        return plain, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    plain, rows = sample("--samples", 3, "--seed", 5)
    alone = [sample("--seed", seed) for seed in (5, 6, 7)]
    headings = [f"--- sample {i} of 3, seed {4 + i}\n" for i in (1, 2, 3)]
    assert plain == "".join(heading + text for heading, (text, _) in zip(headings, alone, strict=True))
    for row, (_, (single,)) in zip(rows, alone, strict=True):
        assert row == single | {"tokens_per_s": row["tokens_per_s"]}
    assert [row["seed"] for row in rows] == [5, 6, 7]
    assert len({tuple(row["tokens"]) for row in rows}) == 3


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-000004"])
def test_a_checkpoint_is_named_by_its_run_or_by_itself(trained, capsys, place):
    assert main(["sample", str(trained / place), "--max-new-tokens", "3", "--json", *REFERENCE]) == 0
    assert last_json(capsys)["checkpoint"].endswith("step-000004")


def test_eval_gives_the_loss_that_the_run_reported(trained, capsys):
    (last,) = [row for row in metrics.read(trained / "metrics.jsonl") if row["kind"] == "eval" and row["step"] == 4]
    assert main(["eval", str(trained), "--json", *REFERENCE]) == 0
    found = last_json(capsys)
    assert found["nats"] == pytest.approx(last["val_nats"], rel=1e-6)
    assert found["targets"] == last["targets"]
    assert main(["eval", str(trained), *REFERENCE]) == 0
    said = f"{found['nats']:.4f} nats per token, perplexity {exp(found['nats']):,.4g}, {found['bits_per_byte']:.4f} bits"
    assert said in capsys.readouterr().out


def test_eval_on_another_text_uses_the_checkpoint_s_tokenizer(trained, tmp_path, capsys):
    path = tmp_path / "other.txt"
    path.write_text("squares are squared squares. " * 40)
    assert main(["eval", str(trained), "--data", str(path), "--json", *REFERENCE]) == 0
    part = last_json(capsys)
    assert (part["data"], part["targets"]) == (str(path), 29 * 4 - 1)  # a tenth of it
    assert main(["eval", str(trained), "--data", str(path), "--split", "all", "--json", *REFERENCE]) == 0
    assert last_json(capsys)["targets"] == 29 * 40 - 1


def test_eval_of_the_first_tokens_is_that_of_a_text_cut_there(trained, tmp_path, capsys):
    text = "squares are squared squares. " * 40
    found = []
    for name, part, more in (("whole", text, ("--first", "100")), ("cut", text[:101], ())):
        path = tmp_path / f"{name}.txt"
        path.write_text(part)
        assert main(["eval", str(trained), "--data", str(path), "--split", "all", "--json", *more, *REFERENCE]) == 0
        found.append(last_json(capsys))
    assert [row["targets"] for row in found] == [100, 100] and found[0]["nats"] == pytest.approx(found[1]["nats"])


def test_a_run_can_end_with_the_loss_of_the_first_tokens_in_longer_rows(tiny, tmp_path, capsys):
    """A length that no row of training has; `eval --first` finds the number that the run ended with."""
    assert main(tiny("--train.eval_from", "first", "--train.eval_seq", "13")) == 0
    rows = [row for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "eval"]
    assert [(row["step"], row["targets"]) for row in rows] == [(0, 64), (2, 64), (4, 64)]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--first", "64", "--json", *REFERENCE]) == 0
    assert last_json(capsys)["nats"] == pytest.approx(rows[-1]["val_nats"], rel=1e-6)
    assert main(["eval", str(tmp_path / "run"), "--tokens", "64", "--json", *REFERENCE]) == 0
    assert last_json(capsys)["nats"] != pytest.approx(rows[-1]["val_nats"], rel=1e-4)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--first", "-1"), "--first is -1, expected at least 0"),
        (("--first", "9", "--tokens", "9"), "--tokens are spread over the text and --first are not"),
        (("--first", "9", "--hellaswag", "x"), "leave out --data, --split, --tokens and --first"),
        (("--first", "9", "--per-document", "x"), "leave out --tokens and --first"),
        (("--first", "635"), "has 635 tokens, expected at most 634: each has one before it"),
    ],
)
def test_first_tokens_that_are_not_there_are_refused_in_a_line(trained, refused, words, message):
    assert message in refused("eval", str(trained), *words, *REFERENCE)


def test_a_row_of_an_evaluation_that_no_position_has_is_refused(tiny, refused):
    assert "train.eval_seq 17 is above model.max_seq 16" in refused(*tiny("--train.eval_seq", "17"))


def test_a_reader_that_goes_away_is_no_error(trained):
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "barellm", "sample", str(trained), "--max-new-tokens", "400", *REFERENCE]
    process = subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_doctor_tells_of_a_wrong_variable_beside_the_rest(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("BARELLM_THREADS", "many")
    assert main(["doctor", "--json"]) == 0
    uses = json.loads(capsys.readouterr().out)["barellm uses"]
    assert "no: cannot write" in uses["text cache"] and uses["threads"].startswith("no: BARELLM_THREADS is 'many'")
    assert uses["default dtype"] in ("fp32", "bf16")


def test_doctor_reports_in_both_forms(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"software", "processor", "memory", "gpu", "barellm uses", "measured rates", "environment"}
    assert found["barellm uses"]["threads"] >= 1 and found["memory"]["limit bytes"] > 1 << 20
    assert "BARELLM_CACHE" in found["environment"]
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in found:
        assert f"\n{part}\n" in f"\n{text}"


def test_doctor_measures_the_rates_of_the_machine_again(capsys, monkeypatch, tmp_path):
    class Bench:
        machine = machine_of()
        peaks = iter((100e9, 99e9, 98e9, 300e9, 100e9, 200e9))
        peak = staticmethod(lambda dtype: next(Bench.peaks))
        bandwidth = staticmethod(lambda mix: 20e9)
        close = staticmethod(lambda: None)

    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    monkeypatch.setattr(rates, "_process", {})
    monkeypatch.setattr(roofline, "open_bench", lambda device: Bench)
    assert main(["doctor", "--json"]) == 0
    assert last_json(capsys)["measured rates"] == {"none": "not measured yet: barellm doctor --measure"}
    assert main(["doctor", "--measure", "--json"]) == 0
    found = last_json(capsys)["measured rates"]
    assert found["cpu fp32"] == "100 GFLOP/s" and found["cpu copy"] == "20 GB/s"
    assert found["cpu bf16"] == "300 GFLOP/s (noisy: measurements differ by 67%)"


@pytest.mark.extended
def test_a_run_samples_and_evaluates_with_weights_of_few_bits(trained, text, capsys):
    losses = {}
    for weights in (None, "int8", "int4", "nf4/32"):
        few = [] if weights is None else ["--weights", weights]
        assert main(["eval", str(trained), "--data", str(text), *REFERENCE, *few, "--json"]) == 0
        losses[weights] = last_json(capsys)["nats"]
    assert len(set(losses.values())) == 4 and max(losses.values()) - min(losses.values()) < 0.05
    for device in ("cpu", "reference"):
        words = [
            "sample",
            str(trained),
            "--prompt",
            "12 squared",
            "--max_new_tokens",
            "9",
            "--weights",
            "int4",
            "--temperature",
            "0",
        ]
        assert main([*words, "--device", device, "--json", *(["--measure"] if device == "cpu" else [])]) == 0
        said = capsys.readouterr()
        losses[device] = json.loads(said.out.splitlines()[-1])["text"]
        if device == "cpu":
            pace = r"first token after [\d.]+ s \(10 tokens fed\), then [\d.]+ tokens/s: 0.0 MB of weights a token, .* % of the "
            assert re.match(pace, said.err), said.err
    assert losses["cpu"] == losses["reference"]


def test_a_preset_samples_with_random_weights_if_its_vocabulary_is_known(monkeypatch, capsys):
    small = models.preset("shakespeare-char")
    small = replace(
        small, data=replace(small.data, tokenizer="bytes"), model=replace(small.model, vocab_size=256, padded_vocab=256)
    )
    monkeypatch.setattr(models, "presets", lambda: {"small": lambda: small})
    texts = []
    for _ in range(2):
        assert main(["sample", "small", "--weights", "int4", "--max-new-tokens", "5", "--json", *REFERENCE]) == 0
        texts.append(last_json(capsys)["tokens"])
    assert texts[0] == texts[1] and len(texts[0]) == 5
    monkeypatch.setattr(models, "presets", lambda: {"chars": lambda: models.module("gpt2").shakespeare_char()})
    assert main(["sample", "chars"]) == 2
    assert "the tokenizer of chars (chars) is made from its text" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["sample", "qwen3-0.6b"]) == 2
    assert "the tokenizer of qwen3-0.6b comes with its published weights" in capsys.readouterr().err


def test_a_text_cannot_drive_the_terminal(monkeypatch):
    """Sampled from weights of a stranger's, or from any at a high temperature."""
    text = "red \x1b[31m, a bell\x07, C1 \x9b1m, a\ttab\nand \u6f22"
    assert for_terminal(text) == text  # not a terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert for_terminal(text) == "red \\x1b[31m, a bell\\x07, C1 \\x9b1m, a\ttab\nand \u6f22"


def test_inspect_counts_the_instructions_of_a_weight(capsys):
    assert main(["inspect", "quantized_matmul", "--preset", "default", "--weights", "int4", "--isa", "avx512"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "one row" in line]
    assert float(re.search(r"for 512 weights: (0\.\d+) each", line)[1]) < 0.25  # pyright: ignore
