"""Every check of a variant, shown to fail: libraries with one flaw each, and variants with one flaw each."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tools.build import BUILDER
from tools.build.check import check_variant
from tools.build.check.__main__ import main as check_main
from tools.build.check.elf import Library
from tools.build.check.fatbin import FatBinaryError, architectures
from tools.build.check.library import check_library
from tools.build.check.torch_abi import parse, shim_versions
from tools.build.check.variant import VariantName
from tools.build.toolchain import find_cxx


@pytest.fixture(scope="session")
def make_library(tmp_path_factory):
    """Compiles a library that passes every check unless `source` or `flags` add a flaw."""
    folder = tmp_path_factory.mktemp("libraries")
    cxx = find_cxx().command
    for stub in ("torch", "extra"):
        subprocess.run([*cxx, "-shared", "-o", f"lib{stub}.so", f"-Wl,-soname,lib{stub}.so", "-xc", "/dev/null"],
                       cwd=folder, check=True)  # fmt: skip

    def make(source: str = "", *flags: str, torch: bool = True) -> Library:
        (folder / "flaw.cpp").write_text(f'extern "C" int PyInit_x() {{ return 0; }}\n{source}\n')
        needed = ["-Wl,--no-as-needed", *(["-ltorch"] if torch else []), *flags]
        subprocess.run([*cxx, "-O1", "-fPIC", "-shared", "flaw.cpp", "-o", "flaw.so", "-L.", *needed],
                       cwd=folder, check=True)  # fmt: skip
        return Library(folder / "flaw.so")

    return make


def problems(library: Library, archs: tuple[str, ...] = ()) -> list[str]:
    name = VariantName("cpu", None, library.machine, (2, 10))
    return check_library(library, name, list(archs))


def test_a_clean_library_has_no_problems(make_library):
    assert problems(make_library('extern "C" int PyModule_Create2(); int f() { return PyModule_Create2(); }')) == []


@pytest.mark.parametrize(
    ("source", "flags", "expected"),
    [
        ('extern "C" double exp(double); double f(double v) { return exp(v); }', ["-lm"],
         "exp needs GLIBC_2.29, manylinux_2_28 has GLIBC_2.28 at most"),
        ("namespace c10 { int f(int); } int f() { return c10::f(1); }", [],
         "c10::f(int) is undefined and not in torch's stable ABI"),
        ("namespace own { int f(); } int f() { return own::f(); }", [],
         "own::f() is undefined and not in torch's stable ABI"),
        ('extern "C" int aoti_torch_cpu_abs(); int f() { return aoti_torch_cpu_abs(); }', [],
         "aoti_torch_cpu_abs is undefined and not in torch's stable ABI"),
        ('extern "C" int torch_from_blob(); int f() { return torch_from_blob(); }', [],
         "torch_from_blob needs torch 2.11, the variant promises 2.10"),
        ('extern "C" int PyUnicode_AsUTF8(); int f() { return PyUnicode_AsUTF8(); }', [],
         "PyUnicode_AsUTF8 is not in the limited API of Python 3.9"),
        ("", ["-Wl,-rpath,/home/me/lib"], "has the library search path /home/me/lib, expected none"),
        ("", ["-Wl,-rpath,/home/me/lib", "-Wl,--disable-new-dtags"],
         "has the library search path /home/me/lib, expected none"),
        ("", ["-lextra"], "needs libextra.so, which a user may not have"),
        ('extern "C" int puts(const char*); int f() { return puts("/home/me/kernel/src/x.cpp"); }', [],
         "contains the path /home/me/kernel/src/x.cpp"),
    ],
    ids=["glibc", "c10", "unresolved", "generated shim", "newer shim", "python", "runpath", "rpath", "needed", "path"],
)  # fmt: skip
def test_a_flaw_in_a_library_is_found(make_library, source, flags, expected):
    assert expected in problems(make_library(source, *flags))


def test_a_library_that_does_not_ask_for_torch(make_library):
    assert problems(make_library(torch=False)) == ["does not need libtorch.so, so that its symbols will not be found"]


def test_a_stripped_library_cannot_hide_from_kernel_abi_check(make_library):
    library = make_library('extern "C" int PyUnicode_AsUTF8(); int f() { return PyUnicode_AsUTF8(); }', "-s")
    assert any("is stripped" in problem for problem in problems(library))


def test_a_library_for_another_machine(make_library):
    library = make_library()
    other = VariantName("cpu", None, "aarch64" if library.machine == "x86_64" else "x86_64", (2, 10))
    assert check_library(library, other, []) == [f"is for {library.machine}, the variant for {other.machine}"]


def test_a_cuda_library_needs_the_runtime_of_its_major(make_library):
    library = make_library()
    name = VariantName("cuda", 13, library.machine, (2, 10))
    assert check_library(library, name, []) == ["does not need libcudart.so.13, so that its symbols will not be found"]


def entry(kind: int, arch: int, flags: int) -> bytes:
    header = struct.pack("<HHIQ12xI8xQ16x", kind, 0x101, 64, 8, arch, flags)
    return header + b"payload."


def fat_binary(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def test_architectures_of_a_fat_binary():
    first = fat_binary(entry(2, 75, 0x11), entry(2, 90, 0x10_0011), entry(1, 90, 0x10_8011))
    second = fat_binary(entry(2, 100, 0x20_0011), entry(1, 120, 0x8011))
    assert architectures(first + bytes(8) + second) == {"7.5", "9.0a", "9.0a+PTX", "10.0f", "12.0+PTX"}
    assert architectures(b"") == set()


@pytest.mark.parametrize("section", [b"?" * 32, fat_binary(entry(7, 90, 0)), fat_binary(entry(2, 90, 0))[:-60]])
def test_an_unknown_fat_binary_is_an_error(section):
    with pytest.raises(FatBinaryError):
        architectures(section)


def test_declared_architectures_are_those_of_the_binary(make_library):
    numbers = ",".join(map(str, fat_binary(entry(2, 90, 0x10_0011), entry(1, 90, 0x8011))))
    library = make_library(f'__asm__(".section .nv_fatbin,\\"a\\"\\n.byte {numbers}\\n.text");')
    assert problems(library, ("9.0+PTX", "9.0a")) == ["metadata.json declares 9.0, which the fat binary lacks"]
    assert problems(library, ("9.0a",)) == ["the fat binary has 9.0+PTX, which metadata.json does not declare"]


def test_shims_are_dated_by_their_guards():
    text = """
    // int aoti_torch_in_a_comment();
    AOTI_TORCH_EXPORT int aoti_torch_old(int);
    #if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
    #ifdef USE_CUDA
    AOTI_TORCH_EXPORT int
    torch_nested(int);
    #endif
    AOTI_TORCH_EXPORT int torch_newer(int);
    #endif
    int torch_after(int);
    """
    versions = parse(text)
    assert versions == {
        "aoti_torch_old": (2, 9),
        "torch_nested": (2, 11),
        "torch_newer": (2, 11),
        "torch_after": (2, 9),
    }
    assert shim_versions()["torch_library_impl"] == (2, 10)


def rewrite_metadata(directory: Path, **changes) -> None:
    path = directory / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename_library(directory: Path) -> None:
    next(directory.glob("*.so")).rename(directory / "_tiny_cpu_0000000.abi3.so")


def change_ops(directory: Path) -> None:
    path = directory / "_ops.py"
    path.write_text(path.read_text().replace("torch.ops._tiny_cpu_", "torch.ops._tiny_cuda_"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: (d / "__init__.py").write_text("x = 1"), "digest: "),
        (lambda d: (d / "__init__.py").unlink(), "digest: "),
        (lambda d: (d / "more.py").write_text("x = 1"), "digest: "),
        (lambda d: (d / "data.bin").write_bytes(bytes(4 * 2**20)), "more than 4 MB"),
        (lambda d: (d / "more.pyc").write_bytes(b"x"), "more.pyc is bytecode without a source"),
        (lambda d: rewrite_metadata(d, digest=None), "metadata.json has no digest"),
        (lambda d: (d / "metadata.json").unlink(), "metadata.json: "),
        (lambda d: rewrite_metadata(d, backend={"type": "cuda"}), "metadata.json says backend cuda"),
        (lambda d: rewrite_metadata(d, id="_tiny_cpu_1111111"), "the libraries are ['_tiny_cpu_"),
        (rename_library, "the libraries are ['_tiny_cpu_0000000.abi3.so']"),
        (change_ops, "_ops.py uses the names "),
        (lambda d: (d / "_ops.py").unlink(), "_ops.py: "),
        (lambda d: next(d.glob("*.so")).write_bytes(b"no library"), ".abi3.so: "),
    ],
)
def test_a_flaw_in_a_variant_is_found(pristine, tmp_path, capsys, damage, expected):
    directory = shutil.copytree(pristine.variant(), tmp_path / pristine.variant().name)
    damage(directory)
    assert check_main([str(directory)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(expected in line for line in lines), lines
    assert all(line.startswith(f"{directory}: ") for line in lines)


def test_the_library_must_be_what_its_id_says(pristine, tmp_path):
    """A library renamed along with the metadata and _ops.py still has the old name inside."""
    directory = shutil.copytree(pristine.variant(), tmp_path / pristine.variant().name)
    library = next(directory.glob("*.so"))
    old, new = library.name.removesuffix(".abi3.so"), "_tiny_cpu_0123456"
    library.rename(directory / f"{new}.abi3.so")
    for name in ("metadata.json", "_ops.py"):
        (directory / name).write_text((directory / name).read_text().replace(old, new))
    assert f"{new}.abi3.so exports ['PyInit_{old}'], expected PyInit_{new} alone" in check_variant(directory)


@pytest.mark.parametrize("compute", ["cu130", "cu126"])
def test_the_directory_must_name_the_backend(pristine, tmp_path, compute):
    name = pristine.variant().name.replace("-cpu-", f"-{compute}-")
    found = check_variant(shutil.copytree(pristine.variant(), tmp_path / name))
    assert "metadata.json says backend cpu, the directory's name cuda" in found
    assert any(f"does not need libcudart.so.{compute[2:4]}" in problem for problem in found)


@pytest.mark.parametrize("name", ["torch-cpu", "torch-stable-abi2.10-cpu-x86_64-linux", "build"])
def test_a_directory_that_is_no_variant(tmp_path, name):
    (tmp_path / name).mkdir()
    assert len(check_variant(tmp_path / name)) == 1


def test_what_lies_beside_the_variants(tree, capsys):
    """A card may; a folder or a file that no digest covers may not, whichever of the two names it was asked by."""
    build = tree.root / "build"
    (build / "CARD.md").write_text("card")
    assert check_main([str(tree.root)]) == 0
    said = capsys.readouterr().out
    assert said == f"{tree.variant()}: ok, {tree.library().name.partition('.')[0]}, built by {BUILDER} from no commit\n"
    (build / "geglu.py").write_text("")
    for place in (tree.root, build):
        assert check_main([str(place)]) == 1
        assert f"{build / 'geglu.py'}: is no variant" in capsys.readouterr().out


def test_pycache_of_a_used_variant_is_no_problem(pristine, tmp_path):
    directory = shutil.copytree(pristine.variant(), tmp_path / pristine.variant().name)
    (directory / "__pycache__").mkdir()
    (directory / "__pycache__/x.pyc").write_bytes(b"x")
    assert check_variant(directory) == []
