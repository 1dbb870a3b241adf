from __future__ import annotations

import gzip
import subprocess

import pytest

from barellm.evaluation.text import gzip_bits_per_byte, is_python_line, python_share, repetitive


def test_gzip_is_the_command_gzip(tmp_path):
    text = "".join(f"def f{i}(x): return x + {i}\n" for i in range(500)).encode()
    packed = subprocess.run(["gzip", "-9", "-n"], input=text, capture_output=True, check=True).stdout
    assert gzip.decompress(packed) == text
    assert gzip_bits_per_byte(text) == pytest.approx(8 * len(packed) / len(text), rel=0.01)


@pytest.mark.parametrize(
    "line", ["x = 1", "    return [a for a in b]", "# anything ¤", "class A:", 's = "text"', "a b c", "f'{a!r}'", "naïve != 1"]
)
def test_lines_of_python(line):
    assert is_python_line(line)


@pytest.mark.parametrize("line", ["foo(a,", "s = 'open", '"""doc', "cost = $5", "what?", "it's", "go!", "a € b"])
def test_lines_that_are_not(line):
    assert not is_python_line(line)


def test_blank_lines_do_not_count():
    assert python_share("x = 1\n\n   \nwhat?\ny\n") == (pytest.approx(2 / 3), 3)
    assert python_share("\n") == (0.0, 0)
    assert python_share("s = 'a\x0bb\u2028c'\r\n\x0cclass A:\n") == (1.0, 2)  # only line feeds end lines of Python


@pytest.mark.parametrize(
    "text, found",
    [
        ("6" * 200, True),
        ("6, 6, 6, " * 30, True),
        ("\n" * 100, True),
        ("6666", False),
        ("def main():\n    return [name for name in names if name.startswith('_')]", False),
    ],
)
def test_a_text_that_repeats_itself_is_known(text, found):
    assert repetitive(text) is found
