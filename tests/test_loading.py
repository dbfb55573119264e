"""Loading: which variant is picked, two builds in one process, no network, no wait, no way to end the process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import package
import project
import pytest
from kernels import Metadata

# From an imported torch to the first result; and what any later call may cost, whatever its shape.
FIRST_CALL_SECONDS = 1.0
NEW_SHAPE_SECONDS = 1e-3

BLOCK_SOCKETS = """
    import socket

    def refuse(*arguments, **options):
        raise AssertionError(f"network access: {arguments}")

    socket.socket.connect = socket.socket.connect_ex = refuse
    socket.create_connection = socket.getaddrinfo = refuse
"""


def python(program, **environment):
    """Standard output of a Python program in a fresh process."""
    # Two pieces with their own indentation.
    program = "\n".join(textwrap.dedent(part) for part in (program if isinstance(program, tuple) else (program,)))
    changes = package.child_environment(**environment)
    changes.pop("HF_HUB_OFFLINE", None)
    child = subprocess.run([sys.executable, "-c", program], env=changes, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout.strip()


@pytest.fixture(scope="session")
def variant(kernel) -> Path:
    return package.find_variant()[0]


@pytest.fixture(scope="session")
def backend_argument(kernel):
    return f"backend={package.find_variant()[1]!r}"


# ---- offline ----


def test_local_override_needs_no_network(kernel, backend_argument):
    """`get_kernel` with LOCAL_KERNELS, every way out blocked, and an endpoint that nobody answers."""
    program = f"""
        import torch
        from kernels import get_kernel

        kernel = get_kernel("org/geglu", version=1, {backend_argument})
        x = torch.ones(3, 8)
        print(kernel.__name__, kernel.geglu(x, x).sum().item() > 20)
    """
    printed = python(
        (BLOCK_SOCKETS, program), LOCAL_KERNELS=f"org/geglu={package.repository()}", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert printed == f"{kernel.__name__} True"


def test_import_starts_nothing(kernel, backend_argument):
    """No socket opened, no environment variable set, no warning filter added, no thread left, no CUDA, no Triton."""
    native = kernel.dispatch.NATIVE  # a portable build needs Triton, where there is one
    program = f"""
        import os, sys, threading, warnings
        from pathlib import Path

        import torch
        from kernels import get_local_kernel

        def state():
            return {{
                "environment": dict(os.environ),
                "warnings": list(warnings.filters),
                "threads": threading.active_count(),
                "CUDA": torch.cuda.is_initialized(),
                "triton": "triton" in sys.modules and {native},
            }}

        before = state()
        get_local_kernel(Path({str(package.repository())!r}), {backend_argument})
        after = state()
        print([name for name in before if before[name] != after[name]])
    """
    assert python((BLOCK_SOCKETS, program)) == "[]"


def test_first_call_is_quick(kernel, backend_argument):
    """In processor time: the wall clock belongs to whatever else the machine does, and waiting needs a socket."""
    program = f"""
        import time

        import torch

        start = time.process_time()
        from kernels import get_kernel

        kernel = get_kernel("org/geglu", version=1, {backend_argument})
        x = torch.ones(4, 16, dtype=torch.bfloat16)
        kernel.geglu(x, x)
        first = time.process_time()
        for columns in range(16, 80):
            kernel.geglu(torch.ones(4, columns), torch.ones(4, columns))
        print(first - start, (time.process_time() - first) / 64)
    """
    override = f"org/geglu={package.repository()}"
    runs = [[float(word) for word in python(program, LOCAL_KERNELS=override).split()] for _ in range(2)]
    assert min(run[0] for run in runs) <= FIRST_CALL_SECONDS
    # Nothing is compiled, tuned or looked up for a new shape.
    assert min(run[1] for run in runs) <= NEW_SHAPE_SECONDS


def test_first_call_from_many_threads(kernel, backend_argument):
    """Whatever the first call prepares is prepared once, and nobody uses it half-made."""
    program = f"""
        import threading
        from pathlib import Path

        import torch
        from kernels import get_local_kernel

        kernel = get_local_kernel(Path({str(package.repository())!r}), {backend_argument})
        inputs = {{dtype: torch.randn(2, 5000).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}}
        gate_up = [(gate, up, form) for gate, up in inputs.values() for form in ("none", "tanh")] * 2
        barrier, results = threading.Barrier(len(gate_up)), [None] * len(gate_up)

        def first(index):
            gate, up, form = gate_up[index]
            barrier.wait()
            results[index] = kernel.geglu(gate, up, approximate=form)

        threads = [threading.Thread(target=first, args=(index,)) for index in range(len(gate_up))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for (gate, up, form), early in zip(gate_up, results):
            assert torch.equal(early, kernel.geglu(gate, up, approximate=form))
            eager = torch.nn.functional.gelu(gate, approximate=form) * up
            assert torch.allclose(early.float(), eager.float(), rtol=2e-2, atol=1e-4)
        print("same")
    """
    assert python(program) == "same"


# ---- two builds in one process ----


@pytest.fixture(scope="session")
def second_build(kernel, tmp_path_factory) -> Path:
    """Another build of the same package: a comment makes its bytes, so its id, differ; its objects are cached."""
    copy = project.copy(tmp_path_factory.mktemp("second") / "project")
    source = copy / "torch-ext" / "geglu" / "__init__.py"
    source.write_text(source.read_text() + "\n# Another build.\n")
    project.build(copy)
    return copy


@pytest.mark.parametrize("first", (0, 1), ids=("this_first", "other_first"))
@pytest.mark.parametrize("threads", (False, True), ids=("in_turn", "from_two_threads"))
def test_two_builds_side_by_side(second_build, backend_argument, first, threads):
    """Both keep their own namespace: operators, fakes, vmap rules, autograd and layers, whichever came first."""
    program = f"""
        import threading
        from pathlib import Path

        import torch
        from kernels import get_local_kernel

        paths = [Path({str(package.repository())!r}), Path({str(second_build)!r})]
        options = [dict({backend_argument}), dict(backend="cpu")]
        loaded = {{}}

        def load(index):
            loaded[index] = get_local_kernel(paths[index], **options[index])

        order = [{first}, {1 - first}]
        if {threads}:
            workers = [threading.Thread(target=load, args=(index,)) for index in order]
            [worker.start() for worker in workers]
            [worker.join() for worker in workers]
        else:
            [load(index) for index in order]

        assert loaded[0].__name__ != loaded[1].__name__
        assert loaded[0]._ops.ops.name != loaded[1]._ops.ops.name
        gate, up = torch.randn(3, 64), torch.randn(3, 64)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up

        def both(gate, up):
            return [loaded[index].geglu(gate, up) for index in order]

        compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
        for call in (both, compiled, torch.vmap(both)):
            for result in call(gate, up):
                assert torch.allclose(result, expected, rtol=1e-4, atol=1e-6)
        for index in order:
            leaf = gate.clone().requires_grad_()
            loaded[index].geglu(leaf, up).sum().backward()
            assert leaf.grad.abs().max() > 0
        print("both")
    """
    assert python(program) == "both"


# ---- what is in a variant ----


def test_metadata_names_what_is_there(kernel, variant):
    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert metadata.id == kernel.__name__ == kernel._ops.ops.name
    libraries = [f"{metadata.id}.abi3.so"] if "stable-abi" in variant.name else []
    assert [path.name for path in variant.rglob("*.so")] == libraries
    assert metadata.version == 1 and str(metadata.name) == "geglu" and metadata.license == "apache-2.0"
    assert metadata.python_depends == []


def test_the_library_stays_small(variant):
    """4 MB a variant."""
    size = sum(p.stat().st_size for p in variant.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    assert size <= 4 * 1024 * 1024


def test_a_missing_build_is_one_clear_error(tmp_path):
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(package.TESTS / "test_forward.py")],
        env=package.child_environment(GEGLU_REPO=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    printed = child.stdout + child.stderr
    assert child.returncode == pytest.ExitCode.USAGE_ERROR
    assert printed.count("make build") == 1 and "Traceback" not in printed
    assert os.fspath(tmp_path) in printed
