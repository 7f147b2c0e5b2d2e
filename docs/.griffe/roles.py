"""For the reference: Sphinx's roles, which our docstrings use, as Markdown: :func:`product` becomes `product`."""

import re

import griffe


class Roles(griffe.Extension):
    """Takes the roles out of every docstring when it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r":(?:attr|class|func|meth|mod):(?=`)", "", obj.docstring.value)
