"""The house rules: which layer may import which, where array libraries and Flower may be used, and names.

A package imports itself and the packages before it in `LAYERS`, nothing after it; imports inside functions count, those
under `TYPE_CHECKING` do not.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedstrata"
LAYERS = (
    "base", "core", "solvers", "metrics", "prox", "data", "models", "problems", "algorithms", "report", "engine",
    "simulate", "deploy", "experiments", "cli",
)  # fmt: skip
APART = {frozenset(("simulate", "deploy"))}  # neither imports the other
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = [str(path.relative_to(SOURCE)) for path in FILES]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports at run time, by a statement or by `import_module("…")`."""
    tree = ast.parse(path.read_text())
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for branch in node.body  # not of `else`, which runs
        for inner in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif name := named(node):
            yield node.lineno, name


def named(node: ast.AST) -> str:
    """The module that a call imports by a constant name; empty for everything else."""
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    function, first = ast.unparse(node.func), node.args[0]
    by_name = function.split(".")[-1] in ("import_module", "__import__")
    return first.value if by_name and isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def layer(path: Path) -> str | None:
    """The layer of a file; the package's own files (`__init__`, `moved`, `public`) stand above all."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


def test_every_folder_is_a_layer():
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders == set(LAYERS)


def test_no_other_file_stands_above_the_layers():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "moved.py", "public.py"}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_point_to_earlier_layers(path):
    here = layer(path)
    if here is None:
        return
    wrong = []
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] != "fedstrata" or name == "fedstrata.__version__":
            continue
        there = parts[1] if len(parts) > 1 else ""  # `import fedstrata` gives access to every layer
        if here == "cli" and there in ("", "public"):  # the last layer lists all public names
            continue
        late = there not in LAYERS or LAYERS.index(there) > LAYERS.index(here)
        if late or frozenset((here, there)) in APART:
            wrong.append(f"line {line}: {name}")
    assert wrong == []


ARRAYS = ("jax", "numpy", "scipy", "torch", "jaxtyping")


@pytest.mark.parametrize("path", sorted((SOURCE / "algorithms").rglob("*.py")), ids=lambda p: p.name)
def test_algorithms_import_no_array_library(path):
    names = [name.split(".") for _, name in imported(path)]
    assert [parts for parts in names if parts[0] in ARRAYS or parts[-1] in ("jnp", "np", *ARRAYS)] == []


def test_flower_stays_in_its_room():
    users = {path.parent for path in FILES for _, name in imported(path) if name.split(".")[0] == "flwr"}
    assert users == {SOURCE / "deploy" / "flower"}


def bindings(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Target and value of every assignment; `setattr(a, "b", c)` counts as one to an attribute of a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                yield from ((each, node.value) for each in several)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            yield node.target, node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.Attribute(node.args[0], "", ast.Store()), None


def test_flower_is_patched_in_one_file():
    """Assignments to attributes of flwr's modules and classes are in patches.py alone, however the module was found."""
    patched = set()
    for path in FILES:
        tree = ast.parse(path.read_text())
        theirs = {
            alias.asname or alias.name.split(".")[0 if isinstance(node, ast.Import) else -1]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (alias.name if isinstance(node, ast.Import) else str(node.module)).split(".")[0] == "flwr"
        }
        for target, value in bindings(tree):
            found = [named(inner) for inner in ast.walk(value)] if value else []
            if isinstance(target, ast.Name) and any(name.split(".")[0] == "flwr" for name in found):
                theirs.add(target.id)
        for target, _ in bindings(tree):
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            reached = root.id in theirs if isinstance(root, ast.Name) else False
            if isinstance(target, ast.Attribute | ast.Subscript) and (reached or "'flwr" in ast.unparse(target)):
                patched.add(path.name)
    assert patched == {"patches.py"}


def test_public_classes_have_unique_names():
    found = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_folders_stay_small():
    modules = defaultdict(list)
    for path in FILES:
        if path.name != "__init__.py":
            modules[str(path.parent.relative_to(SOURCE))].append(path.name)
    assert {folder: len(names) for folder, names in modules.items() if len(names) > 21} == {}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_module_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "a module starts with a line about it"


def test_no_function_has_more_than_seven_positional_parameters():
    """Of the engine, the simulator and the deployment; keyword-only parameters do not count."""
    wrong = []
    for room in ("engine", "simulate", "deploy"):
        for path in sorted((SOURCE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    given = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
                    if len(given) > 7:
                        wrong.append(f"{path.name}: {node.name} has {len(given)}")
    assert wrong == []


def test_stubs_are_up_to_date():
    import stubs

    stale = [str(path.relative_to(SOURCE)) for path, text in stubs.stubs().items() if path.read_text() != text]
    assert stale == [], "run `make stubs`"
