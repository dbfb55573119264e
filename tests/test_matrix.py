"""Every system gets a build, or a sentence that says why not; and every GPU gets code, or an exception."""

import re
from pathlib import Path

import package
import pytest
import torch

pytest.importorskip("elftools", reason="the builder's requirements are not here")
pytest.importorskip("tools.matrix", reason="the tools are not here")

from kernels import get_local_kernel, variants
from kernels._rust import Metadata
from kernels.backends import _backend
from kernels.validate import ArchValidator

from tools import matrix
from tools.build import config
from tools.build.check.elf import Library
from tools.build.check.fatbin import architectures
from tools.matrix import System, answer, built, with_nix

BUILD = package.ROOT / "build"
COMPILED_CPU, COMPILED_CUDA = "torch-stable-abi210-cpu-x86_64-linux", "torch-stable-abi210-cu130-x86_64-linux"

# ---- which build ----


def test_the_builds_are_those_of_the_builder():
    assert {COMPILED_CPU, COMPILED_CUDA, "torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"} == set(built())
    assert {path.parent.name for path in BUILD.glob("*/metadata.json")} <= set(with_nix())


def test_nix_builds_from_this_very_build_toml():
    flake = (package.ROOT / "flake.nix").read_text()
    assert "genKernelFlakeOutputs" in flake and "path = ./.;" in flake


@pytest.mark.parametrize("published", (built, with_nix))
def test_every_pair_resolves(published):
    pairs = list(matrix.systems())
    assert len(pairs) == 11 * (1 + 8 + 8 + 4) * 2
    assert [system for system in pairs if answer(system, published()).variant is None] == []


def test_compiled_wherever_it_serves():
    """The portable builds are the net below, not a rival."""
    for system in matrix.systems():
        new_enough = int(system.torch.split(".")[1]) >= 10 and system.machine == "x86_64"
        if new_enough and system.backend == "cpu":
            expected = COMPILED_CPU
        elif new_enough and system.backend.startswith("cu13"):
            expected = COMPILED_CUDA
        elif system.kind == "xpu" and system.torch in ("2.5", "2.6"):
            expected = "torch-cpu"
        else:
            expected = f"torch-{'cuda' if system.kind == 'cu' else system.kind}"
        assert answer(system, built()).variant == expected, system


@pytest.mark.parametrize(
    ("says", "backend"),
    [
        ({"cuda": "12.4"}, "cu124"),
        ({"cuda": "13.2"}, "cu132"),
        ({"hip": "6.2.41133-dd7f95766"}, "rocm62"),
        ({"hip": "7.2.0"}, "rocm72"),
        ({"xpu": "20250302"}, "xpu20253"),
        ({}, "cpu"),
    ],
    ids=str,
)
def test_the_matrix_has_the_backends_that_the_loader_sees(monkeypatch, says, backend):
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, says.get(name))
    assert _backend().variant_str == backend
    assert backend in matrix.BACKENDS


def test_a_torch_that_does_not_know_of_xpu_passes_for_a_cpu_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delattr(torch.version, "xpu")
    assert _backend().variant_str == "cpu"


def test_free_threaded_python_gets_the_portable_build(monkeypatch):
    monkeypatch.setattr(variants, "_is_unsupported_free_threaded_build", lambda: True)
    assert answer(System("2.13", "cpu", "x86_64"), built()).variant == "torch-cpu"
    assert answer(System("2.13", "cu130", "x86_64"), built()).variant == "torch-cuda"


@pytest.mark.parametrize("backend", ("metal", "neuron", "tpu", "cann81"))
def test_what_gets_none_is_told_why(backend):
    found = answer(System("2.13", backend, "aarch64"), with_nix())
    assert found.variant is None
    assert found.reason == matrix.UNSERVED[backend.rstrip("0123456789")]


@pytest.mark.parametrize("backend", ("cpu", "cu126", "cu130", "xpu20260"))
@pytest.mark.parametrize(("machine", "system"), [("x86_64", "windows"), ("aarch64", "darwin")])
def test_other_systems_get_the_portable_build(machine, system, backend):
    """On macOS that is only a torch without Metal."""
    asked = System("2.13", backend, machine, system)
    assert answer(asked, with_nix()).variant == f"torch-{'cuda' if asked.kind == 'cu' else asked.kind}"


def test_readme_has_this_table():
    text = (package.ROOT / "README.md").read_text()
    assert matrix.table() in text, "README.md: paste what `python -m tools.matrix` prints"


# ---- which GPU ----

# Capability -> what runs there of the compiled CUDA build: its own code, that of an older minor, PTX, or nothing.
CODE = {
    (7, 0): None,  # Volta: CUDA 13 no longer compiles for it
    (7, 5): "7.5",
    (8, 0): "8.0",
    (8, 6): "8.6",
    (8, 7): "8.6",
    (8, 9): "8.9",
    (9, 0): "9.0a",
    (10, 0): "10.0",
    (10, 3): "10.0",
    (11, 0): "8.9+PTX",  # Jetson Thor
    (12, 0): "12.0",
    (12, 1): "12.0",
    (13, 0): "12.0+PTX",
}


@pytest.fixture
def metadata():
    """The metadata of a variant in build/, as the loader reads it."""

    def read(variant: str) -> Metadata:
        path = BUILD / variant / "metadata.json"
        if not path.exists():
            pytest.skip(f"{variant} was not built here")
        return Metadata.read_from_file(path)

    return read


def on_a_gpu(monkeypatch, capability):
    """torch as the loader's check of architectures sees it on a GPU of this capability."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize("capability", CODE, ids=str)
def test_a_gpu_without_code_is_refused_with_a_sentence(monkeypatch, metadata, capability):
    described = metadata(COMPILED_CUDA)
    on_a_gpu(monkeypatch, capability)
    check = ArchValidator().validate_metadata
    if CODE[capability] is not None:
        check(metadata=described, variant=COMPILED_CUDA)
        return
    with pytest.raises(RuntimeError) as refusal:
        check(metadata=described, variant=COMPILED_CUDA)
    said = str(refusal.value)
    assert f"'{COMPILED_CUDA}' does not support the current device" in said
    assert f"CUDA capability {capability[0]}.{capability[1]}" in said
    assert all(arch in said for arch in described.backend.archs)


@pytest.mark.parametrize("capability", CODE, ids=str)
def test_the_portable_build_is_refused_nowhere(monkeypatch, metadata, capability):
    described = metadata("torch-cuda")
    on_a_gpu(monkeypatch, capability)
    ArchValidator().validate_metadata(metadata=described, variant="torch-cuda")


def test_the_portable_build_loads_by_its_path():
    """README's way for a GPU that the compiled build refuses."""
    assert "get_local_kernel(Path(" in (package.ROOT / "README.md").read_text()
    path = BUILD / "torch-cuda"
    if not path.exists():
        pytest.skip("torch-cuda was not built here")
    kernel = get_local_kernel(Path(path))
    gate, up = torch.randn(2, 3, 8).unbind()
    torch.testing.assert_close(
        kernel.geglu(gate, up), torch.nn.functional.gelu(gate, approximate="tanh") * up, rtol=1e-5, atol=1e-6
    )


@pytest.fixture
def cuda_library(metadata) -> Library:
    identifier = metadata(COMPILED_CUDA).id
    return Library(BUILD / COMPILED_CUDA / f"{identifier}.abi3.so")


def fat_binaries(section: bytes) -> list[set[str]]:
    """What each fat binary of a section, one for each compiled file, has code for."""
    starts = [match.start() for match in re.finditer(rb"\x50\xed\x55\xba\x01\x00\x10\x00", section)]
    return [architectures(section[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]


def test_every_file_has_code_for_every_gpu(cuda_library):
    """Of any one file, not of all together: a kernel without code on a GPU is met at its first launch there.

    A file for Hopper alone has 9.0a and nothing else; what launches its kernels asks for the capability first.
    """
    found = fat_binaries(cuda_library.contents[".nv_fatbin"])
    portable = [archs for archs in found if archs != {"9.0a"}]
    assert portable
    for archs in portable:
        assert {code for code in CODE.values() if code} <= archs


def test_build_toml_declares_what_the_binary_has(cuda_library, metadata):
    components = config.load(package.ROOT).components("cuda")
    declared = {arch for component in components for arch in component.cuda_capabilities}
    assert set(metadata(COMPILED_CUDA).backend.archs) == declared
    code = {arch.removesuffix("+PTX") for arch in declared} | {arch for arch in declared if arch.endswith("+PTX")}
    assert set().union(*fat_binaries(cuda_library.contents[".nv_fatbin"])) == code


def test_the_binary_asks_for_no_way_to_end_the_process(cuda_library):
    """As test_sources.py says of the sources; here also of what headers and macros bring along."""
    imports = {needed.name for needed in cuda_library.imports}
    assert "cudaGetLastError" in imports
    assert not imports & {"exit", "_exit", "_Exit", "quick_exit", "abort", "raise", "kill", "__assert_fail"}


def test_no_launch_goes_unchecked():
    """A GPU without code gives an error code at the launch, which becomes an exception: nobody drops it."""
    launches = re.compile(r"<<<|cudaLaunchKernelEx\(")
    for path in (package.ROOT / "kernel_src" / "cuda").rglob("*.cu*"):
        text = path.read_text()
        if launches.search(text):
            assert "cudaGetLastError()" in text or "status = cudaLaunchKernelEx(" in text, path
