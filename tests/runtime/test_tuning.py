"""The tuning database on disk: many writers, damage, other versions."""

import json
import os
import subprocess
import sys

import pytest

from barellm.runtime.tuner.database import Database, clear

WRITER = """
import sys
from pathlib import Path
from barellm.runtime.tuner.database import Database
folder, name = Path(sys.argv[1]), sys.argv[2]
sys.stdin.readline()  # all start together
for i in range(40):
    Database(folder, "v").change({f"{name} {i}": {"n": i}})
"""


def test_what_is_written_is_read_by_the_next(tmp_path):
    Database(tmp_path, "v").change({"a": {"n": 1}, "b": {"n": 2}})
    Database(tmp_path, "v").change({"a": {"n": 3}, "b": None})
    assert Database(tmp_path, "v").entries == {"a": {"n": 3}}
    assert Database(tmp_path, "w").entries == {}, "another version of the code"
    assert clear(tmp_path) == 1 and Database(tmp_path, "v").entries == {}


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], stdin=subprocess.PIPE) for name in "ab"]
    for w in writers:
        assert w.stdin is not None
        w.stdin.write(b"go\n")
        w.stdin.flush()
    assert [w.wait(60) for w in writers] == [0, 0]
    assert Database(tmp_path, "v").entries == {f"{name} {i}": {"n": i} for name in "ab" for i in range(40)}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_reader_never_sees_half_a_file(tmp_path):
    entries = {str(i): {"n": i} for i in range(2000)}
    Database(tmp_path, "v").change(entries)
    code = "from barellm.runtime.tuner.database import Database\nfrom pathlib import Path\nimport sys\n"
    code += "for i in range(30): Database(Path(sys.argv[1]), 'v').change({'0': {'n': i}})"
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    while writer.poll() is None:
        assert len(json.loads((tmp_path / "v.json").read_text())["entries"]) == len(entries)
    assert writer.returncode == 0


@pytest.mark.parametrize("text, words", [
    ('{"version": "v", "entries": {"a": {"n"', "not JSON"),
    ("", "not JSON"),
    ("[1, 2]", "expected the entries of version v"),
    ('{"version": "other", "entries": {}}', "expected the entries of version v"),
    ('{"version": "v", "entries": 7}', "expected the entries of version v"),
    ('{"version": "v", "entries": {"a": 3}}', "expected an object, found 3"),
    ("\udcff\udcfe", "cannot be read"),
])  # fmt: skip
def test_damage_is_one_line_and_no_entries(tmp_path, capsys, text, words):
    (tmp_path / "v.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = Database(tmp_path, "v")
    assert found.entries == {} and found.entries == {}
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("barellm: warning: tuning ignored: ") and words in error
    found.change({"a": {"n": 1}})  # a damaged file is written anew
    assert Database(tmp_path, "v").entries == {"a": {"n": 1}}


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path, monkeypatch):
    Database(tmp_path, "v").change({"a": {"n": 1}})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        Database(tmp_path, "v").change({"a": {"n": 2}})
    assert Database(tmp_path, "v").entries == {"a": {"n": 1}} and not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_read_is_no_crash(tmp_path, capsys):
    (tmp_path / "v.json").mkdir()
    assert Database(tmp_path, "v").entries == {}
    assert "cannot be read" in capsys.readouterr().err
