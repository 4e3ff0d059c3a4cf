"""The text below a field in the code, which the pages of the reference show: there is no second one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping


def texts(model: type[object]) -> Mapping[str, tuple[str, str]]:
    """Field of a class -> its annotation, and the text below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    last = ""
    for member in node.body:
        if isinstance(member, ast.AnnAssign):
            last = ast.unparse(member.target)
            found[last] = (ast.unparse(member.annotation), "")
        elif isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant) and last:
            found[last] = (found[last][0], " ".join(str(member.value.value).split()).replace("|", "\\|"))
        else:
            last = ""
    return found
