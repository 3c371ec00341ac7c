"""Settings of the site: ``sphinx-build -W -n docs build/site``. A link to a missing page or name is an error."""

import os
import sys
from functools import cache
from inspect import isfunction
from pathlib import Path
from pkgutil import walk_packages
from pydoc import locate
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

import jaxgrow

API = Path(__file__).parent / "api"


def write_api_pages():
    """Write a page for each folder of the library, with an entry for each of its public modules."""
    pages = {}
    for module in walk_packages(jaxgrow.__path__, "jaxgrow."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            folder = (
                module.name.split(".")[1]
                if module.name.count(".") > 1 or module.ispkg
                else "jaxgrow"
            )
            pages.setdefault(folder, []).append(module.name)
    for folder, modules in pages.items():
        title = "Modules outside of the folders" if folder == "jaxgrow" else f"jaxgrow.{folder}"
        entries = [
            f"## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n```\n" for name in modules
        ]
        (API / f"{folder}.md").write_text("\n".join((f"# {title}\n", *entries)))


write_api_pages()

project = "jaxgrow"
author = "the jaxgrow authors"
release = jaxgrow.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["browser.py", "conf.py", "messages.py", "pictures.py", "tables.py"]
html_theme = "furo"
html_title = f"jaxgrow {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_show_copyright = False

highlight_language = "text"
# For the notebooks, which run in other processes.
os.environ |= {"PYTHONPATH": sys.path[0], "JAX_PLATFORMS": "cpu"}
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

# The page of a module documents every name that the module defines.
autodoc_default_options = {"members": True, "ignore-module-all": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # text before a colon in "Returns" is not a type
add_module_names = False
# In docstrings, `jaxgrow.growth.maps` becomes a link, and `transformers` becomes code.
default_role = "py:obj"
nitpicky = True


@cache
def _documented(names):
    """The name under which the site has an object, by its identity."""
    return {id(found): name for name in names if (found := locate(name)) is not None}


def _elsewhere(app, env, node, contnode):
    """Link `jaxgrow.swap` to `jaxgrow.growth.maps.swap`. Names of other packages and type variables become code."""
    target, domain = node.get("reftarget", ""), env.domains["py"]
    if node.get("refdomain") != "py":
        return None
    if not target.startswith("jaxgrow") or isinstance(locate(target), TypeVar):
        return contnode
    home = _documented(tuple(domain.objects)).get(id(locate(target)))
    return home and domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", home, node, contnode
    )


def _in_attributes(app, what, name, member, skip, options):
    """Skip fields that the section "Attributes" of their class describes already.

    Python makes a member with a docstring of a field of a named tuple, and of a default value that
    is a function.
    """
    field = type(member).__name__ == "_tuplegetter"
    default = isfunction(member) and what == "class" and member.__name__ != name
    return True if field or default else None


def setup(app):
    app.connect("missing-reference", _elsewhere)
    app.connect("autodoc-skip-member", _in_attributes)
