"""What NVIDIA publishes has every word that we use of it: functions with as many arguments and values, enumerations and their
members, structures. Uses are found in the sources; signatures are those of the installed cuda-bindings and nccl4py, which need no
GPU for that, and of the cuda.h that comes with Triton."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from cuda.bindings import driver

from barellm.cuda import nccl
from tests.simulators.mock import Gpu
from tests.simulators.mock_nccl import Nccl

ROOT = Path(__file__).parents[2]
FOLDERS = ("barellm", "anatomy", "benchmarks", "tests/simulators", "tests/cuda")
FUNCTION, TYPE, MEMBER = re.compile(r"cu[A-Z]\w+"), re.compile(r"CU[a-z]\w+"), re.compile(r"(CU|CUDA)_[A-Z]\w+")
BY_NAME = {"call": (1, None), "finalizer": (2, None), "wait": (1, 2)}  # what calls a function by its name: where its arguments are
BY_CTYPES = {"cuTensorMapEncodeTiled", "cuEventElapsedTime"}  # the library's own, which have an argument for their result
RETURNS = re.compile(r"^( *)Returns\n *-+\n(.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)

Use = tuple[str, str, int]  # where, a function's name, how many arguments it is given


@cache
def trees(*folders: str) -> dict[str, ast.Module]:
    paths = [path for folder in folders or FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths if path != Path(__file__)}


def texts(node: ast.expr, loops: dict[str, set[str]]) -> set[str]:
    """The texts that an expression may be: a literal, one of two, or the variable of a loop over literals."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.IfExp):
        return texts(node.body, loops) | texts(node.orelse, loops)
    return loops.get(node.id, set()) if isinstance(node, ast.Name) else set()


def loops_of(tree: ast.AST) -> dict[str, set[str]]:
    """The texts that variables of loops over tuples of literals have."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            for turn in node.iter.elts:
                single = isinstance(node.target, ast.Name)
                names = [node.target] if single else getattr(node.target, "elts", [])
                for name, value in zip(names, [turn] if single else getattr(turn, "elts", []), strict=False):
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, set()).update(texts(value, {}))
    return found


def uses(tree: ast.Module, where: str, wanted: Callable[[str], object], *, named: bool = False) -> Iterator[Use]:
    """Calls of the functions that are `wanted`, by name or, unless only `named`, by attribute."""
    for scope in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))]:
        loops = loops_of(scope)
        for node in ast.walk(scope):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given, names = node.args, set() if named else {name}
            if name in BY_NAME:
                start, stop = BY_NAME[name]
                names = texts(node.args[start - 1], loops) if len(node.args) >= start else set()
                given = node.args[start:stop]
            for name in filter(wanted, names):
                assert not node.keywords and not any(isinstance(a, ast.Starred) for a in given), (where, name)
                yield f"{where}:{node.lineno}", name, len(given)


def arity(function: Callable) -> int:
    parameters = inspect.signature(function).parameters.values()
    assert all(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return len(parameters)


def values(name: str) -> int:
    """How many values a function of the bindings gives beside its status, as its description says."""
    described = RETURNS.search(getattr(driver, name).__doc__)
    assert described, name
    return len(re.findall(rf"^{described[1]}\w", described[2], re.MULTILINE)) - 1


def wrong_calls(found: list[Use]) -> list[str]:
    bad = []
    for where, name, given in found:
        function = getattr(driver, name, None)
        wanted = arity(function) + (name in BY_CTYPES) if function else None
        if given != wanted:
            bad.append(f"{where}: {name} is given {given} arguments, cuda-bindings has {wanted}")
    return bad


def calls(parsed: dict[str, ast.Module]) -> list[Use]:
    return [use for where, tree in parsed.items() for use in uses(tree, where, FUNCTION.fullmatch)]


def test_every_call_of_the_driver_is_one_of_the_bindings():
    found = calls(trees())
    assert {name for _, name, _ in found} >= {"cuInit", "cuLaunchKernelEx", "cuMemFree", "cuKernelGetParamInfo", "cuEventQuery"}
    assert not wrong_calls(found)


def test_every_word_of_the_driver_is_one_of_the_bindings():
    """Also where a function is only named. None is put together from parts, which nobody would find here."""
    kinds = [kind for kind in vars(driver).values() if isinstance(kind, type) and issubclass(kind, IntEnum | int)]
    members = {name for kind in kinds for name in getattr(kind, "__members__", ())}
    found: dict[str, set[str]] = {}
    for where, tree in trees().items():
        for node in ast.walk(tree):
            word = ""
            if isinstance(node, ast.Attribute):
                word = node.attr
                owner = getattr(node.value, "attr", "")
                if TYPE.fullmatch(owner) and not word.startswith("__"):  # CUresult.CUDA_SUCCESS
                    assert hasattr(getattr(driver, owner), word), f"{where}:{node.lineno}: {owner}.{word}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                word = node.value
                joined = word.startswith(("CU_", "CUDA_ERROR")) and word.endswith("_")
                assert not joined or word == "CUDA_ERROR_", f"{where}:{node.lineno}: {word} is a part of a name"
            if word in ("CUDA_ERROR_", "cuBLASLt"):  # what error's names begin with; NVIDIA's library
                continue
            for pattern in (FUNCTION, TYPE, MEMBER):
                if pattern.fullmatch(word):
                    found.setdefault(word, set()).add(where)
    absent = {w: at for w, at in found.items() if not hasattr(driver, w) and w not in members}
    for variable in ("CUDA_LAUNCH_BLOCKING", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"):  # of the environment
        absent.pop(variable, None)
    assert not absent
    assert {"CUlaunchConfig", "CUstreamCaptureMode", "CU_EVENT_DEFAULT", "CUDA_SUCCESS"} <= set(found)


def test_the_mock_takes_and_gives_as_much_as_the_bindings():
    (tree,) = (tree for where, tree in trees().items() if where.endswith("simulators/mock.py"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and FUNCTION.fullmatch(n.name)]
    assert {f.name for f in functions} == {name for name in vars(Gpu) if FUNCTION.fullmatch(name)}
    for function in functions:
        name = function.name
        wanted = arity(getattr(driver, name)) + (name in BY_CTYPES)
        assert arity(getattr(Gpu, name)) - 1 == wanted, name
        given = [n.value.elts for n in ast.walk(function) if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple)]
        assert given or name in BY_CTYPES, name
        for elements in given:
            if not any(isinstance(one, ast.Starred) for one in elements):
                assert len(elements) - 1 == values(name), name


@pytest.mark.parametrize(
    "line, wrong",
    [
        ("call('cuDeviceGetUuid_v2', handle)", "cuDeviceGetUuid_v2 is given 1 arguments, cuda-bindings has None"),
        ("driver.call('cuMemFree', 1, 2)", "cuMemFree is given 2 arguments, cuda-bindings has 1"),
        ("cu.cuInit()", "cuInit is given 0 arguments, cuda-bindings has 1"),
        ("finalizer(self, 'cuMemGetInfo', 1)", "cuMemGetInfo is given 1 arguments, cuda-bindings has 0"),
        ("for name in ('cuInit', 'cuMemFree'):\n    call(name)", "cuMemFree is given 0 arguments"),
    ],
)
def test_a_wrong_call_is_found(line, wrong):
    assert wrong in "\n".join(wrong_calls(calls({"here.py": ast.parse(line)})))


@cache
def prototypes() -> dict[str, int]:
    """By function of cuda.h, how many parameters it has."""
    spec = find_spec("triton.backends.nvidia")
    assert spec and spec.origin
    text = (Path(spec.origin).parent / "include" / "cuda.h").read_text()
    found = re.findall(r"^CUresult CUDAAPI (cu\w+)\(([^)]*)\)", text, re.MULTILINE)  # older ones are indented
    return {name: 0 if inside.strip() in ("", "void") else inside.count(",") + 1 for name, inside in found}


def test_the_bindings_take_what_the_c_functions_take():
    """A value that a binding gives is a pointer that the C function takes; an array of options goes with its length."""
    found = prototypes()
    assert len(found) > 300 and found["cuTensorMapEncodeTiled"] == 12
    for name in {name for _, name, _ in calls(trees())} - {"cuProfilerStart", "cuProfilerStop"}:  # of cudaProfiler.h
        assert arity(getattr(driver, name)) + values(name) == found[name], name


def test_fields_of_structures_are_those_of_the_bindings():
    """A configuration of a launch takes them, and an unknown one not."""
    config = driver.CUlaunchConfig()
    (tree,) = (tree for where, tree in trees().items() if where == "barellm/cuda/launch.py")
    fields = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and "config" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))
    }
    assert {"gridDimX", "blockDimX", "sharedMemBytes", "hStream"} <= fields <= set(dir(config))
    for field in fields - {"hStream"}:
        setattr(config, field, 3)
        assert getattr(config, field) == 3
    with pytest.raises(AttributeError):
        config.gridDimW = 1
    assert len(driver.CUuuid().bytes) == 16  # all that is read of one


# --- NCCL ---


@pytest.fixture
def real_nccl() -> ModuleType:
    return pytest.importorskip("nccl.bindings.nccl")


def test_every_call_of_nccl_is_one_of_nccl4py(real_nccl):
    found = []
    for where, tree in trees("barellm/cuda", "benchmarks").items():
        found += uses(tree, where, lambda name: not name.startswith("cu"), named=True)
    wrong = [use for use in found if arity(getattr(real_nccl, use[1], lambda: None)) != use[2]]
    assert not wrong
    assert {name for _, name, _ in found} >= {"send", "recv", "comm_abort", "comm_destroy", "group_end", "get_version"}


def test_no_word_of_the_mock_is_other_than_nccl4pys(real_nccl):
    """Functions and the names of their parameters."""
    names = [name for name, f in vars(Nccl).items() if inspect.isfunction(f) and not name.startswith("_") and name != "left"]
    assert len(names) >= 10
    for name in names:
        parameters = list(inspect.signature(getattr(real_nccl, name)).parameters)
        assert parameters == list(inspect.signature(getattr(Nccl, name)).parameters)[1:], name
    assert int(real_nccl.DataType.Uint8) == nccl.BYTES
    assert (real_nccl.Result.Success, real_nccl.Result.InProgress) == nccl.OK_STATUS
    data = bytes(range(128))
    assert bytes(memoryview(real_nccl.UniqueId.from_buffer(data))) == data
    assert issubclass(real_nccl.NCCLError, Exception) and not issubclass(real_nccl.NCCLError, RuntimeError)
