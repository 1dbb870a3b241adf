"""`barellm.train`: the command's run from Python, callbacks, and models of one's own."""

from __future__ import annotations

import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import barellm
from barellm import models
from barellm.cli.main import main
from barellm.config import overrides
from barellm.errors import UserError
from barellm.training import metrics


def weights(folder) -> bytes:
    return (folder / "checkpoints" / "step-000004" / "weights.safetensors").read_bytes()


@pytest.mark.extended
def test_it_is_the_run_of_the_command_bit_by_bit(tiny, text, tmp_path, capsys):
    seen: list[barellm.Step] = []
    run = barellm.train("default", out=tmp_path / "a", callbacks=[seen.append], **tiny)
    assert capsys.readouterr().out == ""
    keys = {f"model.{key}": value for key, value in tiny["model"].items()}
    keys |= {"optim.warmup": 2, "optim.name": "adamw", "train.eval_every": 0, "train.eval_tokens": 64, "data": text}
    keys |= {"steps": 4, "batch": 2, "seq": 8, "data.tokenizer": "bytes", "device": "reference", "out": tmp_path / "b"}
    words = [str(word) for key, value in keys.items() for word in (f"--{key}", value)]
    assert main(["train", "default", *words]) == 0
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    rows = [row for row in metrics.read(tmp_path / "b" / "metrics.jsonl") if row["kind"] == "train"]
    assert [(s.step, s.loss, s.norm, s.lr) for s in seen] == [
        (row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in rows
    ]
    assert (run.folder, run.finished, run.losses) == (tmp_path / "a", True, [s.loss for s in seen])
    assert run.val_nats == run.rows[-1]["val_nats"] and run.bits_per_byte == run.rows[-1]["val_bits_per_byte"]
    assert seen[-1].tokens_per_s > 0 and seen[-1].seconds >= seen[0].seconds > 0


def test_a_run_draws_itself_and_becomes_a_table(tiny, tmp_path):
    run = barellm.train("default", out=tmp_path / "a", **tiny)
    assert repr(run) == f"<barellm.Run {tmp_path / 'a'}: 4 steps, finished, {run.val_nats:.4f} nats on validation>"
    (axes,) = run.plot("norm", log="y").axes
    assert axes.get_yscale() == "log" and run.plot()._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="has no accuracy on HellaSwag"):
        run.plot("hellaswag")
    with pytest.raises(UserError, match="y is 'los', expected 'loss', 'bits'"):
        run.plot("los")
    try:
        table = run.to_pandas()
    except UserError as error:
        assert str(error) == "to_pandas needs the package pandas: pip install pandas"
    else:
        assert table.loc[1:, "loss"].tolist() == run.losses


def test_epochs_are_passes_over_the_tokens(tiny, tmp_path):
    run = barellm.train("default", out=tmp_path / "a", epochs=0.5, **{k: v for k, v in tiny.items() if k != "steps"})
    saved = overrides.read_file(tmp_path / "a" / "config.json").keys
    train_tokens = len((tmp_path / "text.txt").read_bytes()) * 9 // 10
    assert saved["train.epochs"] == 0.5 and len(run.losses) == saved["train.steps"]
    assert saved["train.steps"] * 16 == pytest.approx(train_tokens / 2, rel=0.02)


@pytest.mark.extended
def test_a_callback_stops_it_and_it_goes_on_with_the_same_bits(tiny, tmp_path):
    barellm.train(out=tmp_path / "whole", **tiny)
    stopped = barellm.train(out=tmp_path / "cut", callbacks=[lambda s: s.stop() if s.step == 2 else None], **tiny)
    assert (stopped.finished, len(stopped.losses), stopped.val_nats) == (False, 2, None)
    went_on = barellm.train(out=tmp_path / "cut", resume=True, device="reference", quiet=True)
    assert (went_on.finished, len(went_on.losses)) == (True, 4)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_a_callback_that_fails_ends_the_run_and_frees_its_folder(tiny, tmp_path):
    with pytest.raises(ZeroDivisionError):
        barellm.train(out=tmp_path / "run", callbacks=[lambda step: 1 // 0], **tiny)
    shutil.rmtree(tmp_path / "run")
    assert barellm.train(out=tmp_path / "run", **tiny).finished


@pytest.mark.extended
def test_it_begins_with_weights_and_runs_beside_the_main_thread(tiny, tmp_path):
    first = barellm.train(out=tmp_path / "first", **tiny)
    more = {**tiny, "optim": {"name": "adamw", "lr": 0.0, "min_lr": 0.0}}
    found: list[barellm.Run] = []
    words = {"out": tmp_path / "next", "init_from": first.folder, **more}
    thread = threading.Thread(target=lambda: found.append(barellm.train("default", **words)))
    thread.start()
    thread.join()
    assert found[0].finished
    with first.load(device="reference") as a, found[0].load(device="reference") as b:
        assert (a.weight("wte") == b.weight("wte")).all()


def test_shards_bring_their_tokenizer_unless_another_was_chosen(tiny, text, tmp_path):
    """A preset does not choose one; a configuration, a key or a run that goes on does."""
    assert main(["prepare", str(text), "--tokenizer", "chars", "--out", str(tmp_path / "shards")]) == 0
    words = {**tiny, "data": tmp_path / "shards"}
    run = barellm.train("default", out=tmp_path / "run", **words)
    with run.load(device="reference") as model:
        assert model.tokenizer.name == "chars"
    chosen = models.preset("default")
    assert chosen.data.tokenizer == "bpe"
    said = "were made with tokenizer 'chars', data.tokenizer is 'bpe'"
    with pytest.raises(UserError, match=said):
        barellm.train(chosen, out=tmp_path / "other", **words)
    with pytest.raises(UserError, match=said):
        barellm.train("default", out=tmp_path / "other", **{**words, "data": {"source": str(words["data"]), "tokenizer": "bpe"}})


@pytest.mark.parametrize(
    "words, message",
    [
        ({"stepz": 3}, r"unknown argument 'stepz', did you mean 'steps'\? \(known: layers, heads, "),
        ({"optim": {"lrr": 3}}, "unknown key 'optim.lrr', did you mean 'optim.lr'"),
        ({"steps": "many"}, "train.steps is 'many', expected an integer"),
        ({"model": {"vocab_size": 99}}, "model.vocab_size is 99, the tokenizer has 256 ids"),
        ({"resume": True, "out": None}, "resume is True and out is not given"),
        ({"config": "defualt"}, "unknown preset 'defualt', did you mean 'default'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_mistakes_are_named(tiny, tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        barellm.train(**{"out": tmp_path / "run", **tiny, **words})
    assert not (tmp_path / "run").exists()


@pytest.fixture
def own(monkeypatch):
    """A module of the user's with one layer that sees the token alone: no attention, no `decode`."""
    module = ModuleType("users.bigrams")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(
        """
from dataclasses import dataclass
from barellm.config import ModelConfig
from barellm.config.fields import at_least

@dataclass(frozen=True)
class Config(ModelConfig):
    d_model: int = at_least(1, 8, "width")
    vocab_size: int = at_least(1, 256, "token ids")
    padded_vocab: int = at_least(0, 0, "stored rows")
    max_seq: int = at_least(1, 16, "positions")

def declare(p, cfg):
    sizes = {"std": 0.5, "valid_rows": cfg.vocab_size}
    return [p.parameter(name, (cfg.padded_vocab, cfg.d_model), **sizes) for name in ("in", "out")]

def forward(p, cfg, tokens, targets, *, training):
    table, head = declare(p, cfg)
    return p.classifier(p.embedding(tokens, table), head, targets, valid_vocab=cfg.vocab_size)
""",
        module.__dict__,
    )
    return module


@pytest.mark.extended
def test_a_model_of_ones_own_is_trained_saved_resumed_and_sampled(own, tiny, tmp_path, capsys):
    """On the reference backend; docs/python.md has one on the processor's."""
    base = replace(models.preset("shakespeare-char"), preset="bigrams", model=own.Config())
    words = {**tiny, "model": {"d_model": 5}, "dtype": "fp32"}
    cut = barellm.train(base, out=tmp_path / "run", callbacks=[lambda s: s.stop() if s.step == 2 else None], **words)
    whole = barellm.train(base, out=tmp_path / "whole", **words)
    run = barellm.train(out=tmp_path / "run", resume=True, device="reference", quiet=True)
    assert (cut.finished, run.finished) == (False, True)
    assert weights(tmp_path / "run") == weights(whole.folder) and run.losses == whole.losses
    with run.load(device="reference") as model:
        assert type(model.config.model) is own.Config
        table, head = model.weight("in"), model.weight("out")
        ids = np.array([[7, 200, 7]])
        assert np.abs(model.logits(ids) - (table[ids] @ head.T)[..., :256]).max() < 1e-5
        drawn = model.generate("ab", max_new_tokens=20, seed=4)
    capsys.readouterr()
    sample = ["sample", str(run.folder), "--prompt", "ab", "--max-new-tokens", "20", "--seed", "4", "--device", "reference"]
    assert main(sample) == 0
    assert capsys.readouterr().out == f"ab{drawn}\n"


def test_a_checkpoint_brings_no_module_that_was_not_imported(own, tiny, tmp_path, monkeypatch):
    base = replace(models.preset("shakespeare-char"), preset="bigrams", model=own.Config())
    run = barellm.train(base, out=tmp_path / "run", **{**tiny, "model": {}})
    monkeypatch.delitem(sys.modules, own.__name__)
    found = r"of your own is found with --model FILE.py, or once its module is imported"
    with pytest.raises(UserError, match=rf"architecture 'users.bigrams' \(.* {found}"):
        run.load(device="reference")


@pytest.mark.extended
def test_two_threads_may_train_at_once(tiny, tmp_path):
    """Each run is that of its arguments, also where both begin with the same data that nobody has read yet."""
    names = ("a", "b", "c")
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda name: barellm.train(out=tmp_path / name, seed=3 + (name == "b"), **tiny), names))
    assert all(run.finished for run in runs)
    assert weights(tmp_path / "a") == weights(tmp_path / "c") != weights(tmp_path / "b")
    barellm.train(out=tmp_path / "alone", seed=3, **tiny)
    assert weights(tmp_path / "a") == weights(tmp_path / "alone")


@pytest.mark.extended
def test_numbers_of_numpy_are_keys_of_a_run(tiny, tmp_path):
    numbers = {"steps": np.int64(4), "batch": np.uint8(2), "lr": np.float32(0.5), "quiet": np.True_}
    run = barellm.train(np.str_("default"), out=tmp_path / "a", **{**tiny, **numbers})
    barellm.train(
        models.preset("default"),
        out=str(tmp_path / "b"),
        lr=0.5,
        **{**tiny, "data": {**tiny["data"], "source": Path(tiny["data"]["source"])}},
    )
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    made = replace(models.preset("default").train, micro_batch_size=np.int32(3), signal_grace_period=np.float64(1))
    assert (type(made.micro_batch_size), type(made.signal_grace_period), made.micro_batch_size) == (int, float, 3)
    assert repr(run) == f"<barellm.Run {tmp_path / 'a'}: 4 steps, finished, {run.val_nats:.4f} nats on validation>"


@pytest.mark.parametrize(
    "words, message",
    [
        ({"config": 3}, "config is 3, expected the name of a preset or a barellm.config.Config"),
        ({"out": 3}, "out is 3, expected a path"),
        ({"resume": "no"}, "resume is 'no', expected true or false"),
        ({"quiet": 1}, "quiet is 1, expected true or false"),
        ({"callbacks": print}, "callbacks is <built-in function print>, expected a list of functions"),
        ({"callbacks": [3]}, r"callbacks is \[3\], expected a list of functions"),
        ({"device": 3}, "device is 3, expected auto, cpu, cuda, reference"),
        ({"steps": 2.5}, "train.steps is 2.5, expected an integer"),
        ({"steps": True}, "train.steps is True, expected an integer"),
        ({"lr": None}, "optim.lr is None, expected a number"),
        ({"lr": np.ones(9)}, "optim.lr is array"),
        ({"recompute": 1}, "train.recompute is 1, expected true or false"),
        ({"model": 3}, r"model is 3, expected keys and their values as in model=\{...\}"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(tmp_path, words, message):
    with pytest.raises(UserError, match=message) as raised:
        barellm.train(**{"out": tmp_path / "run", **words})
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()
