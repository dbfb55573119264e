"""What only the sources can tell: no way to end the process, guarded launches, the generated namespace."""

import ast
import re
import sys

import package
import pytest

FOLDERS = ("kernel_src", "torch-ext")


def sources(*suffixes):
    root = package.REPO
    files = [p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in suffixes]
    if not files:
        pytest.skip("the sources are not here")
    return files


def code_of(path):
    """The file without comments and strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


def test_no_source_can_end_the_process():
    deadly = re.compile(r"\b(?:std::)?(?:exit|_exit|quick_exit|abort|terminate|assert)\s*\(")
    for path in sources(".h", ".cpp", ".cu", ".cuh"):
        found = [m.group() for m in deadly.finditer(code_of(path)) if "static_assert" not in m.group()]
        assert not found, f"{path}: {found}"


def test_every_launch_site_enters_a_device_guard():
    """A file that asks for the current stream first makes the tensors' device the current one."""
    stream = re.compile(r"\w*current_(?:cuda_)?stream\w*\s*\(|getCurrentCUDAStream\s*\(")
    users = [path for path in sources(".cpp", ".cu") if "cuda" in path.parts and stream.search(code_of(path))]
    assert users, "no CUDA file asks for a stream"
    for path in users:
        code = code_of(path)
        for function in re.split(r"\n}\n", code):
            for match in stream.finditer(function):
                declaration = re.match(r'\s*\w+\s*\(\s*""', function)
                if "extern" in function[: match.start()].split("\n")[-1] or declaration:
                    continue
                assert "DeviceGuard" in function[: match.start()], f"{path}: a stream without a guard before it"


def test_kernel_launches_are_only_where_the_stream_is_a_parameter():
    """`<<<...>>>` takes the stream that the caller found under its guard, never the default stream."""
    launches = re.compile(r"<<<(.*?)>>>", re.DOTALL)
    found = [(p, m.group(1)) for p in sources(".cu", ".cuh") for m in launches.finditer(code_of(p))]
    for path, arguments in found:
        depth, parts = 0, 1
        for character in arguments:
            depth += (character in "([{<") - (character in ")]}>")
            parts += character == "," and depth == 0
        assert parts == 4, f"{path}: <<<{arguments}>>> names no stream"
    if not found:
        assert any("cudaLaunchKernel" in code_of(p) for p in sources(".cu", ".cuh"))


def test_python_uses_the_generated_namespace_only():
    """Every registration goes through add_op_namespace_prefix, and all imports are relative, torch or stdlib."""
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    registers = re.compile(r"register_(fake|vmap|autograd|kernel|torch_dispatch)|custom_op|triton_op")
    for path in sources(".py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed, path
            elif isinstance(node, ast.Call) and registers.fullmatch(getattr(node.func, "attr", "")):
                assert ast.unparse(node.args[0]).startswith("add_op_namespace_prefix("), path
    assert "geglu" not in {p.stem for p in (package.REPO / "torch-ext" / "geglu").iterdir()}


# Names of torch without a promise that they stay. Each is in 2.5 already, the oldest release that the builds serve.
PRIVATE_NAMES = {
    "_C",
    "_check",
    "_current_level",
    "_functorch",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_subclasses",
    "_trace",
}


def test_no_other_private_name_of_torch_is_used():
    """One that is newer than 2.5 is an ImportError there, which no test on a later release can see."""
    used = set()
    for path in sources(".py"):
        tree = ast.parse(path.read_text())
        torch_names = {"torch"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] == "torch":
                torch_names |= {alias.asname or alias.name for alias in node.names}
                used |= {*node.module.split("."), *(alias.name for alias in node.names)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] in torch_names:
                used.add(node.attr)
    assert {name for name in used if name.startswith("_") and not name.startswith("__")} == PRIVATE_NAMES
