"""Proof that the suite can fail: faults planted in copies of the project, each of which must turn it red.

The faults in compiled code are all compiled into one copy and chosen by an environment variable, so that they cost one
build of one instruction set's worth of waiting; with none chosen that copy must pass, so what turns a run red is the
fault. The faults in Python are planted in copies of the built variant and cost no build.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import package
import project
import pytest

pytestmark = [pytest.mark.mutation, pytest.mark.native]

BODY = "kernel_src/cpu/geglu_body.h"

# Put before the body's first include: the chosen fault, read once.
CHOICE = """
#include <cstdlib>
namespace {
inline int fault() {
  static const int chosen = std::getenv("GEGLU_TEST_FAULT") ? std::atoi(std::getenv("GEGLU_TEST_FAULT")) : 0;
  return chosen;
}
}  // namespace
"""

# What the body has exactly once -> what the copy has instead: regular expressions, so that names may change.
PLACES = {
    r'#include "common/pointwise.h"\n': CHOICE + r"\g<0>",
    r"pointer<Element>\(problem\.(gate)\), pointer<Element>\(problem\.(up)\), pointer<Element>\(problem\.out\)": (
        r"pointer<Element>(fault() == 1 ? problem.\2 : problem.\1), "
        r"pointer<Element>(fault() == 1 ? problem.\1 : problem.\2), pointer<Element>(problem.out)"
    ),
    r"problem\.tanh \? run<": r"problem.tanh || fault() == 2 ? run<",
    # The derivative of x * s(x) without the term x * s'(x).
    r"const auto (\w+) = Function::value_and_derivative\((\w+\[i\])\);": (
        r"auto \1 = Function::value_and_derivative(\2); if (fault() == 3) \1.derivative = \1.value / \2;"
    ),
    r"Storage::store\((\w+), tensors\[Problem::kOut\]\);": (
        r"if (fault() == 4) { for (int i = 0; i < kBlock; ++i) \1[i] *= \1[i]; } \g<0>"
    ),
    # Rows that are no whole blocks end in a piece.
    r"(to\[i \* rows_\.inner_stride\[t\]\]) = \*staged\+\+;": (
        r"{ if (fault() != 5 || i + 1 < pieces_[p].size) \1 = *staged; ++staged; }"
    ),
    r"(Storage::round\(gate\);)": r"if (fault() != 6) \1",
    r"(Storage::round\(grad\);)": r"if (fault() != 7) \1",
}

COMPILED = {
    "gate_and_up_swapped": 1,
    "tanh_for_exact": 2,
    "dropped_backward_term": 3,
    "squared_output": 4,
    "last_column_skipped": 5,
    "activation_not_rounded_in_backward": 6,
    "product_not_rounded_in_backward": 7,
}

# name -> (file, what is in it exactly once, what the copy has instead, the tests that must notice)
IN_PYTHON = {
    "second_derivative_dropped": (
        "autograd.py",
        "grad_grad_gate * up * second + ",
        "",
        "test_backward.py::test_gradgradcheck",
    ),
    "packed_gradient_halves_swapped": (
        "autograd.py",
        "gradient(grad_out, x, ctx.tanh, ctx.gate_first)",
        "gradient(grad_out, x, ctx.tanh, not ctx.gate_first)",
        "test_backward.py::test_packed_gradient_goes_to_the_half_it_belongs_to",
    ),
    "default_is_exact": (
        "functional.py",
        'def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh")',
        'def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "none")',
        "test_forward.py::test_the_default_form_is_tanh",
    ),
    "fake_forgets_strides": (
        "fake.py",
        "    return torch.empty_like(gate)\n",
        "    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)\n",
        "test_opcheck.py::test_fakes_have_the_real_layout",
    ),
    "any_activation_is_gelu": (
        "activations.py",
        '    if activation is nn.functional.gelu:\n        return "none"\n',
        '    if True:\n        return "tanh"\n',
        "test_layer_activations.py::test_plain_activations",
    ),
}

# Small, and real: every entry point, form and dtype, forward and backward.
SUBSET = (
    "test_forward.py",
    "test_backward.py::test_gradients_are_accurate",
    "test_numerics.py::test_bits_equal_eager",
)


def planted(text: str, pattern: str, instead: str, where: str) -> str:
    text, count = re.subn(pattern, instead, text)
    assert count == 1, f"{where} has {count} places to plant a fault at, expected 1: {pattern}"
    return text


def run(repo: Path, tests, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu"]
    return subprocess.run(
        [*command, *(str(package.TESTS / test) for test in tests)],
        env=package.child_environment(GEGLU_REPO=str(repo), GEGLU_CPU_CAPABILITY="baseline", **environment),
        capture_output=True,
        text=True,
    )


def assert_red(child: subprocess.CompletedProcess) -> None:
    """Failed tests, not a crash of the run or nothing collected."""
    assert child.returncode == pytest.ExitCode.TESTS_FAILED, child.stdout[-3000:] + child.stderr[-1000:]


@pytest.fixture(scope="session")
def faulty_build(kernel, tmp_path_factory) -> Path:
    copy = project.copy(tmp_path_factory.mktemp("faults") / "project")
    source = copy / BODY
    text = source.read_text()
    for pattern, instead in PLACES.items():
        text = planted(text, pattern, instead, BODY)
    source.write_text(text)
    project.build(copy)
    return copy


def test_copy_without_a_fault_passes(faulty_build):
    child = run(faulty_build, SUBSET)
    assert child.returncode == pytest.ExitCode.OK, child.stdout[-3000:] + child.stderr[-1000:]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_fault_is_noticed(faulty_build, name):
    assert_red(run(faulty_build, SUBSET, GEGLU_TEST_FAULT=str(COMPILED[name])))


@pytest.mark.parametrize("name", IN_PYTHON)
def test_python_fault_is_noticed(kernel, tmp_path, name):
    file, found, instead, test = IN_PYTHON[name]
    variant, _ = package.find_variant()
    copy = tmp_path / "build" / variant.name
    shutil.copytree(variant, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / file
    source.write_text(planted(source.read_text(), re.escape(found), instead, file))
    assert_red(run(tmp_path, [test]))
