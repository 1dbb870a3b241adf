"""Which files a folder, a pattern and a name stand for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from barellm.data.files import Skipped, find_files
from barellm.data.reading import Layout
from barellm.errors import UserError


@pytest.fixture
def folder(tmp_path) -> Path:
    """Text of all kinds, and all kinds of what is none."""
    root = tmp_path / "books"
    for name, content in {
        "b.txt": b"text",
        "README.md": "é".encode() * 40_000,  # the sniffed part ends inside a character
        "deep/er/c.jsonl": b'{"text": "c"}',
        "deep/er/d.json": b'[{"text": "d"}]',
        "deep/er/e.csv": b"id,text\n1,e\n",
        "package.json": b'{"name": "a program"}',
        "comments.json": b"// settings\n{}",
        "numbers.tsv": b"a\tb\n1\t2\n",
        "deep/a": b"no suffix",
        "deep/picture.png": b"\x89PNG\r\n",
        "zeros": b"ab\0cd",
        "empty.txt": b"",
        ".hidden": b"text",
        ".git/config": b"text",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "gone").symlink_to(root / "nowhere")
    (root / "again").symlink_to(root / "deep")
    (root / "link.txt").symlink_to(root / "b.txt")
    os.mkfifo(root / "pipe")
    return root


def test_a_folder_gives_all_its_text_sorted_and_says_what_it_leaves_out(folder):
    skipped = Skipped()
    found = find_files([str(folder)], Layout(), skipped)
    names = [path.relative_to(folder).as_posix() for path in found]
    assert names == ["README.md", "b.txt", "deep/a", "deep/er/c.jsonl", "deep/er/d.json", "deep/er/e.csv", "link.txt"]
    counts = {reason: len(paths) for reason, paths in skipped.reasons.items()}
    assert counts == {
        "hidden": 2,
        "no UTF-8 text": 2,
        "without records that have a field 'text'": 3,
        "empty": 1,
        "links to nothing": 1,
        "links to folders": 1,
        "no files": 1,
    }
    line = str(skipped)
    assert line.startswith("skipped 1 empty (") and "2 no UTF-8 text (" in line and "zeros" in line and "\n" not in line
    assert str(Skipped()) == ""


def test_many_skipped_files_are_counted_and_two_named(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"has no text and no .bin shards. skipped 5 no UTF-8 text \(.*0.png, .*1.png, ...\)"):
        find_files([str(tmp_path)], Layout(), Skipped())


def test_a_file_that_several_sources_name_is_read_once_where_it_is_named_first(folder, monkeypatch):
    monkeypatch.chdir(folder)
    sources = ["deep/a", str(folder / "b.txt"), "./b.txt", "deep", "deep/a*"]
    found = find_files(sources, Layout(), Skipped())
    assert [str(path) for path in found[:2]] == sources[:2]
    assert [path.name for path in found] == ["a", "b.txt", "c.jsonl", "d.json", "e.csv"]


def test_a_pattern_gives_its_files_sorted_and_what_is_called_like_one_itself(folder):
    (folder / "b[1].txt").write_text("itself")
    found = find_files([str(folder / "**" / "[bcl]*.*t*"), str(folder / "b[1].txt")], Layout(), Skipped())
    assert [path.name for path in found] == ["b.txt", "b[1].txt", "link.txt"]
    assert [path.name for path in find_files([str(folder / "b[1].txt")], Layout(), Skipped())] == ["b[1].txt"]
    with pytest.raises(UserError, match=r"no file matches .*\*.xml"):
        find_files([str(folder / "*.xml")], Layout(), Skipped())
    with pytest.raises(UserError, match=r"empty.txt is empty, expected text"):
        find_files([str(folder / "*.txt")], Layout(), Skipped())


@pytest.mark.parametrize("at", ["deep/er", "b.txt"])
def test_what_cannot_be_read_is_an_error_and_not_left_out(at, folder, monkeypatch):
    """The tests may run as root, who can read everything: the system calls are made to refuse."""
    scan, opened = os.scandir, open

    def refusing(real):
        def call(path, *more, **named):
            if str(path).endswith(at):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *more, **named)

        return call

    monkeypatch.setattr(os, "scandir", refusing(scan))
    monkeypatch.setattr("builtins.open", refusing(opened))
    with pytest.raises(UserError, match=rf"cannot read .*{at}: Permission denied"):
        find_files([str(folder)], Layout(), Skipped())
