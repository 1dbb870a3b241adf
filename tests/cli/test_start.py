"""What must be instant and light: import and --help."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

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
