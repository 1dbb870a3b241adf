"""From words on the command line to the resolved configuration."""

from __future__ import annotations

import pytest

from barellm.cli.parsing.options import Parser, add_configuration, configuration
from barellm.config import Config, overrides
from barellm.errors import UserError
from barellm.models import preset, presets


def resolved(*words: str) -> Config:
    parser = Parser(prog="barellm train")
    add_configuration(parser)
    return configuration(parser.parse(words))


def test_every_key_is_explained():
    known = overrides.every_key()
    assert set(known) == {key for name in presets() for key in overrides.known_keys(preset(name))}
    assert all(entry.help for owners in known.values() for entry in owners.values())


def test_no_words_give_the_default():
    assert resolved() == preset("default")


def test_long_and_short_forms_set_the_same_keys():
    short = resolved("shakespeare-char", "--steps", "5", "--batch", "3", "--seq", "8", "--lr", "0.5", "--seed", "2", "--data", "x")
    long = resolved(
        "shakespeare-char",
        *("--train.steps=5", "--train.micro_batch_size=3", "--train.seq=8"),
        *("--optim.lr=0.5", "--train.seed=2", "--data.source=x"),
    )
    assert short == long
    assert (short.train.steps, short.optim.lr, short.data.source) == (5, 0.5, "x")


def test_an_option_that_the_optimizer_never_reads_is_named(capsys):
    assert resolved("shakespeare-char", "--optim.momentum", "0.5", "--optim.ns_steps", "3").optim.momentum == 0.5
    assert capsys.readouterr().err == "barellm: note: with optim.name adamw there is no effect of optim.momentum, optim.ns_steps\n"
    resolved("shakespeare-char", "--optim.momentum", "0.5", "--optim.name", "muon", "--lr", "0.002")
    assert capsys.readouterr().err == ""


def test_heads_and_channels_change_together():
    assert resolved("--model.heads", "7", "--model.d_model", "70").model.head_size == 10


def test_another_vocabulary_brings_its_own_padding():
    assert resolved("--model.vocab_size", "100").model.padded_vocab == 128
    assert resolved("--model.vocab_size", "100", "--model.padded_vocab", "100").model.padded_vocab == 100
    assert resolved("shakespeare-char", "--model.vocab_size", "65").model.padded_vocab == 65


def test_who_says_when_a_run_ends_does_not_mean_the_preset_s_other_limit(tmp_path):
    def limits(*words: str) -> tuple[int, float]:
        train = resolved(*words).train
        return train.steps, train.minutes

    assert limits() == (2000, 1.75)
    assert limits("--steps", "5000") == (5000, 0)
    assert limits("--minutes", "10") == (0, 10)
    assert limits("--minutes", "0") == (2000, 0)
    assert limits("--minutes", "10", "--steps", "7") == (7, 10)
    (tmp_path / "run.toml").write_text("[train]\nsteps = 9\n")
    assert limits("--config", str(tmp_path / "run.toml")) == (9, 0)
    assert limits("--config", str(tmp_path / "run.toml"), "--minutes", "3") == (0, 3)


def test_the_configuration_of_a_run_is_that_of_another(tmp_path):
    import json

    path = tmp_path / "config.json"
    config = resolved("shakespeare-char", "--model.layers", "3", "--data", "x.txt")
    path.write_text(json.dumps(overrides.to_json(config)))
    assert resolved("--config", str(path)) == config
    assert resolved("--config", str(path), "--lr", "0.5").optim.lr == 0.5
    for text, message in (("[", "is not valid JSON"), ("[]", "holds list, expected the configuration of a run")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            resolved("--config", str(path))


@pytest.mark.parametrize("name", presets())
def test_a_saved_configuration_comes_back(name):
    import json

    config = preset(name)
    assert overrides.from_json(json.loads(json.dumps(overrides.to_json(config)))) == config


def test_a_file_is_overridden_by_the_command_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('preset = "shakespeare-char"\n[model]\nlayers = 2\nbias = true\n[optim]\nlr = 1\n')
    config = resolved("--config", str(path), "--model.layers", "3")
    assert (config.preset, config.model.layers, config.model.bias, config.optim.lr) == ("shakespeare-char", 3, True, 1.0)
    assert resolved("default", "--config", str(path)).preset == "default"


@pytest.mark.parametrize("word, value", [("true", True), ("off", False), ("1", True), ("No", False)])
def test_booleans(word, value):
    assert resolved("--train.recompute", word).train.recompute is value


def test_a_bare_boolean_is_true():
    assert resolved("default", "--train.recompute").train.recompute is True


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model.layerz", "3"], "unknown option --model.layerz, did you mean '--model.layers'?"),
        (["--model.lr", "3"], "unknown option --model.lr, did you mean '--optim.lr'?"),
        (["--optim.name", "adam"], "optim.name is 'adam', expected adamw, muon or speedrun"),
        (["--bias", "3"], "unknown option --bias, did you mean '--model.bias'?"),
        (["--steps", "1", "--epochs", "2"], "--steps and --epochs are both given, expected one of them"),
        (["--steps", "1e-4"], "train.steps is '1e-4', expected an integer"),
        (["--steps", "1e400"], "train.steps is '1e400', expected an integer"),
        (["--model.layers", "six"], "model.layers is 'six', expected an integer"),
        (["--model.layers", "1.5"], "model.layers is '1.5', expected an integer"),
        (["--lr", "nan"], "optim.lr is 'nan', expected a number"),
        (["--train.recompute", "maybe"], "train.recompute is 'maybe', expected true or false"),
        (["--steps"], "argument --train.steps/--steps: expected one argument"),
        (["gpt2-12m"], "unknown preset 'gpt2-12m', did you mean 'gpt2-124m'?"),
        (["shakespear-char"], "unknown preset 'shakespear-char', did you mean 'shakespeare-char'?"),
        (["default", "extra"], "unexpected argument 'extra'"),
        (["--model.heads", "5"], "model.heads 5 does not divide model.d_model"),
        (["--model.d_model", "0"], "model.d_model is 0, expected at least 1"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError) as error:
        resolved(*words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[model]\nlayerz = 3", "unknown key 'model.layerz', did you mean 'model.layers'?"),
        ("[modle]\nlayers = 3", "unknown key 'modle', did you mean 'model'?"),
        ("layers = 3", "unknown key 'layers', did you mean 'model.layers'?"),
        ("model = 3", "model is 3, expected a table of keys"),
        ("[model]\nlayers = 'six'", "model.layers is 'six', expected an integer"),
        ("[model]\nlayers = true", "model.layers is True, expected an integer"),
        ("[model]\nlayers = 2.0", "model.layers is 2.0, expected an integer"),
        ("[train]\nrecompute = 1", "train.recompute is 1, expected true or false"),
        ("[data]\nsource = 1", "data.source is 1, expected a text"),
        ("preset = 1", "preset is 1, expected a text"),
        ("[model\n", "is not valid TOML"),
        ("\xff", "is not valid TOML"),
        (f"a = {'[' * 100_000}", "is not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_named_with_the_file(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        resolved("--config", str(path))
    assert message in str(error.value) and "wrong.toml" in str(error.value)


@pytest.mark.parametrize("name, text", [("a.toml", "[model]\nlayers = 3"), ("a.json", '{"model": {"layers": 3}}')])
def test_a_byte_order_mark_before_a_configuration_is_no_part_of_it(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert resolved("--config", str(tmp_path / name)).model.layers == 3
