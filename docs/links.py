"""Public names that a text mentions lead to the reference, and a name that is not there is told."""

import pkgutil
import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

_NAME = re.compile(r"^(?:(?:jf|jaxfed)\.(?P<dotted>\w+(?:\.\w+)*)|(?P<bare>[A-Z]\w+))(?=\(|$)")
_PAST = {"changes"}  # speaks of names that are gone


class Names(SphinxPostTransform):
    """Make `jf.pca.PerPCA(10, 2)`, and `PerPCA` where only one is meant, links."""

    default_priority = 5

    def run(self, **kwargs) -> None:
        """Look at each piece of code in the text."""
        objects = self.env.get_domain("py").objects
        # Where a name is defined is known too, and is the same place.
        bare: dict[str, dict[str, str]] = {}
        for name, entry in objects.items():
            bare.setdefault(name.rpartition(".")[2], {})[entry.node_id] = name
        for literal in list(self.document.findall(nodes.literal)):
            found = _NAME.match(literal.astext())
            inside = isinstance(literal.parent, nodes.reference | nodes.title)
            if not found or self.env.docname in _PAST:
                continue
            dotted = found["dotted"] and f"jaxfed.{found['dotted']}"
            if dotted and not _exists(dotted):
                logging.getLogger(__name__).warning(
                    "no such name: %s", literal.astext(), location=literal
                )
            names = [dotted] if dotted else list(bare.get(found["bare"], {}).values())
            if len(names) != 1 or names[0] not in objects or inside:
                continue
            target = objects[names[0]]
            link = make_refnode(
                self.app.builder, self.env.docname, target.docname, target.node_id, literal.copy()
            )
            link[0].extend(child.copy() for child in literal.children)
            link["classes"].append("name")
            literal.parent.replace(literal, link)


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def setup(app) -> dict[str, bool]:
    """Add the transform."""
    app.add_post_transform(Names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
