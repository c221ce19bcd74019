"""The API in the site: every public name, on the list of names, and every tensor's shape."""

import ast
import re
from collections.abc import Iterator

import api
import pytest
from definitions import Definition


def test_a_public_name_comes_or_goes_knowingly():
    assert api.NAMES.read_text(encoding="utf-8") == api.names(), "run python tests/api.py"


@pytest.mark.parametrize("unit", api.documented_packages(), ids=lambda unit: unit.name)
def test_the_page_has_every_public_name(unit):
    page = re.findall(r"^::: (\S+)\n.*\n +members: (.*)$", api.page(unit), re.MULTILINE)
    shown = {(module, name) for module, names in page for name in ast.literal_eval(names)}
    modules, trees = {module for module, _ in page}, api.all_modules(unit.root)
    for module, names in api.public_modules(unit).items():
        for name in names:
            found = api.definition(name, module, trees)
            assert found and found.docstring
            assert (found.module, name) in shown or f"{module}.{name}" in modules


@pytest.mark.parametrize("unit", api.units(api.ROOT), ids=lambda unit: unit.name)
def test_docstrings_are_markdown(unit):
    rest = re.compile(r"^ *={4,}|::$|:(?:class|func|meth|mod):`|^ *\.\. \w+::", re.MULTILINE)
    found = [
        f"{path}:{node.value.lineno}: {mark[0]!r} is reStructuredText"
        for path, tree in unit.modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and (mark := rest.search(str(node.value.value)))
    ]
    assert not found


SHAPE = re.compile(
    r"\((?:[\w./*+ -]{0,14},)+[\w./*+ -]{0,14}\)"  # (T, D), (n/t, ...), (B * S, H/t + G/t), (W,)
    r"|\bscalars?\b|\bany shape|\bsame shape|\bits shape|\b(?:of|own) shape|\bshape (?:of|that)\b"
)
LETTERS = re.compile(r"_[A-Z][A-Za-z0-9]*$")


def is_overload(node: Definition) -> bool:
    """Say whether a function is one of several signatures, of which the last has the docstring."""
    return any(ast.unparse(each) == "overload" for each in node.decorator_list)


def without_shape(name: str, node: Definition, docstring: str) -> Iterator[str]:
    """Complain of a function that takes tensors and whose docstring says no shape."""
    if isinstance(node, ast.ClassDef) or is_overload(node):
        return
    every = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs]
    tensors = [
        each.arg
        for each in every
        if each is not None
        and each.annotation is not None
        and re.search(r"\bTensor\b", ast.unparse(each.annotation))
        and not LETTERS.search(each.arg)  # q_BSHK: the name says it
    ]
    if tensors and not SHAPE.search(docstring):
        yield f"{name}: the docstring says no shape of {', '.join(tensors)}"


def members_without_shape(node: ast.ClassDef) -> Iterator[str]:
    """Complain of the public methods of a class; what makes or calls it has its docstring too."""
    whole = ast.get_docstring(node) or ""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        said, called = ast.get_docstring(method) or "", method.name in ("__init__", "__call__")
        if called or not method.name.startswith("_"):
            about = said + whole if called or method.name == "forward" else said
            yield from without_shape(f"{node.name}.{method.name}", method, about)


def shapeless(unit) -> Iterator[str]:
    """Complain of all public functions and methods of a package."""
    for found in api.public_definitions(unit):
        for node in found.nodes:
            if isinstance(node, ast.ClassDef):
                yield from members_without_shape(node)
            elif isinstance(node, ast.FunctionDef):
                yield from without_shape(found.name, node, found.docstring or "")


@pytest.mark.parametrize("unit", api.documented_packages(), ids=lambda unit: unit.name)
def test_every_tensor_argument_has_a_shape(unit):
    assert sorted({*shapeless(unit)}) == []


@pytest.mark.parametrize(
    ("docstring", "complaints"),
    [
        ("(T, D) -> (T, D/t).", 0),
        ("Return what (n * R,) numbers say.", 0),
        ("Multiply by a scalar.", 0),
        ("Change ``x`` (any shape) in place.", 0),
        ("Return this rank's part (n -> n/t) of ``x``.", 1),
        ("Send ``x`` (in place, and to all the other ranks there are).", 1),
    ],
)
def test_what_a_shape_is(docstring, complaints):
    (node,) = ast.parse("def f(x: Tensor, n: int): ...").body
    assert len([*without_shape("f", node, docstring)]) == complaints
    (node,) = ast.parse("def f(x_TD: Tensor, names: list[str]): ...").body
    assert not [*without_shape("f", node, docstring)]
