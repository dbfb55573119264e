"""The builder from end to end on a tiny package: what a build writes, reuses, refuses and leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from build_tree import Tree

from tools.build import variant
from tools.build.check import check_variant
from tools.build.check.__main__ import main as check_main
from tools.build.provenance import kernel_commit

PROJECT = Path(__file__).parents[2]


def test_layout_and_metadata(pristine):
    directory = pristine.variant()
    metadata = json.loads((directory / "metadata.json").read_text())
    assert list(metadata) == [
        *("name", "id", "version", "license", "python-depends", "kernel-depends", "backend", "digest", "provenance")
    ]
    assert metadata["version"] == 3
    assert metadata["backend"] == {"type": "cpu"}
    assert metadata["provenance"]["kernel-builder"]["version"].startswith("geglu-tools-build")
    names = {path.name for path in directory.iterdir()}
    assert names == {"__init__.py", "_ops.py", "metadata.json", f"{metadata['id']}.abi3.so"}
    assert set(metadata["digest"]["files"]) == names - {"metadata.json"}


def test_kernels_loads_it(pristine):
    program = (
        "import sys, torch, kernels, pathlib;"
        "kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]), backend='cpu');"
        "assert kernel.twice(torch.ones(3)).tolist() == [2, 2, 2];"
        "kernel.twice(torch.ones(2, 3).t())"
    )
    result = subprocess.run([sys.executable, "-c", program, str(pristine.root)], capture_output=True, text=True)
    assert "input must be contiguous, but has 2 dims" in result.stderr, result.stderr


def test_second_build_is_up_to_date(tree, build):
    before = tree.content()
    run = build(tree, "--variants", "cpu")
    assert run.code == 0
    assert "up to date" in run.out
    assert tree.content() == before


def elsewhere(tree: Tree, tmp_path: Path) -> Tree:
    """A copy of a tree's sources in a directory of another name, without anything built."""
    root = tmp_path / "elsewhere/tiny"
    shutil.copytree(tree.root, root, ignore=shutil.ignore_patterns("build", ".build-cache"))
    return Tree(root)


def test_same_sources_give_the_same_bytes_elsewhere(pristine, build, tmp_path):
    other = elsewhere(pristine, tmp_path)
    assert build(other, "--variants", "cpu").code == 0
    assert other.content() == pristine.content()


def test_an_edit_recompiles_what_includes_it_and_changes_the_id(tree, build):
    old = tree.library().name
    tree.edit("src/scale.h", "2.0f", "4.0f")
    run = build(tree, "--variants", "cpu")
    assert run.code == 0, run.err
    # Unchanged are the builder's own source and plain.cpp; the binding is compiled for its new id.
    assert "2 of 4 objects unchanged" in run.out
    assert "src/twice.cpp" in run.out
    assert "torch_binding.cpp" in run.out
    assert tree.library().name != old
    assert len(list(tree.variant().glob("*.so"))) == 1
    assert [path.name for path in (tree.root / "build").iterdir()] == [tree.variant().name]


def test_python_bytes_and_build_toml_are_in_the_id(tree, build, monkeypatch):
    monkeypatch.setattr("tools.build.pipeline._compile", _give_up)
    for name, old, new in [
        ("torch-ext/tiny/__init__.py", "twice = ops.twice", "twice = ops.twice  # as it is"),
        ("build.toml", "apache-2.0", "mit"),
    ]:
        tree.edit(name, old, new)
        with pytest.raises(_Rebuilt):
            build(tree, "--variants", "cpu")
        tree.edit(name, new, old)
    assert "up to date" in build(tree, "--variants", "cpu").out


def test_what_is_not_python_is_not_shipped(tree, build, monkeypatch):
    package = tree.root / "torch-ext/tiny"
    (package / "__pycache__").mkdir()
    (package / "__pycache__/x.cpython-311.pyc").write_bytes(b"")
    (package / "_ops.py").write_text("left by kernel-builder")
    (package / "notes.txt").write_text("not listed in pyext")
    assert "up to date" in build(tree, "--variants", "cpu").out


def test_a_changed_variant_is_built_again(tree, build):
    before = tree.content()
    (tree.variant() / "__init__.py").write_text("raise SystemExit")
    run = build(tree, "--variants", "cpu")
    assert "built and checked" in run.out
    assert tree.content() == before


def test_a_commit_refreshes_the_metadata_alone(tree, build):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        result = subprocess.run(
            ["git", *identity, *arguments], cwd=tree.root, capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    def provenance() -> dict:
        return json.loads((tree.variant() / "metadata.json").read_text())["provenance"].get("kernel")

    before = tree.library().read_bytes()
    assert provenance() is None
    git("init", "-q")
    git("add", "build.toml", "src", "torch-ext")
    git("commit", "-qm", "all")
    assert "metadata refreshed" in build(tree, "--variants", "cpu").out
    assert provenance() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    tree.edit("build.toml", 'license = "apache-2.0"', 'license = "apache-2.0" ')
    git("commit", "-qam", "touch")
    git("rm", "-q", "--cached", "src/plain.cpp")
    git("commit", "-qm", "forget a source")
    assert kernel_commit(tree.root, ["src/plain.cpp"]) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
    assert tree.library().read_bytes() == before


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        pytest.param(
            *("build.toml", '"src/scale.h", "src/twice.cpp"]\n\n', '"src/twice.cpp"]\n\n'),
            ["scale.h: No such file", "src/twice.cpp of [kernel.cpu]", "cd "],
            id="unlisted header",
        ),
        pytest.param(
            *("src/plain.cpp", "return 3;", "return undeclared;"),
            ["'undeclared' was not declared", "src/plain.cpp of [kernel.cpu]", "to run the compiler again: cd "],
            id="compile error",
        ),
        pytest.param(
            *("src/plain.cpp", "int plain() {", "int missing();\nint plain() { if (missing()) return 4;"),
            ["fails its checks and was not written", "missing() is undefined and not in torch's stable ABI"],
            id="failed check",
        ),
        pytest.param(
            *("build.toml", '"src/plain.cpp", "src/scale.h", ', '"src/plain.cpp", "src/gone.cpp", "src/scale.h", '),
            ["[kernel.cpu] src lists src/gone.cpp, but there is no such file: create it or take it off the list"],
            id="missing file",
        ),
    ],
)
def test_a_failure_names_its_cause_and_keeps_the_old_variant(tree, build, name, old, new, expected):
    before = tree.content()
    tree.edit(name, old, new)
    run = build(tree, "--variants", "cpu")
    assert run.code == 1
    for text in expected:
        assert text in run.err
    assert tree.content() == before
    assert [path.name for path in (tree.root / "build").iterdir()] == [tree.variant().name]


def test_interrupt_kills_the_compilers_and_keeps_the_old_variant(tree, tmp_path):
    before = tree.content()
    started = tmp_path / "started"
    slow = tmp_path / "slow-g++"
    slow.write_text(
        f'#!/bin/sh\nfor last do\n  [ "$last" = -c ] && echo $$ > {started} && sleep 60\ndone\nexec g++ "$@"\n'
    )
    slow.chmod(0o755)
    tree.edit("src/plain.cpp", "return 3;", "return 1 + 2;")
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.build", "--root", str(tree.root), "--variants", "cpu"],
        cwd=PROJECT,
        env=os.environ | {"CXX": str(slow)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    _wait_for(lambda: started.exists() and started.read_text().strip())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in err
    compiler = int(started.read_text())
    _wait_for(lambda: not Path(f"/proc/{compiler}").exists())
    assert tree.content() == before


def test_interrupt_between_the_two_renames_restores_the_old_variant(tree, monkeypatch):
    before = tree.content()
    build = tree.root / "build"
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if "new" in (path.name for path in self.glob("*")) and target.parent == build:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with variant.unfinished(build, tree.variant().name) as directory:
        (directory / "new").touch()
        with pytest.raises(KeyboardInterrupt):
            variant.hand_over(directory, build)
    assert tree.content() == before


def test_leftovers_of_a_killed_build_go_away(tree):
    build = tree.root / "build"
    (build / ".unfinished-x/torch").mkdir(parents=True)
    with variant.unfinished(build, "torch-new"):
        pass
    assert [path.name for path in build.iterdir()] == [tree.variant().name]


def test_unknown_variant_names_what_can_be_built(tree, build):
    run = build(tree, "--variants", "torch-stable-abi210-cu126-riscv-linux,cpu")
    assert run.code == 1
    assert "cpu" in run.err


def test_cuda_variant(tree, build, cuda, tmp_path):
    run = build(tree, "--variants", "cuda")
    assert run.code == 0, run.err
    directory = tree.variant("cu")
    assert directory.name.startswith(f"torch-stable-abi210-{cuda.compute}-")
    metadata = json.loads((directory / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert check_main([str(directory), str(tree.variant())]) == 0

    other = elsewhere(tree, tmp_path)
    assert build(other, "--variants", directory.name).code == 0
    assert [path.read_bytes() for path in other.variant("cu").glob("*.so")] == [
        path.read_bytes() for path in directory.glob("*.so")
    ]

    metadata["backend"]["archs"] = ["9.0", "9.0a"]
    (directory / "metadata.json").write_text(json.dumps(metadata))
    assert [problem.partition(": ")[2] for problem in check_variant(directory)] == [
        "metadata.json declares 9.0, which the fat binary lacks"
    ]


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.05)


class _Rebuilt(Exception):
    """The builder went past the point where an unchanged variant stops it."""


def _give_up(*_) -> None:
    raise _Rebuilt
