"""Python in documents: its blocks, and names that a block uses and does not make."""

import ast
import builtins
import re

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python_blocks(document: str) -> list[str]:
    """Return the code of each block of Python in a Markdown text."""
    return BLOCK.findall(document)


def unmade_names(code: str) -> list[str]:
    """List the names that code uses and makes nowhere; scopes are not told apart."""
    used, made = set(), {*dir(builtins), "__name__"}
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(ctx=ast.Load()):
                used.add(node.id)
            case ast.Name():
                made.add(node.id)
            case ast.alias():
                made.add((node.asname or node.name).partition(".")[0])
            case ast.FunctionDef() | ast.ClassDef() | ast.ExceptHandler():
                made.add(node.name)
            case ast.arg():
                made.add(node.arg)
    return sorted(used - made)
