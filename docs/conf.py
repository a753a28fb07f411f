"""The configuration of the site. `make docs` builds it, with warnings as errors; no page needs the network."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for generated

project = "fpipe"
author = "the fpipe developers"
release = version = importlib.metadata.version("fpipe")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "generated"]

myst_heading_anchors = 3

# Single backticks in docstrings are names where they can be, else code.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
napoleon_numpy_docstring = False

html_theme = "furo"
html_show_copyright = False
html_title = f"fpipe {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
