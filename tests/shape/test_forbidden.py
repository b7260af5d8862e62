"""What the product may not contain: anything that runs code from data, and foreign imports in the kernels."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("common", "kernels", "prefill_svc", "decode_svc", "router", "bench", "cli", "client")
PRODUCT = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load"}


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def breaches(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [f"{line}: import {name}" for line, name in imported(tree) if name.split(".")[0] in MODULES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: k.value for k in node.keywords}
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(f"{node.lineno}: {node.func.id}()")
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in METHODS:
                found.append(f"{node.lineno}: .{node.func.attr}()")
            if ast.unparse(node.func) == "torch.load" and not is_true(keywords.get("weights_only")):
                found.append(f"{node.lineno}: torch.load without weights_only=True")
        if is_true(keywords.get("allow_pickle")) or is_true(keywords.get("trust_remote_code")):
            found.append(f"{node.lineno}: allow_pickle or trust_remote_code")
        if is_true(keywords.get("shell")):
            found.append(f"{node.lineno}: shell=True")
    return found


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_code_from_data(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import os, shelve as s",
        "eval(x)",
        "exec('1')",
        "socket.recv_pyobj()",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "run(x, shell=True)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert breaches(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "torch.load(f, weights_only=True)", "re.compile('a')", "'pickle'"]
)
def test_the_check_lets_pass(source: str) -> None:
    assert breaches(source) == []


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_import_only_torch_triton_and_the_standard_library(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    strangers = [
        f"{line}: {name}"
        for line, name in imported(tree)
        if name.split(".")[0] not in allowed and not name.startswith("pagerelay.kernels")
    ]
    assert strangers == []
