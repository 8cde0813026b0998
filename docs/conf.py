"""Sphinx's settings for `make docs`.

Why Sphinx with MyST and Furo: all three are maintained, install from PyPI and build offline, and the pages stay plain
Markdown that a code host shows as well. Material for MkDocs has announced its end, and its successor, Zensical, is not
at 1.0.
"""

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.addnodes import pending_xref

import stepscope

ROOT = Path(__file__).resolve().parent.parent

project = "stepscope"
version = release = stepscope.__version__
html_title = "stepscope"
html_theme = "furo"
html_show_sourcelink = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]

extensions = ["myst_parser"]
exclude_patterns = ["examples"]
# Link to headings with the anchors that a code host generates.
myst_heading_anchors = 4
highlight_language = "text"


def add_navigation(_app, page, source):
    """Make the lists of index.md the navigation: a heading is a caption, and every page linked below it an entry.

    Written as `toctree` directives in index.md, they would show as code on a code host.
    """
    if page != "index":
        return
    for caption, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", source[0], re.MULTILINE | re.DOTALL):
        links = re.findall(r"\[`?([^\]`]+)`?\]\(([\w-]+)\.md\)", body)
        entries = "\n".join(f"{text} <{name}>" for text, name in links)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def name_directories(app, doctree):
    """Show links to directories of the repository as text: the site has their files at most, and no listings."""
    page = Path(app.env.doc2path(app.env.docname))
    for link in list(doctree.findall(pending_xref)):
        target = (page.parent / link["reftarget"]).resolve()
        if target.is_dir() and ROOT in target.parents:
            link.replace_self(link.children)


def setup(app):
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", name_directories)
    app.add_lexer("csv", TextLexer)
