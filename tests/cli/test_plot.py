"""`barellm plot` on runs as they are found: finished, killed in the middle of a line, not begun, not runs at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from barellm.checkpoint.folder import RunFolder
from barellm.cli.main import main
from barellm.training import curve, metrics


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A run that was killed: no picture, no checkpoint."""
    path = tmp_path / "some" / "run"
    path.mkdir(parents=True)
    for name in ("metrics.jsonl", "config.json"):
        shutil.copy(trained / name, path / name)
    return path


@pytest.fixture
def drawn(monkeypatch) -> list:
    """(path, curves, title, axis) of each picture that is made."""
    found = []
    real = curve.image

    def image(path, curves, *, title, axis, log):
        found.append((path, curves, title, axis))
        real(path, curves, title=title, axis=axis, log=log)

    monkeypatch.setattr(curve, "image", image)
    return found


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "train"]


def test_without_a_file_it_is_a_chart_in_the_terminal(run, capsys):
    # Its validation text is too short for a rate of gzip.
    rows = [row | ({"gzip_bits_per_byte": 2.5} if row["kind"] == "result" else {}) for row in metrics.read(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["plot", str(run)]) == 0
    said, *chart = capsys.readouterr().out.splitlines()
    (val,) = [row["val_nats"] for row in rows if row["kind"] == "eval" and row["step"] == 4]
    (result,) = [row for row in rows if row["kind"] == "result"]
    gzip = result["gzip_bits_per_byte"] * result["val_nats"] / result["val_bits_per_byte"]
    training, validation = f"training loss {losses(run)[-1][1]:.4f}", f"validation loss {val:.4f} at step 4"
    assert said == f"{run}: step 4, {training}, {validation}, gzip -9 {gzip:.4f}"
    assert "step 4" in chart[-2] and "o: validation" in chart[-1]
    assert sorted(path.name for path in run.iterdir()) == ["config.json", "metrics.jsonl"]


def test_killed_in_the_middle_of_a_line_a_run_is_drawn_to_its_last_whole_one(run, capsys):
    """Cut after every byte of the last step's row."""
    data = (run / "metrics.jsonl").read_bytes()
    lines = data.splitlines(keepends=True)
    at = max(i for i, line in enumerate(lines) if b'"kind": "train"' in line)
    before = sum(map(len, lines[:at]))
    for end in range(before, before + len(lines[at]) + 1):
        (run / "metrics.jsonl").write_bytes(data[:end])
        assert main(["plot", str(run)]) == 0
        step = 4 if end == before + len(lines[at]) else 3
        assert capsys.readouterr().out.startswith(f"{run}: step {step}, training loss "), end


def test_a_run_that_still_trains_is_read(run, capsys):
    with RunFolder(run, resume=True):
        assert main(["plot", str(run)]) == 0
    assert "step 4" in capsys.readouterr().out


def test_several_runs_are_in_one_picture(run, trained, tmp_path, drawn, capsys):
    out = tmp_path / "both.svg"
    assert main(["plot", str(run), f"{trained}/", "--out", str(out)]) == 0
    ((path, curves, title, axis),) = drawn
    assert (path, axis) == (out, "steps") and "validation (dots)" in title
    assert [found.name for found in curves] == [str(run), str(trained)]
    assert curves[0].train == curves[1].train == losses(run)
    assert out.read_bytes().startswith(b"<?xml")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and said[-1] == f"curve {out}"


@pytest.mark.parametrize("axis, unit", [("tokens", 16), ("seconds", None)])
def test_over_tokens_or_seconds(run, tmp_path, drawn, axis, unit):
    assert main(["plot", str(run), "--x", axis, "--out", str(tmp_path / "loss.png")]) == 0
    ((_, (found,), title, axis_drawn),) = drawn
    assert (title, axis_drawn) == (str(run), axis)
    seconds = [row["seconds"] for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "train"]
    assert [place for place, _ in found.train] == (seconds if unit is None else [unit * i for i in (1, 2, 3, 4)])


@pytest.mark.parametrize("y, words", [("lr", "learning rate"), ("bits", "validation bits per byte"), ("speed", "tokens per")])
def test_other_numbers_and_logarithmic_axes(run, tmp_path, y, words, capsys):
    assert main(["plot", str(run), "--y", y, "--log", "xy"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert words in said[0] and len(said) > 10
    assert main(["plot", str(run), "--y", y, "--log", "y", "--out", str(tmp_path / "picture.svg")]) == 0


def test_a_run_without_evaluations_has_no_bits(run, refused):
    rows = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "train"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert refused("plot", run, "--y", "bits") == f"{run / 'metrics.jsonl'} holds no bits per byte"
    assert "argument --log: invalid choice: 'z'" in refused("plot", run, "--log", "z")


def without_tokens(file: Path) -> None:
    """As an older version wrote its rows."""
    rows = [{key: value for key, value in row.items() if key != "tokens"} for row in metrics.read(file)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_tokens_of_an_older_run_are_those_of_its_steps(run, drawn, tmp_path):
    """The batch grows; the first rows are of a version that did not write tokens, the last one is of this version."""
    config = json.loads((run / "config.json").read_text())
    config["train"] |= {"gradient_accumulation_steps": 3, "batch_rampup_from": 1, "batch_rampup_tokens": 32}
    (run / "config.json").write_text(json.dumps(config))
    rows = metrics.read(run / "metrics.jsonl")
    without_tokens(run / "metrics.jsonl")
    text = (run / "metrics.jsonl").read_text()
    (last,) = [row for row in rows if row["kind"] == "train" and row["step"] == 4]
    older = json.dumps({key: value for key, value in last.items() if key != "tokens"})
    (run / "metrics.jsonl").write_text(text.replace(older, json.dumps(last | {"tokens": 112})))
    assert main(["plot", str(run), "--x", "tokens", "--out", str(tmp_path / "loss.svg")]) == 0
    assert [place for place, _ in drawn[0][1][0].train] == [16, 48, 96, 112]


def test_options_of_curves_do_not_go_with_ranges(run, refused):
    for option, value in (("--x", "steps"), ("--y", "loss"), ("--log", "x")):
        assert f"{option} is for curves, and --exponent-stats draws none" in refused("plot", run, "--exponent-stats", option, value)


def test_metrics_alone_are_enough_but_for_tokens(run, refused, tmp_path, capsys):
    """As copied from another machine."""
    alone = tmp_path / "alone.jsonl"
    shutil.copy(run / "metrics.jsonl", alone)
    assert main(["plot", str(alone), "--x", "seconds"]) == 0
    assert " seconds, training loss " in capsys.readouterr().out
    assert main(["plot", str(alone), "--x", "tokens"]) == 0
    assert " tokens, training loss " in capsys.readouterr().out
    without_tokens(alone)
    assert f"{tmp_path / 'config.json'}: No such file or directory" in refused("plot", alone, "--x", "tokens")


def test_a_terminal_without_the_characters_gets_others(run, monkeypatch, capsys):
    monkeypatch.setattr("barellm.training.console.Console.can_show", lambda console, text: False)
    assert main(["plot", str(run)]) == 0
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "metrics.jsonl holds no step yet"),
        ('{"kind": "train", "st', "metrics.jsonl holds no step yet"),
        ("\xff\xfe\n", "metrics.jsonl holds no step yet"),
        ('{"kind": "train"}\n', "metrics.jsonl, line 1 has no kind and step: no run wrote it"),
        ('{"kind": "train", "step": [1], "loss": 1}\n', "no run wrote it"),
        ('{"kind": "eval", "step": 1, "val_nats": "low"}\n', "no run wrote it"),
        ('{"step": 1}\n', "no run wrote it"),
    ],
)
def test_metrics_that_hold_no_curve(run, refused, text, message):
    (run / "metrics.jsonl").write_bytes(text.encode("latin-1"))
    assert message in refused("plot", run)


def test_mistakes_are_one_line(run, refused, tmp_path):
    assert "RUN [RUN ...] is missing: usage: barellm plot" in refused("plot")
    assert "nowhere does not exist, expected a run folder" in refused("plot", run, tmp_path / "nowhere")
    shutil.copytree(run, tmp_path / "default-20260101-120000")
    assert f"did you mean {tmp_path / 'default-20260101-120000'}?" in refused("plot", tmp_path / "default")
    assert "some has no metrics.jsonl, expected the folder of a run" in refused("plot", run.parent)
    assert "argument --x: invalid choice: 'step'" in refused("plot", run, "--x", "step")
    assert "loss.doc ends in '.doc', expected one of " in refused("plot", run, "--out", tmp_path / "loss.doc")
    assert "no/loss.png: No such file or directory" in refused("plot", run, "--out", tmp_path / "no/loss.png")
    without_tokens(run / "metrics.jsonl")
    (run / "config.json").write_text(json.dumps({"preset": "default", "model": 3}))
    assert "model is 3, expected a table of keys" in refused("plot", run, "--x", "tokens")


# --- exponents ---


@pytest.fixture
def watched(tiny, tmp_path) -> Path:
    """A run that looked at its exponents in steps 1, 3."""
    assert main(tiny("--train.exponent_stats", "3", "--model.bias", "true")) == 0
    return tmp_path / "run"


def test_ranges_are_a_table_numbers_or_a_picture(watched, tmp_path, capsys, refused):
    capsys.readouterr()
    assert main(["plot", str(watched), "--exponent-stats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["activation,", "step", "3", "rms", "max", "zeros", "e4m3", "e5m2", "2^-48", "2^20"]
    (ln,) = [line.split() for line in lines if line.startswith("h.0.ln_1")][:1]
    assert 0.9 < float(ln[1]) < 1.1 and not any("bias" in line for line in lines)
    assert main(["plot", str(watched), "--exponent-stats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in found["steps"]] == [1, 3]
    (t,) = [t for t in found["steps"][0]["tensors"] if (t["name"], t["what"]) == ("wpe", "weight")]
    # Normals of deviation 0.02 beside the least number of e4m3, of which half becomes zero.
    assert t["flushed"]["e4m3"] == pytest.approx(0.039, abs=0.03) and t["saturated"]["e5m2"] == 0.0
    out = tmp_path / "ranges.svg"
    assert main(["plot", str(watched), "--exponent-stats", "--out", str(out)]) == 0
    text = out.read_text()
    assert text.count("<image") == 8 and "weight gradient, step 3" in text and "h.0.attn.c_attn" in text
    assert "--exponent-stats shows one run, found 2" in refused("plot", watched, watched, "--exponent-stats")
    assert refused("plot", watched, "--json").startswith("--json is for --exponent-stats")
    assert ".nope" in refused("plot", watched, "--exponent-stats", "--out", tmp_path / "a.nope")
    (watched / "exponent_stats.jsonl").write_bytes(b"")
    assert refused("plot", watched, "--exponent-stats") == f"{watched / 'exponent_stats.jsonl'} holds no step yet"


def test_a_run_without_ranges_says_how_to_get_them(run, refused):
    assert (
        refused("plot", run, "--exponent-stats")
        == f"{run} has no exponent_stats.jsonl, expected a run with --train.exponent_stats N"
    )
