"""The import rule: protocols know nobody, models know nobody of ours, the gateway composes both."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocols", "models", "gateway")

# The third-party packages that each package may import. The standard library is allowed, except modules that would bring
# I/O, time or chance into a sans-IO machine.
THIRD_PARTY = {
    "protocols": {
        "h2", "hpack", "hyperframe", "httptools", "wsproto", "numpy", "ml_dtypes", "msgspec", "orjson", "simdjson",
    },
    "models": {"trio", "numpy", "ml_dtypes", "msgspec"},  # and what a backend brings in by name: models/backends
    "gateway": {
        "protocols", "models", "trio", "numpy", "ml_dtypes", "msgspec", "click", "cryptography", "pythonjsonlogger",
        "hypercorn", "h2", "hyperframe", "priority", "prometheus_client", "starlette", "trio_websocket", "outcome", "opentelemetry",
    },
}  # fmt: skip
FORBIDDEN_STDLIB = {
    "protocols": {
        "socket",
        "ssl",
        "os",
        "select",
        "selectors",
        "time",
        "random",
        "secrets",
        "threading",
        "asyncio",
        "subprocess",
    },
    "models": {"socket", "ssl", "select", "asyncio", "subprocess"},
    "gateway": {"asyncio"},
}
ASYNCIO = {
    "gateway/instances/asyncio_child.py",
    "gateway/instances/asyncio_loop.py",
    "gateway/instances/asyncio_pipe.py",
    "gateway/catalog/process_child.py",
}
"""Files for a process whose model is written for asyncio. All else of the gateway runs on Trio."""
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return frozenset(names)


def violations(package: str, names: Set[str]) -> list[str]:
    roots = {name.partition(".")[0] for name in names} - {package}
    return sorted(
        root
        for root in roots
        if (root in sys.stdlib_module_names and root in FORBIDDEN_STDLIB[package])
        or (root not in sys.stdlib_module_names and root not in THIRD_PARTY[package])
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_imports_only_what_its_package_may(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    allowed = {"pytest"} if path.name == "pytest_plugin.py" else set()
    if str(path.relative_to(ROOT)) in ASYNCIO:
        allowed.add("asyncio")
    assert violations(package, imported(path) - allowed) == []


def test_pytest_is_only_known_to_its_plugin() -> None:
    assert [str(p.relative_to(ROOT)) for p in FILES if "pytest" in imported(p)] == ["gateway/testing/pytest_plugin.py"]


def test_asyncio_is_only_known_to_the_program_of_a_process() -> None:
    """That program imports them only in a function, so that a process on Trio does not import them."""
    inside = {path.removesuffix(".py").replace("/", ".") for path in ASYNCIO} - {"gateway.catalog.process_child"}
    users = {str(p.relative_to(ROOT)) for p in FILES if imported(p) & inside}
    assert users == {"gateway/catalog/process_child.py", "gateway/instances/asyncio_child.py"}
    program = parsed(ROOT / "gateway/catalog/process_child.py")
    top = {
        getattr(node, "module", None) or node.names[0].name
        for node in program.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not top & {*inside, "asyncio"}


def test_the_rule_can_fail() -> None:
    assert violations("protocols", {"trio", "gateway.exchange", "os", "numpy"}) == ["gateway", "os", "trio"]
    assert violations("models", {"protocols.v2", "trio"}) == ["protocols"]


GROUND = {
    "errors",
    "doorbell",
    "histogram",
    "untrusted_text",
    "addresses",
    "credentials",
    "keys",
    "log_limits",
    "party",
    "version",
}
_NESTED = (["dialects", "text"], ["dialects", "v2"], ["dialects", "aws"], ["dialects", "grpc"], ["dialects", "routes"])
_WORK = {"config", "net", "codecs", "core", "workers", "catalog"}
_DIALECTS = {"dialects", "codecs", "config", "core", "workers", "catalog"}
_SERVED = {
    *_WORK,
    "client",
    "wires",
    "serving",
    "telemetry",
    "hypercorn",
    "dialects",
    "dialects.text",
    "dialects.v2",
    "dialects.aws",
    "dialects.grpc",
    "dialects.routes",
}
# The rooms of the gateway from the ground up, and what the modules of each may import beside the ground: nothing above.
ROOMS = {
    "config": set(),
    "net": {"config"},
    "codecs": set(),
    "instances": {"net", "codecs"},
    "core": {"config", "net", "codecs"},
    "client": {"net"},
    "wires": {"core", "net", "config"},
    "workers": {"config"},
    "hypercorn": {"wires"},
    "catalog": {"config", "codecs", "instances", "workers"},
    "telemetry": {"config", "net", "core", "wires", "workers"},
    "serving": {"core", "wires", "net", "config", "workers", "telemetry"},
    "dialects": _DIALECTS - {"dialects"},
    "dialects.text": _DIALECTS,
    "dialects.v2": {*_DIALECTS, "dialects.text", "telemetry"},
    "dialects.aws": {*_DIALECTS, "dialects.text", "dialects.v2"},
    "dialects.grpc": {*_DIALECTS, "dialects.text", "dialects.v2", "telemetry"},
    "dialects.routes": {*_DIALECTS, "dialects.text", "dialects.v2", "dialects.aws", "dialects.grpc"},
    "containers": {"client", "catalog", "core", "net", "telemetry", "config"},
    "operator": {"hypercorn", "wires", "telemetry", "workers", "catalog", "serving", "core", "net", "config"},
    "gateway": {*_SERVED, "containers", "operator"},
    "asgi": {"gateway", "wires"},
    "testing": {*_SERVED, "instances", "gateway"} - {"hypercorn"},
    "fronts": {*_SERVED, "gateway", "instances", "operator"},
    "cli": {*_SERVED, "gateway", "asgi", "testing", "containers", "operator", "fronts", "instances"},
    "__main__": {"cli"},
}  # fmt: skip
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}


def room_of(module: str) -> str:
    _, *parts = module.split(".")
    return ".".join(parts[: 2 if parts[:2] in _NESTED else 1])


def arrows(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in the file, also for types alone."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
    return found & MODULES.keys()


ARROWS = {module: arrows(path) - {module} for module, path in MODULES.items()}


def above(room: str, targets: set[str]) -> set[str]:
    """The targets that a module of the room may not import."""
    return targets - GROUND - {room} - ROOMS.get(room, set())


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("gateway.")])
def test_a_module_of_the_gateway_imports_only_the_rooms_below_its_own(module: str) -> None:
    targets = {room_of(target) for target in ARROWS[module] if target.startswith("gateway.")}
    assert above(room_of(module), targets) == set()


def test_the_rule_about_rooms_can_fail() -> None:
    assert above("core", {"wires", "net", "core", "errors"}) == {"wires"}
    assert above("errors", {"errors", "config"}) == {"config"}
    assert above("new", {"net"}) == {"net"}


def test_each_room_is_there_and_imports_none_above_it() -> None:
    below: set[str] = set()
    for room, may in ROOMS.items():
        assert may <= below, room
        below.add(room)
    there = {room_of(module) for module in MODULES if module.startswith("gateway.")}
    assert there == ROOMS.keys() | GROUND


def circles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that are left after all that import none of the others are taken away, again and again."""
    left = {module: set(targets) for module, targets in graph.items()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others() -> None:
    # a package that hands names on imports them when it is asked
    faces = {"gateway", "gateway.testing", "models", "protocols"}
    assert circles({module: targets - faces for module, targets in ARROWS.items() if module not in faces}) == []


def test_the_rule_about_circles_can_fail() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


# The rooms of the protocols, and which others the modules of each may import beside `json` and what stands in no room.
PROTOCOL_ROOMS: dict[str, set[str]] = {
    "json": set(),
    "aws": set(),
    "http1": set(),
    "http2": set(),
    "lmi": set(),
    "openai": {"lmi"},
    "v2": set(),
    "websocket": set(),
    "grpc": {"v2"},
}


@pytest.mark.parametrize("room", PROTOCOL_ROOMS)
def test_a_protocol_imports_only_those_that_it_is_made_of(room: str) -> None:
    targets: set[str] = set()
    for module in MODULES:
        if module.startswith(f"protocols.{room}."):
            targets |= {target.split(".")[1] for target in ARROWS[module] if target.startswith("protocols.")}
    assert targets & PROTOCOL_ROOMS.keys() <= PROTOCOL_ROOMS[room] | {room, "json"}


def test_each_protocol_has_its_room() -> None:
    assert {path.name for path in (ROOT / "protocols").iterdir() if (path / "__init__.py").exists()} == PROTOCOL_ROOMS.keys()


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_folder_has_more_than_fifteen_modules(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 15


def test_no_class_is_long() -> None:
    lines = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: n for name, n in lines.items() if n > 450} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_class_name_is_there_once_in_a_package(package: str) -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        name = str(path.relative_to(ROOT))
        if name.startswith(package):
            for node in parsed(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1 and name not in TWICE} == {}


# Users know them by these names. A module that imports two of one name renames them.
TWICE = {"Client", "Connection", "Stream"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_states_its_purpose_in_its_first_line(path: Path) -> None:
    assert path.read_text().startswith('"""')


def test_trio_websocket_is_only_ever_a_client() -> None:
    users = {p.name for p in FILES if any(n.startswith("trio_websocket") for n in imported(p))}
    assert users <= {"demo.py"}


def test_only_what_repairs_hypercorn_knows_its_http2() -> None:
    inner = ("h2", "hyperframe", "priority", "hypercorn.protocol")
    users = {str(p.relative_to(ROOT)) for p in FILES if any(n.startswith(inner) for n in imported(p))}
    assert {user for user in users if user.startswith("gateway")} == {"gateway/hypercorn.py"}


def test_opentelemetry_is_only_known_where_spans_are_made() -> None:
    """Spans need only its API; its SDK is for the standalone server. Others import nothing of it before they trace."""

    def used(path: Path, name: str) -> bool:
        for node in parsed(path).body:  # not under TYPE_CHECKING, nor in a function
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(module.startswith(name) for module in modules):
                return True
        return False

    assert [str(p.relative_to(ROOT)) for p in FILES if used(p, "opentelemetry")] == ["gateway/telemetry/spans.py"]
    assert not used(ROOT / "gateway" / "telemetry" / "spans.py", "opentelemetry.sdk")
    assert [str(p.relative_to(ROOT)) for p in FILES if used(p, "gateway.telemetry.spans")] == []


def test_threads_are_called_where_what_they_raise_is_let_go_of() -> None:
    """Elsewhere an exception would bring the thread's frames along, in a cycle that only the collector frees."""
    callers = {"run_sync": {"models/blocking.py"}, "start_thread_soon": {"models/blocking.py"}}
    for name, allowed in callers.items():
        found = set()
        for path in FILES:
            for node in ast.walk(parsed(path)):
                whose = ast.unparse(node.value).rpartition(".")[2] if isinstance(node, ast.Attribute) else ""
                if isinstance(node, ast.Attribute) and node.attr == name and whose in ("to_thread", "lowlevel"):
                    found.add(str(path.relative_to(ROOT)))
        assert found == allowed, name
    imports = [str(p.relative_to(ROOT)) for p in FILES if "trio.to_thread" in imported(p)]
    assert imports == []


def kept_and_raised(tree: ast.AST) -> list[tuple[int, str]]:
    """The places that raise an exception to which a name or an attribute still refers. The exception's traceback refers to
    the frame, and the frame to the name: this cycle keeps the frame's objects alive. The name of an `except` is deleted at
    its end, and a `finally` may delete others. `models.blocking.throw` raises an exception that has no name any more."""
    found = []

    def raised(node: ast.expr) -> list[ast.expr]:
        match node:
            case ast.BoolOp():
                return [one for value in node.values for one in raised(value)]
            case ast.IfExp():
                return raised(node.body) + raised(node.orelse)
            case ast.Call(func=ast.Attribute(attr="with_traceback", value=kept)):
                return raised(kept)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return [node]
        return []

    def forgotten(statements: list[ast.stmt]) -> set[str]:
        names = set()
        for statement in statements:
            match statement:
                case ast.Delete(targets=targets) | ast.Assign(targets=targets, value=ast.Constant(value=None)):
                    names |= {ast.unparse(target) for target in targets}
        return names

    def look(node: ast.AST, known: frozenset[str]) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                known = frozenset()
            case ast.ExceptHandler(name=str(name)):
                known |= {name}
            case ast.Try() | ast.TryStar():
                known |= forgotten(node.finalbody)
            case ast.Raise(exc=ast.expr() as what):
                for one in raised(what):
                    name = ast.unparse(one)
                    kind = name.rpartition(".")[2].lstrip("_")[:1].isupper()
                    if not kind and name not in known:
                        found.append((node.lineno, name))
        for inner in ast.iter_child_nodes(node):
            look(inner, known)

    look(tree, frozenset())
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_exception_is_raised_that_something_goes_on_to_know(path: Path) -> None:
    assert kept_and_raised(parsed(path)) == []


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        ("raise self._error", ["self._error"]),
        ("raise self._error.with_traceback(None)", ["self._error"]),
        ("raise error or ValueError()", ["error"]),
        ("try:\n    raise error\nfinally:\n    del error", []),
        ("try:\n    raise error\nfinally:\n    error = None", []),
        ("try:\n    f()\nexcept ValueError as e:\n    raise e from None", []),
        ("try:\n    f()\nexcept ValueError as e:\n    kept = e\nraise kept", ["kept"]),
        ("raise trio.EndOfChannel", []),
        ("raise _Violation", []),
        ("raise made()", []),
    ],
)
def test_the_rule_about_raising_can_fail(statements: str, found: list[str]) -> None:
    assert [name for _, name in kept_and_raised(ast.parse(statements))] == found


def missing(tree: ast.AST) -> list[str]:
    """The names that a file takes from modules of ours (`questions.infer` after `from gateway.client import questions`)
    and that are not there."""
    modules = {
        alias.asname or alias.name: module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES
        for alias in node.names
        if (module := f"{node.module}.{alias.name}") in MODULES
    }
    taken = {
        (modules[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    }
    return sorted(f"{module}.{name}" for module, name in taken if not hasattr(importlib.import_module(module), name))


USERS = sorted(p for folder in ("tests", "benchmarks", "scripts") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.sweep
@pytest.mark.parametrize("path", USERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_test_takes_from_our_modules_is_there(path: Path) -> None:
    """mypy does not read these tests, and many run only at night: this test finds a name that has moved."""
    assert missing(parsed(path)) == []


def test_the_rule_about_names_can_fail() -> None:
    asked = "from gateway.client import questions as q\nq.infer, q.grpc_stream, q.infer.anything"
    assert missing(ast.parse(asked)) == ["gateway.client.questions.grpc_stream"]


@pytest.mark.parametrize("package", ["gateway", "gateway.testing", "models", "protocols"])
def test_a_package_hands_on_what_its_modules_have(package: str) -> None:
    """Each name is the object of its home, whichever modules were imported: no module of the package has that name."""
    face = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(face.__path__)}
    assert set(face.__all__) & modules == set()
    homes = {name: module for module, names in face._HOMES.items() for name in names}
    assert sorted(homes) == sorted(face.__all__)
    for name, module in homes.items():
        assert getattr(face, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="'nothing'"):
        face.nothing  # noqa: B018


@pytest.mark.programs
@pytest.mark.parametrize("package", ["gateway", "gateway.testing", "models", "protocols"])
def test_a_package_imports_nothing_before_it_is_asked(package: str) -> None:
    """A program that loads a package as a plugin, or asks for its version, does not wait for all of its modules."""
    said = f"import sys, {package}; print([name for name in sys.modules if name.startswith('{package}.')])"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout == "[]\n"
