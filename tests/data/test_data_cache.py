import os
import subprocess
import sys
from pathlib import Path

import pytest

from barellm.data.cache import cache_folder, new_file, new_folder, sweep
from barellm.errors import UserError
from barellm.runtime import artefacts


def test_the_cache_is_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "mine"))
    assert cache_folder("x") == tmp_path / "mine" / "x"
    monkeypatch.delenv("BARELLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("x") == tmp_path / "xdg" / "barellm" / "x"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("x") == tmp_path / "home" / ".cache" / "barellm" / "x"


def test_a_default_cache_that_cannot_be_made_moves_to_the_temporary_place(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("BARELLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    assert cache_folder("x") == tmp_path / "temporary" / f"barellm-{os.getuid()}" / "x"


def test_a_user_without_a_home_has_caches_in_the_temporary_place(tmp_path, monkeypatch):
    """The uid of a container, say: nothing names its home, not even the system's list of users."""
    for name in ("BARELLM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = tmp_path / f"barellm-{os.getuid()}"
    assert cache_folder("x") == place / "x"
    assert artefacts.cache_folder("objects") == place / "objects"
    monkeypatch.setattr("os.getuid", lambda: 1 << 20)  # somebody else's folder
    (tmp_path / f"barellm-{1 << 20}").mkdir()
    for folder_of in (cache_folder, artefacts.cache_folder):
        with pytest.raises(UserError, match="set BARELLM_CACHE"):
            folder_of("x")


def test_a_chosen_cache_that_cannot_be_made_is_the_users_mistake(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BARELLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*file/x: Not a directory"):
        cache_folder("x")


def test_a_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), new_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with new_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_only_when_complete_and_never_over_another(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(RuntimeError), new_folder(path) as made:
        (made / "x").write_text("")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(path) as made:
        (made / "x").write_text("first")
    with pytest.raises(FileExistsError), new_folder(path) as made:
        (made / "x").write_text("second")
    assert (path / "x").read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_swept_after_a_day(tmp_path):
    script = "import os, sys; from pathlib import Path; from barellm.data.cache import new_folder, new_file\n"
    script += "with new_folder(Path(sys.argv[1]) / 'a'), new_file(Path(sys.argv[1]) / 'b'): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    left = sorted(path.name.split(".")[1] for path in tmp_path.iterdir())
    assert left == ["a", "b"] and not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["barellm.cli.prepare", "barellm.data"])
def test_the_command_line_does_not_load_numpy(module):
    code = f"import sys, {module}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_folders_of_a_cache_are_for_their_owner_alone(tmp_path, monkeypatch):
    """Others must not put data there, which would be read as this user's own, nor read what was prepared."""
    monkeypatch.delenv("BARELLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        folder = cache_folder("x")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
