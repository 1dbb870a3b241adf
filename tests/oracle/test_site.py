"""The site (docs/conf.py), built by Sphinx: every link of what it wrote leads somewhere, and what is broken ends the build."""

from __future__ import annotations

import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")
pytestmark = pytest.mark.oracle

ROOT = Path(__file__).parents[2]
SMALL = {
    "docs/index.md": "# Book\n\n```{toctree}\nfirst\n../README\n```\n",
    "docs/first.md": "# First\n\n## A part\n\n[code](../lib/a.py), [all](../lib), [data](../lib/b.json)\n",
    "README.md": "# Read\n\n[part](docs/first.md#a-part) and [code](lib/a.py) and [below](#below)\n\n## Below\n",
    "lib/a.py": "def f(x):\n    return x < 1\n",
    "lib/b.json": "[1]\n",
    "lib/inner/c.py": "y = 2\n",
}


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        self.links += [link for link in (of.get("href"), of.get("src")) if link]
        self.anchors.add(of.get("id") or "")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "sphinx", "-c", root / "docs", "-q", "-E", "-W", "--keep-going", "-d", out / "doctrees", root, out / "site"]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


def dead_links(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in page.links:
            name, _, anchor = link.partition("#")
            to = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            outside = "://" in link or link.startswith("data:")
            if not outside and not (to.exists() and (not anchor or to not in pages or unquote(anchor) in pages[to].anchors)):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


@pytest.fixture
def small(tmp_path):
    """A little project with the site's own configuration."""
    root = tmp_path / "project"
    for name, text in SMALL.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in ("conf.py", "source_pages.py"):
        shutil.copy(ROOT / "docs" / name, root / "docs")
    return root


def test_the_site_is_built_without_a_warning_and_has_no_dead_link(tmp_path):
    done = build(ROOT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert dead_links(tmp_path / "site") == []
    assert "docs/index.html" in (tmp_path / "site" / "index.html").read_text()
    assert len(list((tmp_path / "site" / "docs").glob("*.html"))) == len(list((ROOT / "docs").glob("*.md")))


def test_files_of_code_and_folders_become_pages(small, tmp_path):
    done = build(small, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    site = tmp_path / "site"
    assert dead_links(site) == []
    assert "../source/lib/a.py.html" in Page(site / "docs" / "first.html").links
    assert {"lib/a.py.html", "lib/b.json", "lib/inner.html"} <= set(Page(site / "source" / "lib.html").links)
    assert "c.py.html" in " ".join(Page(site / "source" / "lib" / "inner.html").links)
    assert "return</span>" in (site / "source" / "lib" / "a.py.html").read_text()  # with colours
    assert "x < 1" not in (site / "source" / "lib" / "a.py.html").read_text()  # escaped
    assert (site / "source" / "lib" / "b.json").read_text() == "[1]\n"


BROKEN = {
    "[gone](gone.md)": "'gone.md'",
    "[gone](../lib/gone.py)": "'../lib/gone.py'",
    "[gone](../README.md#no-part)": "'no-part'",
    "[gone](#no-heading)": "'no-heading'",
    "![gone](img/gone.svg)": "docs/img/gone.svg",
}


def test_what_is_broken_ends_the_build(small, tmp_path):
    """Each warning names the page and its line, and is an error."""
    page = small / "docs" / "first.md"
    before = page.read_text().count("\n")
    page.write_text(page.read_text() + "".join(f"\n{link}\n" for link in BROKEN))
    (small / "docs" / "alone.md").write_text("# Alone\n")
    done = build(small, tmp_path)
    warnings = done.stderr.splitlines()
    assert done.returncode != 0
    for number, said in enumerate(BROKEN.values()):
        where = f"docs/first.md:{before + 2 + 2 * number}: WARNING: "
        assert any(where in line and said in line for line in warnings), (where, said, done.stderr)
    assert any("docs/alone.md: WARNING: document isn't included in any toctree" in line for line in warnings)
