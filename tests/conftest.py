"""Fixtures shared by the suite, and pytest's settings: it also runs where the project's root files are absent."""

import os
from types import ModuleType

import package
import pytest
import torch

MARKERS = (
    "gpu: needs a CUDA device",
    "capability: run once more under every CPU instruction set that this machine has",
    "sanitize: small set of CUDA cases for compute-sanitizer",
    "mutation: builds mutated copies of the project",
    "native: of variants with a compiled library alone",
)

DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config, items):
    # A worker of pytest-xdist may not refuse to start; there the fixture says it.
    in_worker = hasattr(config, "workerinput")
    if not in_worker and any("kernel" in getattr(item, "fixturenames", ()) for item in items):
        problem = package.missing_build()
        if problem:
            raise pytest.UsageError(problem)
    if package.VARIANT and "stable-abi" not in package.VARIANT:
        skip = pytest.mark.skip(reason="the variant has no compiled library")
        for item in items:
            if item.get_closest_marker("native"):
                item.add_marker(skip)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def kernel() -> ModuleType:
    """The package as `kernels` loads it."""
    problem = package.missing_build()
    if problem:
        pytest.fail(problem, pytrace=False)
    return package.load()


@pytest.fixture
def alike(kernel):
    """Skips a test that needs the same bits at every place of a tensor, which torch's own float64 does not give."""

    def check(dtype):
        if dtype == torch.float64 and not kernel.dispatch.NATIVE:
            pytest.skip("torch's float64 functions round differently in a vector and in its tail")

    return check


@pytest.fixture(scope="session")
def ops(kernel):
    """The operators of this very build (its own namespace under torch.ops)."""
    return kernel._ops.ops


@pytest.fixture(params=DEVICES)
def device(request, kernel) -> torch.device:
    """Every device that the loaded variant serves here."""
    if request.param == "cuda" and "_cuda_" not in kernel.__name__:
        pytest.skip("the loaded variant is not a CUDA one")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(int(os.environ.get("GEGLU_TEST_SEED", "20261130")))
