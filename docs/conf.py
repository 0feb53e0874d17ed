"""Sphinx's settings. `make docs` builds the pages into out/docs, with warnings as errors."""

import dmuon

project = "dmuon"
release = version = dmuon.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # the docstrings' Args, Returns and Raises
]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints = "none"  # the docstrings say shapes and dtypes; signatures stay readable
maximum_signature_line_length = 90
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "dmuon"
html_static_path = []
html_copy_source = False
