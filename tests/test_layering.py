"""Keeps the rules of the source itself: who imports whom, what the cores must not know, sizes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("transport", "pipeline", "coord")
FOLDERS = (*LAYERS, "tools", "tests", "bench")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70

CORE = (
    "transport/frame.py",
    "transport/bounds.py",
    "transport/codec.py",
    "transport/chain.py",
    "transport/framelog.py",
    "transport/machine.py",
    "transport/numbering.py",
    "transport/peers.py",
    "transport/pieces.py",
    "transport/quick.py",
    "pipeline/slots.py",
    "pipeline/stage.py",
    "pipeline/model.py",
    "pipeline/rule.py",
    "coord/actions.py",
    "coord/draft.py",
    "coord/draft_model.py",
    "coord/inflight.py",
    "coord/ledger.py",
    "coord/placing.py",
    "coord/ring.py",
    "coord/admission.py",
    "coord/batch.py",
    "coord/counters.py",
    "coord/rollcall.py",
    "coord/scheduler.py",
    "coord/turn.py",
)
# Frozen dataclasses that a core is built with; reading the file is the shells' work.
VALUES_FOR_CORES = {"transport.config.Limits", "transport.config.Ring"}
# A core gets time and randomness as arguments and does no I/O: else a replay would differ.
BANNED_IN_CORE = {
    "asyncio",
    "datetime",
    "logging",
    "os",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
}
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
WALKERS = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter"}
# Handlers of every exception. main() may have one that re-raises; the others say why here.
BROAD_EXCEPT = {
    "coord/tokenizer.py:load_tokenizer": "its library raises Exception itself for a damaged file",
    "coord/http/errors.py:__call__": "the edge: logs the traceback and answers with a 500",
    "pipeline/daemon.py:body": "carries what ended the compute thread to the loop, which raises it",
    "pipeline/daemon.py:run_stage": "says why in a last heartbeat, and re-raises",
    "transport/link.py:_guard": "out of a callback it would stop the reader; wait() raises it",
    "bench/fuzz/campaign.py:life": "whatever escapes is the finding; it is raised with its seed",
    "tools/pull.py:_pull_hub": "the hub's client raises its HTTP library's own classes",
}


@cache
def sources(*folders: str) -> dict[str, ast.Module]:
    """Path below the root -> syntax tree, for every Python file of the folders."""
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module a file imports, as dotted names; `from a import b` is both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(tops: set[str], *folders: str) -> set[str]:
    """Files that import one of the top-level packages."""
    return {
        path
        for path, tree in sources(*folders).items()
        if any(name.split(".")[0] in tops for name in imports(tree))
    }


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", CORE)
def test_a_core_imports_the_standard_library_msgpack_and_cores(path: str) -> None:
    if path not in sources(*LAYERS):
        pytest.skip("not written yet")
    modules = {core.removesuffix(".py").replace("/", ".") for core in CORE}
    for name in imports(sources(*LAYERS)[path]):
        top = name.split(".")[0]
        if top in LAYERS:
            module = ".".join(name.split(".")[:2])
            values = [value for value in VALUES_FOR_CORES if value.startswith(f"{name}.")]
            known = module in modules or name in LAYERS or name in VALUES_FOR_CORES
            assert known or values, f"{name} is no core"
        else:
            assert top in sys.stdlib_module_names | {"msgpack"}, name
            assert top not in BANNED_IN_CORE, name


@pytest.mark.parametrize("path", CORE)
def test_a_core_never_iterates_a_set(path: str) -> None:
    """Best effort: set displays, set() and names bound or annotated as sets. Their order is not
    reproducible; a dict is the ordered set."""
    if path not in sources(*LAYERS):
        pytest.skip("not written yet")
    tree = sources(*LAYERS)[path]
    names = set(_set_names(tree))
    for node in ast.walk(tree):
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            iterated = [node.iter]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in WALKERS:
            iterated = node.args
        for expression in iterated:
            assert not _is_set(expression, names), f"line {expression.lineno}"


def _set_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_set(node.value, set()):
            yield from (ast.unparse(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.arg) and _is_set_type(node.annotation):
            yield node.arg


def _is_set_type(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    return ast.unparse(annotation).split("[")[0] in {"set", "frozenset"}


def _is_set(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in {"set", "frozenset"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub):
        return _is_set(node.left, names) or _is_set(node.right, names)
    return ast.unparse(node) in names


LINK = {"transport/link.py", "transport/sockets.py", "transport/door.py"}
YARDSTICKS = {"bench/toy_ring.py", "bench/ring_latency.py"}  # they measure raw pyzmq beside us
STRANGERS = {"tests/strangers.py"}  # peers that are not kvring


def test_only_the_link_knows_zmq() -> None:
    assert importers({"zmq"}, *FOLDERS) <= {*LINK, *YARDSTICKS, *STRANGERS}
    assert importers({"aiozmq"}, *FOLDERS) <= {"transport/link.py"}
    inside = ("transport.sockets", "transport.door")
    for path, tree in sources(*FOLDERS).items():
        assert path in LINK or not set(inside) & set(imports(tree)), path


def test_layers_share_frames_not_code() -> None:
    assert importers({"coord"}, "pipeline", "transport") == set()
    assert importers({"pipeline"}, "coord", "transport") == set()
    assert importers({"tools", "tests", "bench"}, *LAYERS) == set()
    assert importers({"tests"}, "tools", "bench") == set()


def test_the_proof_of_residency_is_independent() -> None:
    """It shares frames with the cores: no slot table, no ledger, not even the chain's hash."""
    proof = {
        path: tree
        for path, tree in sources("tools").items()
        if path == "tools/framelogs/residency.py" or path.startswith("tools/framelogs/proof/")
    }
    assert len(proof) > 4
    for path, tree in proof.items():
        for name in imports(tree):
            top = name.split(".")[0]
            allowed = name.startswith(("transport.frame", "tools.framelogs.proof"))
            assert allowed or top in sys.stdlib_module_names or name == "transport", (path, name)


def test_no_file_can_unpickle() -> None:
    assert importers(UNSAFE, *FOLDERS) == set()
    for path, tree in sources(*FOLDERS).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.load", f"{path}:{node.lineno}"


def test_the_environment_is_no_configuration() -> None:
    for path, tree in sources(*LAYERS).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                assert name not in {"os.environ", "os.getenv"}, f"{path}:{node.lineno}"
        assert not {"os.environ", "os.getenv"} & set(imports(tree)), path


def test_every_exception_is_caught_only_where_a_reason_is_given() -> None:
    found = {}
    for path, tree in sources(*LAYERS, "tools", "bench").items():
        for function in functions(tree):
            for node in _own(function):
                if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                    raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                    if function.name != "main" or not raises:
                        found[f"{path}:{function.name}"] = node.lineno
    assert set(found) <= set(BROAD_EXCEPT), found


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a function except what is in functions inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child
            yield from _own(child)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def test_files_and_functions_stay_small() -> None:
    for path, tree in sources(*FOLDERS).items():
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert lines <= MAX_FILE_LINES, f"{path}: {lines} lines"
        for function in functions(tree):
            length = (function.end_lineno or 0) - function.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{function.lineno} {function.name}"


def test_every_module_says_what_it_owns() -> None:
    for path, tree in sources(*LAYERS, "tools", "bench").items():
        assert ast.get_docstring(tree), path
