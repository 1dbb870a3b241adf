"""The pages of --help: short, in 80 columns, with types and defaults; the generated page of all options is current."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from barellm import models
from barellm.cli.main import COMMANDS, help_text, main, parsed
from barellm.cli.parsing.options import configuration
from barellm.cli.presets import facts, toml
from barellm.config import overrides

DOCS = Path(__file__).parents[2] / "docs"


def shown(capsys, *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_nothing_is_wider_than_a_terminal(name, capsys):
    short, whole = shown(capsys, name, "--help"), shown(capsys, name, "--help-all")
    assert len(short) <= 45 and max(map(len, [*short, *whole])) <= 80
    assert len(help_text().splitlines()) <= 45 and max(map(len, help_text().splitlines())) <= 80


def test_common_options_have_their_type_and_the_default_of_the_preset(capsys):
    page = "\n".join(shown(capsys, "train", "--help"))
    for line in ("  --layers INT             transformer blocks (default: 4)", "(default: 0.008)", "\noptimizer:\n", "\noutput:\n"):
        assert line in page
    assert "--layers INT             transformer blocks (default: 12)" in "\n".join(shown(capsys, "train", "gpt2", "--help"))


@pytest.mark.parametrize("name, option", [("train", "--adapt STR"), ("sample", "--adapter DIR"), ("chat", "--adapter DIR")])
def test_adapters_have_a_line_where_options_are_few(name, option, capsys):
    assert sum(line.startswith(f"  {option} ") and "LoRA" in line for line in shown(capsys, name, "--help")) == 1


def test_keys_of_one_architecture_are_shown_where_its_preset_is_named(capsys):
    usual, own = (" ".join(shown(capsys, "train", *words, "--help-all")) for words in ([], ["speedrun"]))
    for key in overrides.known_keys(models.preset("speedrun")):
        assert f"--{key} " in own or f"--{key}, " in own, key
    assert "--model.paired" not in usual and "--model.rope_theta" not in usual and "--model.bias" in usual


def test_what_is_missing_is_named_behind_what_is_wrong(capsys):
    assert main(["sample", "--foo"]) == 2
    assert "unknown option --foo" in capsys.readouterr().err
    assert main(["quantize", "x", "--weights", "int8"]) == 2
    assert "--out DIR is missing: usage: barellm quantize CHECKPOINT --weights FORMAT --out DIR" in capsys.readouterr().err


@pytest.mark.parametrize("name", models.presets())
def test_the_values_of_a_preset_are_a_file_of_it(name, tmp_path):
    path = tmp_path / "preset.toml"
    path.write_text(toml(models.preset(name)))
    assert tomllib.loads(path.read_text())["preset"] == name
    assert configuration(parsed(["plan", "--config", str(path)])) == models.preset(name)


def test_presets_are_listed_with_their_sizes(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and {line.split()[0] for line in lines[1:-2]} == set(models.presets())
    assert facts(models.preset("gpt2-124m"))["parameters"] == 124_439_808


def test_a_shell_completes_commands_options_and_presets(capsys):
    pytest.importorskip("shtab")
    assert main(["--completion", "bash"]) == 0
    script = capsys.readouterr().out
    for word in ("quantize", "--max-new-tokens", "--optim.lr", "llama3-8b"):
        assert word in script


def test_the_page_of_all_options_is_current(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    page = import_module("options_page")
    assert page.FILE.read_text() == page.page(), "run: python docs/options_page.py"
    assert page.STUB_FILE.read_text() == page.stub(), "run: python docs/options_page.py"
    assert sys.modules.pop("options_page")
