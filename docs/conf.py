"""Settings of the documentation: `sphinx-build -W -n docs docs/_build`, without a network.

Each build writes the reference from the public names. It fails if a public name has no docstring,
or if a page refers to a name that does not exist.
"""

import html
import inspect
import pkgutil
import re
import sys
from importlib import metadata
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[0] / "bench")]

import drawings  # noqa: E402
import gallery_pages  # noqa: E402
from public import (  # noqa: E402
    AUTHORS,
    MODULES,
    PROVISIONAL,
    USERS,
    by_kind,
    first_sentence,
    module_named,
    public_names,
    undocumented,
)

import papers  # noqa: E402
from jaxfed import Algorithm  # noqa: E402

# The reference leaves out what estimators inherit from scikit-learn.
SKLEARN = "BaseEstimator, TransformerMixin, ClassNamePrefixFeaturesOutMixin"

SHOWING = ("start", "gallery", "guides")
MOST_PAGES = 5  # listed with a public name

project = "jaxfed"
copyright = "The jaxfed authors"
release = metadata.version("jaxfed")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions.append("links")
exclude_patterns = ["_build", "guides/setup.md", "_generated/targets.md", "_generated/modules.md"]
exclude_patterns.append("_generated/gallery/cards.md")
html_theme = "furo"
html_title = "jaxfed"
html_logo = html_favicon = "_static/logo.svg"
html_theme_options = {"top_of_page_buttons": []}
html_static_path = ["_static"]
html_css_files = ["own.css"]
html_search_scorer = str(HERE / "_static" / "scorer.js")
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-none, .highlight-text) > div.highlight > pre"
pygments_dark_style = "github-dark"  # the default one underlines what is imported

# Mathematics is MathML, which browsers draw by themselves: nothing is fetched from anywhere.
extensions.append("mathml")

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3

default_role = "code"
add_module_names = False
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has them
napoleon_use_rtype = False
napoleon_custom_sections = ["Source"]
nitpicky = True


def write_reference(app) -> None:
    """Write a page for each public module, the drawings, the gallery, and the papers' targets."""
    missing = undocumented()
    if missing:
        raise ValueError(f"public names without a docstring: {', '.join(missing)}")
    source = Path(app.srcdir)
    folder = source / "_generated"
    folder.mkdir(exist_ok=True)
    for module in MODULES:
        groups = USERS if module == "jaxfed" else by_kind(module)
        _write(folder / f"{module}.md", _page(module, f"`{module}`", groups))
    _write(folder / "authors.md", _page("jaxfed", "`jaxfed`, for authors of algorithms", AUTHORS))
    written = {name for part in (USERS, AUTHORS) for names in part.values() for name in names}
    if written != set(public_names("jaxfed")):
        raise ValueError(f"public.py: wanted {sorted(public_names('jaxfed'))}, got {written}")
    _write(folder / "modules.md", _modules())
    drawings.make(folder / "drawings")
    if (source / "gallery").exists():
        gallery_pages.make(source / "gallery", folder / "gallery")
        gallery_pages.make_picture(source / "index.md", folder / "gallery", "components.png")
    rows = [f"| `{name}` | {papers.description(name)} |" for name in papers.names()]
    _write(folder / "targets.md", "\n".join(["| target | reproduces |", "| --- | --- |", *rows]))


def _page(module: str, title: str, groups: dict) -> str:
    """A page of a module: what each name is in a line, then each in full."""
    names = public_names(module)
    lines = [f"# {title}", "", first_sentence(module_named(module)), "", _status(module), ""]
    if title == f"`{module}`":  # the page to which the module's name leads
        lines += ["```{eval-rst}", f".. py:module:: {module}", "```", ""]
    lines += ["| | |", "| --- | --- |"]
    for group, members in groups.items():
        lines += [f"| **{group}** | |"]
        lines += [
            f"| {{py:obj}}`{name} <{module}.{name}>` | {_cell(names[name])} |" for name in members
        ]
    lines += [""]
    for group, members in groups.items():
        lines += [f"## {group}", "", "```{eval-rst}", f".. currentmodule:: {module}", ""]
        for name in members:
            lines += _directive(module, name, names[name])
        lines += ["```", ""]
    return "\n".join(lines)


def _directive(module: str, name: str, found) -> list[str]:
    if not inspect.isclass(found):
        return [f".. {'autofunction' if callable(found) else 'py:data'}:: {module}.{name}", ""]
    # The contract describes the methods of all algorithms, once.
    own = found is Algorithm or not issubclass(found, Algorithm)
    lines = [f".. autoclass:: {module}.{name}", *["   :members:"] * own]
    return lines + [f"   :inherited-members: {SKLEARN}"] * (module == "jaxfed.estimators") + [""]


def _cell(found) -> str:
    return first_sentence(found).replace("|", "\\|")


def _status(module: str) -> str:
    return "[Provisional]{.provisional}" if module in PROVISIONAL else "[Stable]{.stable}"


def _modules() -> str:
    """A table of the modules: what they contain, and how stable they are."""
    rows = [
        f"| [`{module.replace('jaxfed.', 'jf.')}`](../_generated/{module}.md) "
        f"| {first_sentence(module_named(module))} {_status(module)} |"
        for module in MODULES
    ]
    return "\n".join(["| module | contents |", "| --- | --- |", *rows, ""])


def _write(path: Path, text: str) -> None:
    # Sphinx reads a file again only if it has changed.
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def pages_by_name(source: Path) -> dict[str, list[str]]:
    """The guides and examples whose code or text has a public name, by the name without `jf.`."""
    found: dict[str, list[str]] = {}
    for page in sorted(path for part in SHOWING for path in (source / part).glob("*.md")):
        for name in set(re.findall(r"\bjf\.([A-Za-z_][\w.]*\w)", page.read_text())):
            found.setdefault(name, []).append(f"/{page.relative_to(source).with_suffix('')}")
    return found


def link_pages(app, what, name, object_, options, lines) -> None:
    """Add the pages that use a public name to its description."""
    # A class is described twice: by itself and by its constructor.
    pages = app.pages_by_name.pop(name.removeprefix("jaxfed."), [])
    if pages:
        lines += ["", "*See* " + ", ".join(f":doc:`{page}`" for page in pages[:MOST_PAGES]) + "."]


def as_rst(app, what, name, object_, options, lines) -> None:
    """Convert a docstring's markup to reStructuredText."""
    text = re.sub(r"^Create new instance of .*$", "", "\n".join(lines), flags=re.M)  # of tuples
    text = re.sub(r"\\\((.+?)\\\)", lambda m: f":math:`{' '.join(m[1].split())}`", text, flags=re.S)
    text = re.sub(r":(func|class|ref):(?=`)", "", text)  # of what JAX documents
    # Keep the markup of code, mathematics and emphasis; escape other special characters.
    code, emphasis = (
        r"``[^`]+``|(?::math:)?`[^`]*`|^ *\.\. math::.*$",
        r"(?<!\w)\*\w[^*\n]*\*(?!\w)",
    )
    item, argument = r"^ *\* ", r"^ *\*+\w+[:,]"
    kept = re.split(f"({code}|{emphasis}|{item}|{argument})", text, flags=re.M)
    for i in range(0, len(kept), 2):
        kept[i] = re.sub(r"[|*]", r"\\\g<0>", kept[i])
        kept[i] = re.sub(r"(?<=\w)_(?=[\s,.;:)])", r"\\_", kept[i])
    for i in range(1, len(kept), 2):
        if kept[i].startswith("`"):
            # What follows code in a word is separated by an escaped space, which is not shown.
            joined = not re.match(r"\s|$", kept[i + 1]) or (kept[i + 1] == "" and i + 2 < len(kept))
            kept[i] = f"``{' '.join(kept[i].strip('`').split())}``" + "\\ " * joined
    lines[:] = "".join(kept).split("\n")


def short(app, what, name, object_, options, signature, returned) -> tuple[str | None, str | None]:
    """Write types as the code does, without the modules that define them."""

    def shortened(text):
        text = text and re.sub(r"\b(jax\.)?(jaxlib\.)?_?jax(lib)?\.(_jax\.)?(?=Array)", "", text)
        # Sphinx shows the objects that a wrapped constructor holds, not its source code.
        text = text and re.sub(r"\(<function.*?>(, <function.*?>)*\)(?=,)", "...", text)
        text = text and re.sub(r"<function (\w+)>", r"\1", text)
        return text and re.sub(r"~(\w+\.)+", "", text)

    return shortened(signature), shortened(returned)


def skip(app, what, name, object_, skipped, options) -> bool | None:
    """Leave out scikit-learn's methods, and the fields of named tuples."""
    foreign = (getattr(object_, "__module__", None) or "").startswith("sklearn.")
    field = (getattr(object_, "__doc__", None) or "").startswith("Alias for field number")
    return True if foreign or field or re.fullmatch("set_.*_request", name) else None


def resolve(app, env, node, contnode):
    """Link public names by where they are defined; keep private ones as text; reject others."""
    if node.get("refdomain") != "py":
        return None
    target = node.get("reftarget", "")
    public = app.public.get(target)
    if public is not None and public != target:
        domain = env.get_domain("py")
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    return contnode if _exists(target, node.get("py:module")) else None


def _exists(target: str, module: str | None) -> bool:
    for name in (target, f"{module}.{target}", f"builtins.{target}"):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            continue
        return True
    # Array types, and abbreviations in annotations.
    return not target.startswith(("jaxfed", "jf."))


def describe(app, pagename, templatename, context, doctree) -> None:
    """Give search engines the first paragraph of a page."""
    if doctree is not None and (found := next(doctree.findall(nodes.paragraph), None)):
        text = html.escape(" ".join(found.astext().split())[:300])
        context["metatags"] += f'<meta name="description" content="{text}">\n'
        context["metatags"] += f'<meta property="og:description" content="{text}">\n'


def setup(app) -> None:
    """Connect the functions above."""
    app.pages_by_name = pages_by_name(Path(app.srcdir))
    app.public = {
        f"{found.__module__}.{found.__qualname__}": f"{module}.{name}"
        for module in MODULES
        for name, found in public_names(module).items()
        if hasattr(found, "__qualname__")
    }
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", as_rst, priority=1)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("autodoc-process-signature", short)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", resolve)
    app.connect("html-page-context", describe)
