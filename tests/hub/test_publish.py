"""Publishing: what is written and deleted, what stays, and everything that is refused before anything changes."""

import base64
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from loopback import TOKEN, serve
from users import REPO, child_environment

CPU = "torch-stable-abi210-cpu-x86_64-linux"
NOARCH = ("torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu")


def variants_of(files) -> set[str]:
    return {name.split("/")[1] for name in files if name.startswith("build/")}


# ---- what is published ----


def test_version_1(shared_hub, pristine_project):
    build, main = shared_hub.files(REPO, "v1"), shared_hub.files(REPO, "main")
    assert variants_of(build) == {CPU, *NOARCH} and all(name.startswith("build/") for name in build)
    assert set(main) == {"README.md", "benchmarks/benchmark.py", "benchmarks/benchmark_linear.py"}
    for name, sha in build.items():
        assert shared_hub.content(sha) == (pristine_project.root / name).read_bytes()
    assert sum(len(shared_hub.content(sha)) for sha in build.values()) <= 12e6


def test_the_card_tells_the_truth(shared_hub, pristine_project):
    card = shared_hub.content(shared_hub.files(REPO, "main")["README.md"]).decode()
    assert "{{" not in card and "{%" not in card
    for expected in (f'get_kernel("{REPO}", version=1', "`geglu_packed`", "`GeGLUMLP`", CPU, "`torch-rocm`"):
        assert expected in card, expected
    assert "`layers`" not in card and "apache-2.0" in card


def test_variants_say_who_built_them(shared_hub):
    files = shared_hub.files(REPO, "v1")
    for name in (name for name in files if name.endswith("/metadata.json")):
        provenance = json.loads(shared_hub.content(files[name]))["provenance"]
        assert provenance["kernel-builder"]["version"].startswith("geglu-tools-build")
        assert provenance["kernel"]["dirty"] is False


def test_a_dry_run_changes_nothing(project, empty_hub):
    printed = project.publish(empty_hub).stdout
    assert "dry run" in printed and "version 1 is the first" in printed
    assert f"build/{CPU}/__init__.py" in printed and re.search(r"together \d+\.\d+ MB", printed)
    assert not any(request.startswith("POST") for request in empty_hub.requests)


def test_nothing_is_uploaded_when_nothing_changed(project, hub):
    before = hub.snapshot(REPO)
    assert "nothing to publish" in project.publish(hub, "--yes").stdout
    assert hub.snapshot(REPO) == before
    assert not any(request.startswith("POST") for request in hub.requests)


def test_one_commit_a_branch_and_only_what_differs(project, hub):
    project.edit("CARD.md", "## How to use", "## How it is used")
    project.commit()
    project.build("cpu,noarch")
    before = hub.refs(REPO)
    printed = project.publish(hub, "--yes").stdout
    after = hub.refs(REPO)
    # A new commit makes the metadata new; the library and the Python files are what they were.
    assert "5 files to write" in printed
    assert sum("commit/v1" in request for request in hub.requests) == 1
    assert sum("commit/main" in request for request in hub.requests) == 1
    assert set(after) == set(before) and all(after[name] != before[name] for name in after)


def test_stale_variants_are_removed(project, hub):
    shutil.rmtree(project.root / "build" / "torch-xpu")
    assert "- build/torch-xpu/__init__.py" in project.publish(hub).stdout
    project.publish(hub, "--yes")
    assert variants_of(hub.files(REPO, "v1")) == {CPU, *NOARCH} - {"torch-xpu"}


def test_version_2_leaves_version_1_alone(project, hub):
    before = hub.files(REPO, "v1")
    bump(project, 2)
    assert "version 2 is new" in project.publish(hub, "--yes").stdout
    assert hub.files(REPO, "v1") == before
    assert variants_of(hub.files(REPO, "v2")) == {CPU, *NOARCH}
    assert all(name.startswith("build/") for name in hub.files(REPO, "v2"))


def bump(project, version: int) -> None:
    project.edit("build.toml", "\nversion = 1\n", f"\nversion = {version}\n")
    project.commit()
    project.build("cpu,noarch")


# ---- what is refused: one line, and nothing is changed ----


def refused(project, hub, message: str, *arguments: str, **options):
    """Publishing fails with one line that matches `message`, and the Hub is as it was."""
    before = hub.snapshot(REPO)
    child = project.publish(hub, "--yes", *arguments, code=1, **options)
    assert re.search(message, child.stderr), child.stderr
    assert child.stderr.startswith("error: ") and child.stderr.count("\n") == 1, child.stderr
    assert hub.snapshot(REPO) == before


def test_no_token(project, hub):
    refused(project, hub, "no token for the Hub.*hf auth login", token=None)


def test_a_token_that_may_not_write(project, hub):
    project.edit("CARD.md", "## How to use", "## Use")
    project.commit()
    project.build("cpu,noarch")
    refused(project, hub, r"refuses the token for org/geglu \(401\)", token="hf_wrong")


def test_no_network(project, hub):
    refused(project, hub, "cannot be reached", HF_ENDPOINT="http://127.0.0.1:9")


def test_a_repository_of_another_type(project, hub):
    hub.create("org/model", kind="model")
    child = project.publish(hub, "--yes", "--repo-id", "org/model", code=1)
    assert "must be one of type kernel" in child.stderr and child.stderr.count("\n") == 1


def test_a_dirty_tree(project, hub):
    project.edit("README.md" if (project.root / "README.md").exists() else "CARD.md", "geglu", "geglu ")
    refused(project, hub, "working tree is not clean")


def test_an_untracked_file(project, hub):
    (project.root / "notes.txt").write_text("")
    refused(project, hub, r"working tree is not clean \(\?\? notes.txt\)")


def test_variants_of_another_commit(project, hub):
    project.edit("CARD.md", "## How to use", "## Use")
    project.commit()
    refused(project, hub, "was not built from commit")


def test_a_variant_that_fails_a_check(project, hub):
    path = project.root / "build" / CPU / "functional.py"
    path.write_text(path.read_text() + "\n")
    refused(project, hub, f"{CPU} fails its checks: digest")


def test_no_variants(project, hub):
    shutil.rmtree(project.root / "build")
    refused(project, hub, "holds no variant")


def test_a_version_that_goes_back(project, hub):
    for name in ("v2", "v3"):
        hub.branch(REPO, name, "v1")
    refused(project, hub, "version 1, but version 3 is published")


def test_a_version_that_skips_one(project, hub):
    bump(project, 3)
    refused(project, hub, "version 3, but the newest is 1")


BREAKING = {
    "a_function_gone": ("torch-ext/geglu/__init__.py", '    "gelu_and_mul",\n', "", "gelu_and_mul is gone"),
    "an_argument_renamed": (
        "torch-ext/geglu/functional.py",
        'gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh"',
        'gate: torch.Tensor, u: torch.Tensor, *, approximate: str = "tanh"',
        r"geglu\(gate, up",
    ),
    "a_default_changed": (
        "torch-ext/geglu/functional.py",
        'x: torch.Tensor, *, approximate: str = "tanh", gate_first: bool = True',
        'x: torch.Tensor, *, approximate: str = "tanh", gate_first: bool = False',
        "geglu_packed",
    ),
    "a_layer_gone": ("torch-ext/geglu/layers.py", "class GeluAndMul(", "class GeluMul(", "layer GeluAndMul is gone"),
    "a_dtype_gone": (
        "torch-ext/geglu/activations.py",
        "torch.bfloat16, torch.float64))",
        "torch.bfloat16))",
        "float64 is no longer supported",
    ),
}


@pytest.mark.parametrize("name", BREAKING)
def test_a_change_that_needs_a_new_version(project, hub, name):
    file, old, new, message = BREAKING[name]
    project.edit(file, old, new)
    project.commit()
    project.build("cpu,noarch")
    refused(project, hub, rf"{message}.*set version = 2")


def test_an_addition_needs_none(project, hub):
    project.edit(
        "torch-ext/geglu/functional.py",
        'gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh"',
        'gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh", more: bool = False',
    )
    project.commit()
    project.build("cpu,noarch")
    assert "its API is kept" in project.publish(hub, "--yes").stdout


# ---- accidents ----


def test_a_server_that_dies_during_the_upload(project, empty_hub):
    """Nothing half-written is ever there, and the next run goes on."""
    empty_hub.create(REPO)
    before = empty_hub.files(REPO, "main")
    empty_hub.faults.dead = "commit/v1"
    child = project.publish(empty_hub, "--yes", code=1)
    assert "cannot be reached" in child.stderr and "Traceback" not in child.stderr
    assert not variants_of(empty_hub.files(REPO, "v1")) and empty_hub.files(REPO, "main") == before
    empty_hub.faults.dead = "commit/main"
    project.publish(empty_hub, "--yes", code=1)
    assert variants_of(empty_hub.files(REPO, "v1")) == {CPU, *NOARCH} and empty_hub.files(REPO, "main") == before
    empty_hub.faults.dead = ""
    empty_hub.requests.clear()
    assert "v1: up to date" in project.publish(empty_hub, "--yes").stdout
    assert not any("commit/v1" in request for request in empty_hub.requests)
    assert "README.md" in empty_hub.files(REPO, "main")


def test_somebody_else_published_meanwhile(project, hub, monkeypatch):
    """The commit goes on top of the head that the plan was made for, or not at all."""
    project.edit("CARD.md", "## How to use", "## Use")
    project.commit()
    project.build("cpu,noarch")
    original = hub.files

    def files(repo, revision):
        # The plan has read v1 when the commit asks for what is known of its files.
        if revision == "v1" and any("preupload/v1" in request for request in hub.requests):
            monkeypatch.setattr(hub, "files", original)
            hub.commit(REPO, "v1", {"build/other": b"other"}, [], "other", None)
        return original(repo, revision)

    monkeypatch.setattr(hub, "files", files)
    child = project.publish(hub, "--yes", code=1)
    assert "changed by somebody else" in child.stderr
    assert "build/other" in hub.files(REPO, "v1")


def test_killed_during_the_upload(project, tmp_path):
    with serve(tmp_path / "slow", trusted={"org"}) as hub:
        hub.create(REPO)
        environment = child_environment(hub, tmp_path / "home", PYTHONPATH=str(project.root), HF_TOKEN=TOKEN)
        child = subprocess.Popen(
            [sys.executable, "-m", "tools.publish", "--yes"],
            cwd=project.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        while not any("preupload" in request for request in hub.requests) and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        variants = variants_of(hub.files(REPO, "v1"))
        assert variants in (set(), {CPU, *NOARCH})
        project.publish(hub, "--yes")
        assert variants_of(hub.files(REPO, "v1")) == {CPU, *NOARCH}
        for name, sha in hub.files(REPO, "v1").items():
            if name.endswith("metadata.json"):
                continue
            folder, _, inner = name.removeprefix("build/").partition("/")
            metadata = json.loads(hub.content(hub.files(REPO, "v1")[f"build/{folder}/metadata.json"]))
            assert metadata["digest"]["files"][inner] == base64.b64encode(bytes.fromhex(sha)).decode()
