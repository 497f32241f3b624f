"""The names that each Python module offers to the others, and agreement of the native module with its stub."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "accl", reason="about this package only")

SOURCES = Path(__file__).parent.parent / "python"
# Paths of the modules by module name. A module that is only run (`__main__`) offers no names.
FILES = {
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("torch_accl", "torch_accl_cli", "torch_accl_launch")
    for path in (SOURCES / folder).rglob("*.py")
    if path.name != "__main__.py"
}


def offered(module: str) -> list[str] | None:
    """Returns the `__all__` of a module, or `None` if it has none."""
    for node in ast.parse(FILES[module].read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")], value=value) | ast.AnnAssign(
                ast.Name("__all__"), value=value
            ):
                return ast.literal_eval(value)
    return None


def imports(module: str) -> Iterator[tuple[str, str]]:
    """Yields each import of a module from another module of this project: that module, and the name."""
    path = FILES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            of = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((of, alias.name) for alias in node.names if of in FILES)


@pytest.mark.parametrize("module", sorted(FILES))
def test_every_module_says_what_it_offers(module):
    assert offered(module) is not None, f"{module} has no __all__"


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_module_imports_of_another_what_that_one_offers(module):
    # Submodules are not part of their package's `__all__`. Private names are for modules that know them.
    names = [(of, name) for of, name in imports(module) if f"{of}.{name}" not in FILES and not name.startswith("_")]
    assert [f"{name} of {of}" for of, name in names if name not in (offered(of) or ())] == []


def test_imports_between_modules_are_seen():
    assert ("torch_accl._gate", "load_native") in imports("torch_accl")
    assert ("torch_accl.compression.extension", "exact") in imports("torch_accl.compat._cgx_agreement")
    assert ("torch_accl.compression._scope", "encoded") in imports("torch_accl_cli.bench.measure")


STUB = ast.parse((SOURCES / "torch_accl/_native.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
# These classes name the keys of a row. The native module does not contain them.
ROWS = {
    name: {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)}
    for name, node in CLASSES.items()
    if [ast.unparse(base) for base in node.bases] == ["TypedDict"]
}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}


def native() -> ModuleType:
    import torch_accl

    return torch_accl._native


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def members(cls: ast.ClassDef) -> dict[str, ast.FunctionDef | None]:
    """Returns the members that the stub gives a class: methods with their node, other attributes with `None`."""
    found: dict[str, ast.FunctionDef | None] = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign):
            found[node.target.id] = None
        elif isinstance(node, ast.FunctionDef):
            is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
            found[node.name] = None if is_property else node
    return found


def arguments(node: ast.FunctionDef) -> list[tuple[str | None, bool]]:
    """Returns the stub's arguments except `self`: the name, or `None` if there is none, and whether the argument is
    optional.
    """
    given = node.args
    assert not given.kwonlyargs and given.vararg is None and given.kwarg is None
    names = [*(None for _ in given.posonlyargs), *(argument.arg for argument in given.args)]
    optional = [place >= len(names) - len(given.defaults) for place in range(len(names))]
    pairs = list(zip(names, optional))
    is_method = [argument.arg for argument in [*given.posonlyargs, *given.args]][:1] == ["self"]
    return pairs[1:] if is_method else pairs


def native_arguments(thing: object) -> list[tuple[str | None, bool]]:
    """Returns the same for a function of the native module. For C++ functions, it reads the first line of the
    docstring.
    """
    try:
        parameters = [each for each in inspect.signature(thing).parameters.values() if each.name != "self"]
        return [(each.name, each.default is not each.empty) for each in parameters]
    except ValueError:
        line = (thing.__doc__ or "").strip().partition("\n")[0]
        said = re.findall(r"[(,] ?(\w+): [^,()=]*(=)?", line)
        assert said and said[0][0] == "self", line
        return [(None if re.fullmatch(r"arg\d+", name) else name, bool(default)) for name, default in said[1:]]


def test_the_stub_has_the_names_of_the_native_module():
    # Special names such as `__all__` come from Python itself.
    assert {*CLASSES, *FUNCTIONS} - {*ROWS} == {name for name in dir(native()) if not is_special(name)}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_the_stub_has_the_arguments_of_a_native_function(name):
    assert arguments(FUNCTIONS[name]) == native_arguments(getattr(native(), name))


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - ROWS.keys()))
def test_the_stub_has_the_members_of_a_native_class(name):
    cls = getattr(native(), name)
    found, said = vars(cls), members(CLASSES[name])
    # pybind11 adds `_pybind11_conduit_v1_`, by which its versions recognize one another.
    assert {member for member in said if not is_special(member)} == {
        member for member in found if not is_special(member) and member != "_pybind11_conduit_v1_"
    }
    for member, node in said.items():
        if member == "__init__":
            # Classes written in Rust are constructed by `__new__`. The class object shows its arguments.
            made = found.get("__init__", cls)
            assert arguments(node) == native_arguments(made)
        elif node is None:
            assert not callable(found[member]), f"{name}.{member} is a method"
        else:
            assert arguments(node) == native_arguments(getattr(cls, member)), f"{name}.{member}"


def test_rows_have_the_keys_that_the_stub_names():
    seen = set()
    for name, node in FUNCTIONS.items():
        match node.returns:
            case ast.Name(row) | ast.Subscript(slice=ast.Name(row)) if row in ROWS:
                found = getattr(native(), name)(*(["maxmin:4"] if node.args.args else []))
                for one in found if isinstance(found, list) else [found]:
                    assert set(one) == ROWS[row], name
                seen.add(row)
    assert seen == set(ROWS)
