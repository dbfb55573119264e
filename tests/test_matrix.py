"""Every system gets a build, or a sentence that says why not; and every GPU gets code, or an exception."""

import json
import re

import package
import pytest

pytest.importorskip("elftools", reason="the builder's requirements are not here")
pytest.importorskip("tools.matrix", reason="the tools are not here")

from kernels.archs import _supports_cuda_capability

from tools import matrix
from tools.build import config, noarch
from tools.matrix import BUILT, BY_NIX, System, answer

COMPILED_CPU, COMPILED_CUDA = "torch-stable-abi210-cpu-x86_64-linux", "torch-stable-abi210-cu130-x86_64-linux"


def test_the_builds_are_those_that_the_builder_makes():
    loaded = config.load(package.ROOT)
    compiled = {
        f"torch-stable-abi{major}{minor}-{'cu130' if backend == 'cuda' else backend}-x86_64-linux"
        for backend, (major, minor) in loaded.stable_abi.items()
    }
    assert set(BUILT) == compiled | {noarch.variant_name(backend) for backend in noarch.BACKENDS}
    assert {path.parent.name for path in (package.ROOT / "build").glob("*/metadata.json")} <= set(BUILT)


@pytest.mark.parametrize("variants", (BUILT, BUILT + BY_NIX), ids=("built_here", "with_nix"))
def test_every_pair_resolves(variants):
    pairs = list(matrix.systems())
    assert len(pairs) == 11 * (1 + 8 + 6 + 3) * 2
    assert [system for system in pairs if answer(system, variants).variant is None] == []


def test_compiled_wherever_it_serves():
    """The portable builds are the net below, not a rival."""
    for system in matrix.systems():
        chosen = answer(system).variant
        new_enough = int(system.torch.split(".")[1]) >= 10
        if system.machine == "x86_64" and new_enough and system.backend == "cpu":
            assert chosen == COMPILED_CPU
        elif system.machine == "x86_64" and new_enough and system.backend.startswith("cu13"):
            assert chosen == COMPILED_CUDA
        else:
            assert chosen == f"torch-{matrix_backend(system.backend)}"


def matrix_backend(name: str) -> str:
    kind = name.rstrip("0123456789")
    return "cuda" if kind == "cu" else kind


@pytest.mark.parametrize("backend", matrix.UNSERVED)
def test_what_gets_none_is_told_why(backend):
    found = answer(System("2.13", "metal" if backend == "metal" else backend.replace("cann", "cann81"), "aarch64"))
    assert found.variant is None and found.reason == matrix.UNSERVED[backend]


@pytest.mark.parametrize(("machine", "system"), [("x86_64", "windows"), ("aarch64", "darwin")])
def test_other_systems_get_the_portable_build(machine, system):
    assert answer(System("2.13", "cpu", machine, system)).variant == "torch-cpu"


def test_readme_has_this_table():
    text = (package.ROOT / "README.md").read_text()
    assert matrix.table() in text, "README.md: paste what `python -m tools.matrix` prints"


# ---- which GPU ----

# Capability -> whether the compiled CUDA build has code for it: its own, that of an older minor, or PTX.
CAPABILITIES = {
    (7, 0): False,  # Volta: CUDA 13 no longer compiles for it
    (7, 5): True,
    (8, 0): True,
    (8, 6): True,
    (8, 7): True,
    (8, 9): True,
    (9, 0): True,
    (10, 0): True,
    (10, 3): True,
    (11, 0): False,  # Jetson Thor: neither a minor of another, nor newer than the PTX
    (12, 0): True,
    (12, 1): True,
    (13, 0): True,  # by PTX
}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_which_gpus_the_compiled_build_serves(capability):
    """What is refused is refused by the loader, with a sentence; `torch-cuda` serves it through get_local_kernel."""
    archs = config.load(package.ROOT).components("cuda")
    declared = sorted({arch for component in archs for arch in component.cuda_capabilities})
    assert _supports_cuda_capability(declared, capability) == CAPABILITIES[capability]


def test_the_binary_has_what_build_toml_declares():
    """The builder's check compares the fat binary with metadata.json; this compares metadata.json with build.toml."""
    path = package.ROOT / "build" / COMPILED_CUDA / "metadata.json"
    if not path.exists():
        pytest.skip("the CUDA variant was not built here")
    declared = {a for c in config.load(package.ROOT).components("cuda") for a in c.cuda_capabilities}
    assert set(json.loads(path.read_text())["backend"]["archs"]) == declared


def test_no_launch_goes_unchecked():
    """A GPU without code gives an error code at the launch, which becomes an exception: nobody drops it."""
    launches = re.compile(r"<<<|cudaLaunchKernelEx\(")
    for path in (package.ROOT / "kernel_src" / "cuda").rglob("*.cu*"):
        text = path.read_text()
        if launches.search(text):
            assert "cudaGetLastError()" in text or "status = cudaLaunchKernelEx(" in text, path
