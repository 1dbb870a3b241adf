"""For the site: what pages link to outside of themselves. A file of code becomes a page of its own, a folder a page that lists its
files, and any other file is copied as it is. conf.py names this module as an extension of Sphinx."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

FOLDER = "source"  # of the site
LEXERS = {".py": "python", ".sh": "bash", ".toml": "toml"}


def linked_by_page(env: BuildEnvironment) -> dict[str, set[str]]:
    """What each page links to. Sphinx keeps it with what it knows of pages that it does not read again."""
    return env.__dict__.setdefault("source_pages", {})


def linked(app: Sphinx, doctree: nodes.document) -> None:
    """Each link of a page to a file or a folder that is no page leads to where `collect` puts it. Others are left to Sphinx, which
    warns of what is not there."""
    docname = app.env.docname
    found = linked_by_page(app.env)[docname] = set()
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        name, _ = app.env.relfn2path(node["reftarget"], docname)
        if (Path(app.srcdir) / name).exists() and app.env.path2doc(name) not in app.env.found_docs:
            found.add(name)
            link = nodes.reference("", "", *node.children[0].children, internal=True)
            link["refuri"] = os.path.relpath(address(Path(app.srcdir), name), Path(docname).parent)
            node.replace_self(link)


def address(root: Path, name: str) -> str:
    """Where in the site a file or a folder is shown."""
    shown = (root / name).is_dir() or Path(name).suffix in LEXERS
    return f"{FOLDER}/{name}" + (".html" if shown else "")


def collect(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages of all that was linked, and of the files of linked folders."""
    root, left = Path(app.srcdir), sorted(set().union(*linked_by_page(app.env).values()))
    done: set[str] = set()
    while left:
        name = left.pop()
        if name in done:
            continue
        done.add(name)
        path, out = root / name, Path(app.outdir) / address(root, name)
        if path.is_dir():
            inside = [f"{name}/{c.name}" for c in sorted(path.iterdir()) if c.name[0] != "." and c.name != "__pycache__"]
            left += inside
            links = ((os.path.relpath(address(root, i), Path(FOLDER, name).parent), i) for i in inside)
            body = "".join(f'<li><a href="{escape(to)}">{escape(Path(i).name)}</a></li>' for to, i in links)
            body = f"<ul>{body}</ul>"
        elif path.suffix in LEXERS:
            body = app.builder.highlighter.highlight_block(path.read_text(), LEXERS[path.suffix], linenos=False)
        else:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, out)
            continue
        title = escape(name)
        yield f"{FOLDER}/{name}", {"title": title, "parents": [], "body": f"<h1>{title}</h1>{body}"}, "page.html"


def forget(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    linked_by_page(env).pop(docname, None)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", linked, priority=100)  # before Sphinx collects downloads
    app.connect("env-purge-doc", forget)
    app.connect("html-collect-pages", collect)
    return {"version": "1", "parallel_read_safe": False}
