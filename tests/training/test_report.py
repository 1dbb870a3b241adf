"""What a run says before its first step and after its last, and what it warns of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from barellm.cli.main import main
from barellm.config.overrides import changed
from barellm.models import preset
from barellm.runtime.rates import Rate
from barellm.training import loop, output, report
from barellm.training.batch_rampup import BatchRampup
from barellm.training.console import Console, in_words


def config(**keys):
    return changed(preset("shakespeare-char"), {key.replace("__", "."): value for key, value in keys.items()})


EPOCH = 1_000_000  # tokens


def said(chosen, *, done=0, total=2000, bound_s=0.0):
    batch_rampup = BatchRampup(chosen.train)
    return report.intentions(chosen, EPOCH, batch_rampup=batch_rampup, done=done, total=total, bound_s=bound_s)


def test_tokens_epochs_and_the_bound_of_what_is_left():
    assert said(config()) == ["budget   2,000 steps, 1.54M tokens, 1.54 epochs"]
    assert said(config(train__accumulate=2), bound_s=0.1) == [
        "budget   2,000 steps, 3.07M tokens, 3.07 epochs; 3 minutes at the roofline"
    ]
    assert said(config(), done=1500, bound_s=0.1) == ["budget   500 steps, 384k tokens, 0.384 epochs; 50 seconds at the roofline"]
    assert said(config(), total=3, bound_s=0.1)[0] == "budget   3 steps, 2.3k tokens, 0.0023 epochs"


def test_a_run_on_the_same_batches_again_and_again_has_no_epochs():
    lines = said(config(train__overfit=1), total=1)
    assert lines[:2] == ["overfit  the first micro-batch again and again: the loss should go to 0", "budget   1 step, 768 tokens"]
    assert said(config(train__overfit=3))[0].startswith("overfit  the first 3 micro-batches ")
    there = 1303  # micro-batches of 768 tokens in a million
    assert not said(config(train__overfit=there))[1].startswith("warning")
    assert said(config(train__overfit=there + 1))[1] == (
        "warning: train.overfit is 1304, and the text has 1,303 micro-batches: this is all of them"
    )


def test_a_limit_of_time_is_said_as_one():
    limited = config(train__minutes=2.5)
    assert limited.train.steps == 0
    assert said(limited, total=None) == ["budget   as many steps as fit into 2.5 min: other machines do more or fewer"]
    both = replace(limited, train=replace(limited.train, steps=3000))
    assert said(both, total=None) == ["budget   as many steps as fit into 2.5 min, at most 3,000: other machines do more or fewer"]


@pytest.mark.parametrize("total, warned", [(99, True), (100, True), (101, False)])
def test_a_warmup_that_never_ends_is_warned_of(total, warned):
    lines = said(config(), total=total)
    assert (len(lines) == 2) == warned
    if warned:
        assert lines[1].startswith(f"warning: the warmup of 100 steps is not over after {total}: the learning rate never")
        assert "--optim.warmup 5 would" in lines[1]


@pytest.mark.parametrize("days, warned", [(29, False), (31, True)])
def test_a_run_of_months_is_warned_of(days, warned):
    lines = said(config(), bound_s=days * 86400 / 2000)
    assert (len(lines) == 2) == warned
    assert not warned or lines[1].startswith("warning: even at this machine's measured peak this run takes 31 days: ")


def test_few_windows_are_warned_of():
    assert report.few_windows(8, 64, "k") == ""
    assert "only 7 windows of 64 tokens" in report.few_windows(7, 64, "k") and "a larger k" in report.few_windows(7, 64, "k")
    assert "a single window of 64" in report.few_windows(1, 64, "k")


@pytest.mark.parametrize(
    "more, key", [((), None), (("--train.eval_tokens", "24"), "--train.eval_tokens"), (("--seq", "200"), "--data.val_fraction")]
)
def test_a_run_says_which_key_gives_more_windows(fake, command, capsys, more, key):
    assert main(command("run", "--model.max_seq", "256", *more)) == 0
    out = capsys.readouterr().out
    assert ("warning: validation has" in out) == (key is not None)
    assert key is None or f"or a larger {key}\n" in out


def test_the_header_is_a_few_short_lines_and_every_setting_is_in_the_folder(fake, command, tmp_path, capsys):
    assert main(command("run")) == 0
    lines = capsys.readouterr().out.splitlines()
    head = lines[: lines.index("")]
    assert len(head) <= 11 and all(len(line) < 132 for line in head if str(tmp_path) not in line)
    assert not any("beta" in line for line in head) and (tmp_path / "run" / "config.json").is_file()
    assert any("where config.json has every setting" in line for line in head)
    assert head[-1].startswith("budget   12 steps, 384 tokens, ")


@pytest.mark.parametrize("months", [False, True])
def test_the_speed_is_said_once_it_is_known(fake, command, capsys, monkeypatch, months):
    monkeypatch.setattr(loop, "ESTIMATE_S", 0.0)
    monkeypatch.setattr(report, "LONG_S", 0.0 if months else 1e9)
    assert main(command("run")) == 0
    out = capsys.readouterr().out
    assert out.count("ms a step: 0 seconds left") == 1
    assert ("warning: at " in out) == months
    before, _, after = out.partition("speed    ")
    assert "step     3  validation" not in before and "step     3  validation" in after


def test_short_runs_say_no_speed(fake, command, capsys):
    assert main(command("run")) == 0
    assert "speed    " not in capsys.readouterr().out


def test_minutes_that_end_within_the_warmup_are_warned_of(fake, command, capsys, monkeypatch):
    monkeypatch.setattr(loop, "CALIBRATION_S", 0.0)
    assert main(command("run", "--train.minutes", "1", "--steps", "12", "--optim.warmup", "40")) == 0
    out = capsys.readouterr().out
    assert "a step: 12 steps fit into 1 min" in out and "the warmup of 40 steps is not over after 12" in out


class Watched(Console):
    """Due at any time."""

    LIVE_S = PLAIN_S = INSIDE_S = 0.0


def test_micro_batches_are_counted_within_a_step(fake, command, capsys, monkeypatch):
    monkeypatch.setattr("barellm.cli.train.Console", Watched)
    assert main(command("run", "--train.gradient_accumulation_steps", "3", "--steps", "4")) == 0
    out = capsys.readouterr().out
    assert [out.count(f"step     2/4  micro-batch {i} of 3\n") for i in (1, 2, 3)] == [1, 1, 0]


def test_a_log_hears_of_micro_batches_once_a_minute(monkeypatch):
    import io

    from barellm.training import console

    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    c = Console(stream=io.StringIO())
    c.progress("a step")
    now[0] += 5.0
    assert c.due() and not c.due(inside=True)
    now[0] += 55.0
    assert c.due(inside=True)


def test_a_long_sample_is_shown_in_part(fake, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("barellm.training.output.Output.samples", lambda self, *a, **k: ["\n".join(map(str, range(40)))])
    assert main(command("run")) == 0
    out = capsys.readouterr().out
    assert "  | 15\n  | ...\n" in out and "  | 16\n" not in out


@pytest.mark.parametrize(
    "seconds, words",
    [
        (40, "40 seconds"),
        (89, "89 seconds"),
        (720, "12 minutes"),
        (5.2 * 3600, "5.2 hours"),
        (9 * 86400, "9 days"),
        (213 * 86400, "7 months"),
        (30400 * 86400, "1,000 months"),
    ],
)
def test_times_in_words(seconds, words):
    assert in_words(seconds) == words


def test_the_limits_between_units_of_time():
    assert (in_words(89.9), in_words(90)) == ("90 seconds", "2 minutes")
    assert (in_words(90 * 60 - 1), in_words(90 * 60)) == ("90 minutes", "1.5 hours")
    assert (in_words(48 * 3600 - 1), in_words(48 * 3600)) == ("48.0 hours", "2 days")
    assert (in_words(60 * 86400 - 1), in_words(60 * 86400)) == ("60 days", "2 months")


RESULT = {
    "steps": 12,
    "seconds": 65.2,
    "seconds_all_sessions": 65.2,
    "tokens_per_s": 1234.5,
    "val_nats": 2.0,
    "val_bits_per_byte": 1.5,
    "val_bytes": 4096,
    "gzip_bits_per_byte": 2.25,
    "checkpoint": "my runs/a/checkpoints/step-000012",
}


def ending(source="text.txt", **more):
    return report.closing(RESULT | more, Path("my runs/a"), config(data__source=source))


def test_the_end_of_a_run():
    found = ending()
    assert found[:5] == [
        "",
        "done     12 steps in 1:05, 1,234 tokens/s",
        "loss     2.0000 nats per token (perplexity 7.389), 1.500 bits per byte",
        "         on 4,096 bytes of validation text; gzip -9: 2.250 bits per byte",
        "saved    my runs/a/checkpoints/step-000012",
    ]
    assert found[6:] == [
        "next     barellm sample 'my runs/a' --prompt \"...\"",
        "         barellm eval 'my runs/a' --data FILE --split all",
        "         barellm train --out 'my runs/a' --resume --steps 24",
    ]


def test_the_end_of_a_run_on_examples_asks_as_they_do():
    def next_of(prompt_text):
        return report.closing(RESULT, Path("a"), config(data__source="a.jsonl"), prompt_text=prompt_text)[6:8]

    assert next_of("it's\n1 km:\\ \x1b") == [
        r"""next     barellm sample a --prompt 'it'"'"'s\n1 km:\\ \x1b' --temperature 0""", "         barellm eval a",
    ]  # fmt: skip
    assert f"--prompt {'x' * report.LONGEST_PROMPT}... --temperature 0" in next_of("x" * 99)[0]
    assert next_of("") == ["next     barellm chat a", "         barellm eval a"]


def test_gzip_is_left_out_where_its_header_is_much_of_the_text():
    """The row of such a run has no rate of gzip, so no picture has its line either."""
    assert ending(val_bytes=999, gzip_bits_per_byte=None)[3] == "         on 999 bytes of validation text"
    for size, has in (output.LEAST_ZIPPED - 1, False), (output.LEAST_ZIPPED, True):
        run = SimpleNamespace(final_evaluator=SimpleNamespace(text=lambda tokenizer, size=size: b"a" * size))
        compiled = SimpleNamespace(parameters=1, meta=dict)
        written = SimpleNamespace(
            run=run, config=config(data__source="text.txt"), compiled=compiled, data=SimpleNamespace(tokenizer=None)
        )
        loop_ = SimpleNamespace(
            progress=SimpleNamespace(step=1, seconds=1.0), metrics=SimpleNamespace(rows=[{"kind": "train", "tokens_per_s": 1}]),
            spikes=SimpleNamespace(active=False), saving=SimpleNamespace(saved="", folder=Path("a/b")),
        )  # fmt: skip
        result = SimpleNamespace(nats=1.0, bits_per_byte=1.0, bytes=size)
        assert ("gzip_bits_per_byte" in output.Output._result(written, loop_, result, [], seconds=1.0)) == has


def test_the_end_of_a_run_without_a_vocabulary_on_python_and_in_sessions():
    assert ending(val_bits_per_byte=None)[2] == "loss     2.0000 nats per token (perplexity 7.389) on validation tokens"
    python = {"tokenize_share": 0.5, "tokenize_lines": 8, "tokenize_share_of_validation": 0.75}
    lines = ending("stdlib", **python)
    words = "50% of 8 sampled lines parse, 75% of the library's own"
    assert lines[4] == f"python   {words}" and lines[7].endswith('--prompt "def main("')
    assert ending(seconds_all_sessions=66.2)[1].endswith("tokens/s")
    assert ending(seconds_all_sessions=130.0)[1].endswith("tokens/s; 2:10 with the sessions before")


def test_the_header_says_the_memory_in_mib_and_the_bound_of_a_step():
    found = {"device": "cpu", "isa": "avx2", "dtype": "fp32", "threads": 3}
    machine = SimpleNamespace(
        config=config(), meta=lambda: found, parameters=804_096, plan=SimpleNamespace(arena_bytes=3 << 19),
        flops_per_step=4_000_000_000, peak=lambda: Rate(2e11, 0.01),
    )  # fmt: skip
    data = SimpleNamespace(
        name="a text",
        train=range(9000),
        val=range(1000),
        tokenizer=SimpleNamespace(name="chars"),
        byte_lengths=None,
        no_text="GPT-2's vocabulary is not on this machine",
    )
    lines = report.header(machine, data, Path("runs/a"))
    assert "machine  cpu, avx2, fp32, 3 threads; 1.5 MiB of memory" in lines
    assert "batch    batch size 12 x gradient accumulation 1 x 64 = 768 tokens a step" in lines
    assert "roofline 20.0 ms a step (estimate): 4.00 GFLOP at 200 GFLOP/s (measured)" in lines
    assert max(map(len, lines)) <= 80
    assert "GPT-2's vocabulary is not on this machine" in lines[-1]
    machine.peak = lambda: Rate(2e11, 0.4)
    noisy = "         rough, and MFU too: measurements differ by 40% (doctor --measure)"
    assert noisy in report.header(machine, data, Path("runs/a")) and noisy not in lines
    machine.peak = lambda: Rate(0.0, 0.0)
    assert "         4.00 GFLOP a step" in report.header(machine, data, Path("runs/a"))
