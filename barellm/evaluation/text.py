"""Yardsticks for text: what gzip makes of it, and how many of its lines are Python to `tokenize`."""

import gzip
import io
import re
import tokenize
import zlib

FORMATTED = re.compile(r"""\b(?:[ft]r?|r[ft])['"]""", re.IGNORECASE)  # within one, ! is an operator


def gzip_bits_per_byte(text: bytes) -> float:
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)


def is_python_line(line: str) -> bool:
    """Whether `tokenize` accepts the line by itself, without its indentation. A bracket or a string of three quotes
    that a later line would close counts against it; so does a character that is no token."""
    try:
        return not any(map(_no_token, tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)))
    except (tokenize.TokenError, SyntaxError):
        return False


def _no_token(t: tokenize.TokenInfo) -> bool:
    """A character that is no part of Python. From 3.12 on `tokenize` calls it an operator or a name."""
    if t.type == tokenize.OP:
        return t.exact_type == tokenize.OP or (t.string == "!" and not FORMATTED.search(t.line))
    return t.type == tokenize.ERRORTOKEN or (t.type == tokenize.NAME and not t.string.isidentifier())


def python_share(text: str) -> tuple[float, int]:
    """(share of the lines that `tokenize` accepts, number of lines); blank lines are not counted."""
    lines = [line for line in re.split(r"\r?\n", text) if line.strip()]
    return (sum(map(is_python_line, lines)) / len(lines) if lines else 0.0), len(lines)


def repetitive(text: str) -> bool:
    """Whether a text is one piece again and again, as 6666: it shrinks to an eighth, or is one word."""
    data = text.encode()
    return len(data) >= 40 and (len(zlib.compress(data, 9)) < len(data) / 8 or len(set(text.split())) <= 1)
