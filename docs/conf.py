"""The site that `make site` builds: the pages of this folder and of the root, in the order of index.md."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import barellm  # noqa: E402

project, author = "barellm", "barellm contributors"
version = release = barellm.__version__
extensions = ["myst_parser", "source_pages"]
# Sources begin at the root of the repository, so that links between README.md, docs/ and the code are those of a checkout.
include_patterns = ["*.md", "docs/*.md", "docs/book/*.md", "docs/decisions/*.md"]
exclude_patterns = [".*", "runs", "build", "dist"]
root_doc = "docs/index"
html_theme, html_title, html_show_copyright, html_copy_source = "furo", "barellm", False, False
myst_heading_anchors = 4  # a link to a heading that is not there is a warning, and `sphinx-build -W` ends with it


def keep_out_of_search(app, doctree):
    """Decisions are reached from their index: they stand in no menu. The search leaves them out, and other logs."""
    if app.env.docname in ("CHANGELOG", "docs/results"):
        app.env.metadata[app.env.docname]["nosearch"] = True
    if (docname := app.env.docname).startswith("docs/decisions/"):
        app.env.metadata[docname]["nosearch"] = True
        if not docname.endswith("/README"):
            app.env.metadata[docname]["orphan"] = True


def setup(app):
    """The site's own index.html leads to the first page."""
    app.connect("doctree-read", keep_out_of_search)
    start = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    app.connect("build-finished", lambda app, error: error or (app.outdir / "index.html").write_text(start))
