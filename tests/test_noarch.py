"""The builds without a compiled library: the same operators, the same promises, Triton where torch.compile can see it.

The rest of the suite runs against them as a whole (`make test` does, with GEGLU_VARIANT=torch-cpu). Here is what only
they have. The Triton kernels run in Triton's interpreter, in a process of their own: it is chosen at import.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import package
import pytest
import reference
import torch
from graphs import Recorder
from kernels import get_local_kernel

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="session")
def noarch() -> ModuleType:
    """The torch-cpu build, beside whichever build the other tests load."""
    directory = package.REPO / "build" / "torch-cpu"
    if not directory.is_dir():
        pytest.fail(f"{directory} is missing: run `make build`")
    return get_local_kernel(directory)


def test_both_kinds_live_in_one_process(kernel, noarch):
    assert not noarch.dispatch.NATIVE
    gate, up = torch.randn(5, 33), torch.randn(5, 33)
    for module in (kernel, noarch, kernel):
        reference.assert_accurate(module.geglu(gate, up), gate, up, "tanh")
    assert kernel is noarch or kernel._ops.ops.name != noarch._ops.ops.name


def schemas(module) -> dict[str, str]:
    prefix = f"{module._ops.ops.name}::"
    found = (schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(prefix))
    return {schema.name: str(schema).removeprefix(prefix) for schema in found}


@pytest.mark.native
def test_the_same_operators_with_the_same_schemas(kernel, noarch):
    ours, theirs = (sorted(schemas(module).values()) for module in (kernel, noarch))
    # The compiled library's "Tensor!" is printed as "Tensor($0! -> )".
    assert [text.replace("($0! -> )", "(a!)") for text in ours] == theirs


@pytest.mark.native
def test_the_same_api(kernel, noarch):
    assert kernel.__all__ == noarch.__all__
    assert [n for n in dir(kernel.layers) if n[0].isupper()] == [n for n in dir(noarch.layers) if n[0].isupper()]


def test_nothing_to_tune_and_it_says_so(noarch, tmp_path):
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    assert noarch.tune(x, weight) == ()
    assert noarch.save_tuning(tmp_path / "tuning.json") == 0
    assert noarch.load_tuning(tmp_path / "tuning.json") == (0, ())


def test_a_compiled_graph_holds_what_torch_can_fuse(noarch):
    """No operator of ours is left in the graph that Inductor gets: it sees torch's operations."""
    seen = Recorder()
    compiled = torch.compile(noarch.geglu, fullgraph=True, backend=seen.backend)
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    reference.assert_accurate(compiled(gate, up), gate, up, "tanh")
    targets = [str(target) for target in seen.targets]
    assert any("sigmoid" in target for target in targets)
    assert not any(noarch._ops.ops.name in target for target in targets)


def test_torch_runs_where_triton_cannot_compile(noarch, monkeypatch, caplog):
    """Triton builds its launchers with a C compiler, which slim container images lack: one warning, right results."""

    def warmup(*arguments, **keywords):
        raise RuntimeError("Failed to find C compiler.")

    launch = sys.modules[f"{noarch.__name__}.portable.launch"]
    monkeypatch.setattr(launch, "GPUS", ("cpu",))
    monkeypatch.setattr(launch, "kernels", SimpleNamespace(forward_flat=SimpleNamespace(warmup=warmup)))
    launch._compiles.cache_clear()
    gate, up = torch.randn(5, 33, requires_grad=True), torch.randn(5, 33, requires_grad=True)
    with caplog.at_level(logging.WARNING, "geglu"):
        for _ in range(2):
            out = noarch.geglu(gate, up)
            reference.assert_accurate(out, gate, up, "tanh")
            grads = torch.autograd.grad(out.sum(), (gate, up))
            reference.assert_accurate_grads(grads, torch.ones_like(gate), gate, up, "tanh")
    launch._compiles.cache_clear()
    messages = [record.getMessage() for record in caplog.records if record.name == "geglu"]
    assert len(messages) == 1 and "Failed to find C compiler" in messages[0]


TARGETS = (("cuda", 75, 32), ("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx1100", 32))


@has_triton
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target[1]))
def test_every_kernel_compiles(noarch, target, tmp_path, monkeypatch):
    """To machine code, for GPUs that are not here: only the interpreter runs the kernels in this suite otherwise."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = sys.modules[f"{noarch.__name__}.portable.triton_kernels"]
    pointers = {"gate", "up", "out", "grad_out", "grad_gate", "grad_up"}
    for name in ("forward_flat", "backward_flat", "forward_rows", "backward_rows"):
        kernel = getattr(kernels, name)
        for dtype, tanh in (("fp32", True), ("fp32", False), ("bf16", True), ("fp16", False)):
            sizes = {"GATED": True, "TANH": tanh, "SIZE": 1024, "ROWS": 2, "COLS": 512}
            constants = {argument: sizes[argument] for argument in kernel.arg_names if argument in sizes}
            kinds = {
                a: "constexpr" if a in sizes else f"*{dtype}" if a in pointers else "i64" for a in kernel.arg_names
            }
            compiled = compile(ASTSource(kernel, kinds, constants), target=GPUTarget(*target))
            assert compiled.asm["cubin" if target[0] == "cuda" else "hsaco"]


def interpreted(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = package.child_environment(TRITON_INTERPRET="1", GEGLU_VARIANT="torch-cpu", **environment)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


# Functions of the suite that reach every kernel, load, mask and formula, at sizes that an interpreter can do.
INTERPRETED = (
    "test_numerics.py::test_tails",
    "test_numerics.py::test_infinities_and_nan",
    "test_numerics.py::test_large_gates_do_not_overflow",
    "test_layouts.py::test_forward",
    "test_layouts.py::test_backward",
    "test_layouts.py::test_packed_widths",
    "test_linear.py::test_ranks",
)


@has_triton
def test_the_triton_kernels_in_the_interpreter():
    """float32 and float16: the interpreter cuts bfloat16 off instead of rounding it, which GPUs do not."""
    tests = [str(package.TESTS / name) for name in INTERPRETED]
    child = interpreted("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not bfloat16", *tests)
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-1000:]
    assert " passed" in child.stdout


FAULTS = {
    "gate and up swapped": ("_forward(g, u, GATED, TANH)", "_forward(u, g, GATED, TANH)"),
    "the last element skipped": ("return offset, offset < count", "return offset, offset < count - 1"),
    "rows too far apart": ("gate + row * gate_row + col", "gate + row * (gate_row + 1) + col"),
    "a term of the derivative": ("h = q - q * (1.0 - q) * slope", "h = q"),
    "the activation not rounded": ("wide * value.to(g.dtype).to(tl.float32)", "wide * value"),
}


@has_triton
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_triton_kernel_is_noticed(fault, tmp_path):
    """The run above must be able to fail: the same tests on a damaged copy of the build."""
    good, bad = FAULTS[fault]
    copy = tmp_path / "build" / "torch-cpu"
    shutil.copytree(package.REPO / "build" / "torch-cpu", copy)
    source = copy / "portable" / "triton_kernels.py"
    text = source.read_text()
    assert good in text
    source.write_text(text.replace(good, bad))
    tests = [str(package.TESTS / name) for name in ("test_layouts.py::test_forward", "test_layouts.py::test_backward")]
    child = interpreted(
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "(dense or packed_halves) and float16",
        *tests,
        GEGLU_REPO=str(tmp_path),
    )
    assert child.returncode == pytest.ExitCode.TESTS_FAILED, child.stdout[-3000:] + child.stderr[-1000:]


@has_triton
def test_a_compiled_graph_holds_the_triton_kernels():
    """Inductor sees the kernels themselves (torch.library.wrap_triton), not an operator that it cannot look into."""
    program = """
import sys

import package, torch
from graphs import Recorder

kernel = package.load()
sys.modules[f"{kernel.__name__}.portable.launch"]._INTERPRETED = True  # traced as if the CPU were a GPU
seen = Recorder()
try:
    tensors = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(kernel.geglu, fullgraph=True, backend=seen.backend)
    compiled(*tensors).sum().backward()
except Exception as error:  # a graph was made; running it needs a GPU
    print(type(error).__name__, error)
print([str(target) for target in seen.targets])
"""
    child = subprocess.run(
        [sys.executable, "-c", program],
        env=package.child_environment(GEGLU_VARIANT="torch-cpu"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "triton_kernel_wrapper_functional" in child.stdout.splitlines()[-1], child.stdout + child.stderr
