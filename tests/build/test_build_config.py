"""build.toml, toolchains and capabilities: what is read, chosen, and refused with a message that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.build import cuda as cuda_module
from tools.build.capabilities import Capability, gencode_flags, select
from tools.build.config import load
from tools.build.cuda import NoCuda, find_cuda
from tools.build.errors import BuildError
from tools.build.toolchain import environment, find_cxx

NVCC_13 = {"75", "80", "86", "87", "88", "89", "90", "100", "103", "110", "120", "121"}
NVCC_12_6 = {"50", "60", "70", "75", "80", "86", "87", "89", "90"}
WANTED = [Capability.parse(text) for text in ("7.5", "8.0", "9.0a", "10.0", "12.0+PTX")]


def test_capabilities_of_a_new_toolkit():
    assert [str(capability) for capability in select(WANTED, NVCC_13)] == ["7.5", "8.0", "9.0a", "10.0", "12.0+PTX"]


def test_the_newest_portable_capability_takes_over_lost_ptx():
    assert [str(capability) for capability in select(WANTED, NVCC_12_6)] == ["7.5", "8.0+PTX", "9.0a"]


def test_ptx_is_not_added_where_none_was_asked_for():
    assert [str(capability) for capability in select(WANTED[:4], NVCC_12_6)] == ["7.5", "8.0", "9.0a"]


def test_gencode_flags():
    assert gencode_flags([Capability.parse("9.0a"), Capability.parse("12.0+PTX")]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


@pytest.mark.parametrize("text", ["90", "9.0b", "9.0+ptx", "sm_90"])
def test_a_capability_of_another_form_is_refused(text):
    with pytest.raises(BuildError, match="cuda-capabilities"):
        Capability.parse(text)


def test_every_missing_file_is_named(tree):
    (tree.root / "src/plain.cpp").unlink()
    (tree.root / "torch-ext/torch_binding.h").unlink()
    with pytest.raises(BuildError) as error:
        load(tree.root)
    lines = str(error.value).splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "build.toml: [torch] src lists torch-ext/torch_binding.h",
        "build.toml: [kernel.cpu] src lists src/plain.cpp",
        "build.toml: [kernel.cuda] src lists src/plain.cpp",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("edition = 5", "edition = 4", "not a valid build.toml"),
        ("[general.hub]", "[general.cuda]\nminver = '13.0'\n[general.hub]", r"\[general\] cuda"),
        ('include = ["src"]\nsrc', 'include = ["src"]\ncuda-minver = "13.0"\nsrc', "cuda-minver"),
        ('cuda-capabilities = ["9.0a"]\n', "", r"\[kernel.cuda\] has .cu files but no cuda-capabilities"),
        ('cpu = "2.10"\n', "", r"\[torch.stable-abi\] has no cpu"),
        ('depends = ["torch"]', 'depends = ["torch", "cutlass_4_0"]', r"depends = \['torch', 'cutlass_4_0'\]"),
        ('"src/plain.cpp", "src/scale.h"', '"../plain.cpp", "src/scale.h"', "outside of the package"),
    ],
)
def test_a_build_toml_that_cannot_be_built_is_refused(tree, old, new, expected):
    tree.edit("build.toml", old, new)
    with pytest.raises(BuildError, match=expected):
        load(tree.root)


def test_a_stable_abi_newer_than_the_installed_torch_is_refused(tree, build):
    tree.edit("build.toml", 'cpu = "2.10"', 'cpu = "9.1"')
    run = build(tree, "--variants", "cpu")
    assert run.code == 1
    assert "[torch.stable-abi] cpu is 9.1, but torch 2" in run.err


def test_no_build_toml(tmp_path):
    with pytest.raises(BuildError, match=r"no build\.toml in"):
        load(tmp_path)


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch) -> Path:
    """A CUDA_HOME whose nvcc says that it is 11.0."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 11.0, V11.0.221\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return nvcc


def test_an_unsupported_nvcc_is_an_error_where_cuda_is_asked_for(tree, build, fake_nvcc):
    before = tree.content()
    run = build(tree, "--variants", "cuda")
    assert run.code == 1
    assert f"{fake_nvcc} is version 11.0.221, supported are 12.6 to 13.x" in run.err
    assert "requirements-cuda.txt" in run.err
    assert tree.content() == before


def test_an_unsupported_nvcc_is_a_reason_where_cuda_is_not_asked_for(tree, build, fake_nvcc):
    run = build(tree)
    assert run.code == 0
    assert f"CUDA variant skipped: {fake_nvcc} is version 11.0.221" in run.out
    assert "up to date" in run.out


def test_cuda_home_without_nvcc_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(NoCuda, match=f"{tmp_path}/bin/nvcc does not run"):
        find_cuda()


def test_no_nvcc_at_all(monkeypatch):
    monkeypatch.setattr(cuda_module, "_candidates", list)
    with pytest.raises(NoCuda, match=r"no nvcc found: .*requirements-cuda\.txt"):
        find_cuda()


def test_a_usable_toolkit_comes_before_none(fake_nvcc, cuda, monkeypatch):
    """An old nvcc in PATH does not keep a newer toolkit from being found."""
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(cuda_module, "_candidates", lambda: [fake_nvcc, cuda.nvcc])
    assert find_cuda() == cuda


@pytest.mark.parametrize(
    ("value", "expected"), [("g++ -O0", "has flags"), ("/nowhere/g++", "no GNU compiler that runs: install g")]
)
def test_a_cxx_that_cannot_be_used_is_refused(monkeypatch, value, expected):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(BuildError, match=expected):
        find_cxx()


def test_flags_from_the_environment_do_not_reach_compilers(monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    monkeypatch.setenv("CPATH", "/nowhere")
    assert not {"NVCC_APPEND_FLAGS", "CPATH"} & set(environment())
