"""`python -m docs.techniques`: write docs/techniques.md, or run its commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs.techniques import PAGE, Bad, page
from docs.techniques.check import check, chosen, furnish


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.techniques", description=__doc__)
    parser.add_argument("name", nargs="*", help="with --check: rows by name (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/techniques.md")
    parser.add_argument("--check", action="store_true", help="run the commands; status 1 where one fails")
    parser.add_argument("--part", default="", metavar="K/N", help="with --check: the K-th of N parts, by a checksum of the names")
    parser.add_argument("--verbose", action="store_true", help="with --check: show what every command prints")
    parser.add_argument("--folder", type=Path, help="make a folder with the files that the commands find")
    given = parser.parse_args(words)
    try:
        if given.folder:
            furnish(given.folder)
        if given.write:
            PAGE.write_text(page())
        if given.check:
            return check(chosen(given.name, given.part), given.verbose)
        if not (given.folder or given.write):
            parser.error("expected --write, --check or --folder")
    except Bad as error:
        print(f"docs.techniques: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
