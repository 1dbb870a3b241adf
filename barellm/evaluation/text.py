"""Yardsticks for text: what gzip makes of it, and how many of its lines are Python to `tokenize`."""

from __future__ import annotations

import gzip
import io
import tokenize


def gzip_bits_per_byte(text: bytes) -> float:
    """Bits that `gzip -9` needs for a byte of the text."""
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)


def is_python_line(line: str) -> bool:
    """Whether `tokenize` accepts the line by itself, without its indentation. A bracket or a string of three quotes
    that a later line would close counts against it; so does a character that is no token."""
    tokens = tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)
    try:
        return all(token.type != tokenize.ERRORTOKEN for token in tokens)
    except (tokenize.TokenError, SyntaxError):
        return False


def python_share(text: str) -> tuple[float, int]:
    """(share of the lines that `tokenize` accepts, number of lines); blank lines are not counted."""
    lines = [line for line in text.splitlines() if line.strip()]
    return (sum(map(is_python_line, lines)) / len(lines) if lines else 0.0), len(lines)
