"""What is published: a source archive, the wheel that is made of it, and the wheel at work where no source tree is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


def built(kind: str, source: Path, into: Path) -> Path:
    done = subprocess.run([sys.executable, "-c", BUILD, kind, str(into)], cwd=source, capture_output=True, text=True, check=True)
    return into / done.stdout.split()[-1]


@pytest.mark.extended
def test_the_wheel_of_the_source_archive_works_without_the_source_tree(tmp_path):
    archive = built("build_sdist", ROOT, tmp_path)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    wheel = built("build_wheel", source, tmp_path)
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if name.startswith("barellm/")}
        (metadata,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        about = message_from_bytes(packed.read(metadata))
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "barellm").rglob("*") if path.is_file()}
    assert names == {name for name in here if not name.endswith(".pyc")} and "barellm/py.typed" in names
    assert (about["License-Expression"], about["Description-Content-Type"]) == ("MIT", "text/markdown")

    home = tmp_path / "clean"
    venv.create(home, symlinks=True)
    # The packages that barellm needs, but no editable barellm: the .pth files of a folder that a .pth names are not read.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["BARELLM_CACHE"] = str(tmp_path / "cache")
    how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    script = "import barellm.api, barellm.cuda.gemm_config, barellm.cli.main as c; "
    script += "print(barellm.__file__); c.main(['plan', 'default'])"
    said = subprocess.run([home / "bin" / "python", "-c", script], **how).stdout
    assert Path(said.splitlines()[0]).is_relative_to(site) and "parameters" in said
