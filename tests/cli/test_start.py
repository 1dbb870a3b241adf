"""What must be instant and light: import and --help."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

import pytest

from barellm.checkpoint import checkpoint
from barellm.cli.checkpoints import found
from barellm.data import gpt2
from barellm.data.bpe import printable_bytes
from barellm.errors import UserError

HEAVY = {"numpy", "ml_dtypes", "llvmlite", "triton", "cuda", "torch", "argparse", "tokenizers", "tiktoken", "matplotlib",
         "safetensors", "xxhash"}  # fmt: skip


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(found.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("code", ["import barellm", "from barellm.cli.main import main; main(['--help'])"])
def test_nothing_heavy_is_imported(code):
    assert not modules_after(code) & HEAVY


@pytest.mark.parametrize("command", ["train", "sample", "plot"])
def test_help_of_a_command_imports_no_arrays_and_no_compiler(command):
    code = f"from barellm.cli.main import main\ntry: main(['{command}', '--help'])\nexcept SystemExit: pass"
    assert not modules_after(code) & {"numpy", "llvmlite", "triton", "matplotlib"}


def test_sampling_imports_nothing_of_training(trained, monkeypatch, tmp_path):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path))
    loaded = modules_after(
        f"from barellm.cli.main import main\nmain(['sample', {str(trained)!r}, '-n', '2', '--device', 'cpu'])\nprint()"
    )
    assert "barellm.generation.decode" in loaded
    assert not {name for name in loaded if name.startswith(("barellm.training", "barellm.evaluation", "barellm.interop"))}
    assert not loaded & {"matplotlib", "rich", "tokenizers", "torch", "triton", "barellm.cpu.tuner"}
    assert len([name for name in loaded if name.startswith("barellm.")]) < 280


def test_sampling_plans_and_compiles_one_program(trained):
    with found(str(trained), device="cpu").opened(positions=16) as machine:
        assert set(machine.programs) == {"decode"}
    with found(str(trained), device="cpu").opened(positions=0) as machine:
        assert set(machine.programs) == {"eval"}


def test_what_only_training_reads_is_not_summed_up_before_sampling(trained, tmp_path):
    """A byte of the optimizer's state stops a resume alone; a file that is cut off, or a byte of a weight, stops both."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for step in checkpoint.steps(run / "checkpoints")[1:]:
        shutil.rmtree(step)
    (step,) = checkpoint.steps(run / "checkpoints")
    state, weights = step / checkpoint.OPTIMIZER, step / checkpoint.WEIGHTS

    def flip(path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    flip(state)
    assert found(str(run), device="cpu").path == step
    with pytest.raises(UserError, match=r"optimizer\.safetensors"):
        checkpoint.find(run)
    flip(state)
    assert checkpoint.find(run)[0] == step
    flip(weights)
    with pytest.raises(UserError, match=r"checksum of weights\.safetensors"):
        found(str(run), device="cpu")
    flip(weights)
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"optimizer\.safetensors has"):
        found(str(run), device="cpu")


def test_merges_are_read_as_their_printable_characters_say():
    """Among them one with a line feed, a space and a byte that is no character."""
    written = {byte: character for character, byte in printable_bytes().items()}
    merges = [b"th", b"\n ", b"\xad\x00", b" t"]
    lines = ["#version: 0.2", *(f"{written[m[0]]} {''.join(written[b] for b in m[1:])}" for m in merges), ""]
    found = gpt2._from_merges("\n".join(lines).encode())
    assert found[256:-1] == merges and len(set(found[:256])) == 256
    assert gpt2._from_merges("\r\n".join(lines).encode()) == found


@pytest.mark.alone
@pytest.mark.parametrize("command", [["-c", "import barellm"], ["-m", "barellm", "--help"]])
def test_import_and_help_take_less_than_150_ms(command):
    def once() -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    assert min(once() for _ in range(5)) < 0.15


def test_every_command_of_the_table_shows_its_help(capsys):
    from barellm.cli.main import COMMANDS, main

    for name in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0
        assert f"usage: barellm {name}" in capsys.readouterr().out


def test_version(capsys):
    from barellm import __version__
    from barellm.cli.main import main

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"barellm {__version__}\n"
