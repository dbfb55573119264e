"""Noarch variants: what is in them, what refuses them, and that their ids follow their bytes."""

import json
import shutil

import pytest
from build_tree import Tree
from kernels.variants import parse_variant

from tools.build import noarch
from tools.build.check import check_variant


@pytest.fixture(scope="session")
def built(pristine, tmp_path_factory) -> Tree:
    """The tiny package with its noarch variants. Not to be changed."""
    from tools.build.__main__ import main

    root = tmp_path_factory.mktemp("noarch") / "tiny"
    shutil.copytree(pristine.root, root)
    assert main(["--root", str(root), "--variants", "noarch"]) == 0
    return Tree(root)


@pytest.mark.parametrize("backend", noarch.BACKENDS)
def test_content_and_metadata(built, backend):
    directory = built.root / "build" / f"torch-{backend}"
    assert check_variant(directory) == []
    metadata = json.loads((directory / "metadata.json").read_text())
    assert metadata["backend"] == {"type": backend}
    assert metadata["id"].startswith(f"_tiny_{backend}_")
    package = built.root / "torch-ext" / "tiny"
    expected = {path.relative_to(package).as_posix() for path in package.rglob("*.py")} | {"_ops.py", "metadata.json"}
    assert {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()} == expected
    assert parse_variant(directory.name).variant_str == directory.name


def test_ids_differ_between_all_variants(built):
    ids = [json.loads(path.read_text())["id"] for path in (built.root / "build").glob("*/metadata.json")]
    digits = {name.rsplit("_", 1)[1] for name in ids}
    assert len(digits) == len(ids) == 1 + len(noarch.BACKENDS)


@pytest.fixture
def copy(built, tmp_path) -> Tree:
    shutil.copytree(built.root, tmp_path / "tiny", copy_function=shutil.copyfile)
    return Tree(tmp_path / "tiny")


def test_up_to_date_until_a_byte_changes(copy, build):
    before = copy.content()
    assert "up to date" in build(copy, "--variants", "torch-cuda").out
    assert copy.content() == before
    source = copy.root / "torch-ext" / "tiny" / "__init__.py"
    source.write_text(source.read_text() + "\n# Changed.\n")
    run = build(copy, "--variants", "torch-cuda")
    assert run.code == 0 and "built and checked" in run.out
    changed = {name for name, content in copy.content().items() if before.get(name) != content}
    assert changed == {"torch-cuda/__init__.py", "torch-cuda/_ops.py", "torch-cuda/metadata.json"}


def test_a_damaged_variant_is_built_anew(copy, build):
    before = copy.content()
    (copy.root / "build" / "torch-xpu" / "__init__.py").write_text("")
    assert "built and checked" in build(copy, "--variants", "torch-xpu").out
    assert copy.content() == before


DAMAGE = {
    "a_library": (lambda d: (d / "x.so").write_bytes(b""), "expected none in a noarch variant"),
    "another_namespace": (lambda d: _replace(d / "_ops.py", "torch.ops._tiny", "torch.ops._other"), "_ops.py uses"),
    "an_import": (lambda d: _append(d / "_ops.py", "\nfrom . import _tiny_x_1234567\n"), "_ops.py"),
    "archs": (lambda d: _archs(d), "declares"),
    "another_backend": (lambda d: d.rename(d.with_name("torch-rocm-moved")), "is no name"),
}


def _replace(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def _append(path, text):
    path.write_text(path.read_text() + text)


def _archs(directory):
    path = directory / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata["backend"] = {"type": "cuda", "archs": ["9.0"]}
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize("name", DAMAGE)
def test_what_the_check_refuses(copy, name):
    damage, message = DAMAGE[name]
    directory = copy.root / "build" / "torch-cuda"
    damage(directory)
    if not directory.exists():
        directory = directory.with_name("torch-rocm-moved")
    assert any(message in problem for problem in check_variant(directory))


def test_unknown_variant_names_what_can_be_built(copy, build):
    run = build(copy, "--variants", "torch-metal")
    assert run.code == 1 and "torch-metal" in run.err and "torch-rocm" in run.err
