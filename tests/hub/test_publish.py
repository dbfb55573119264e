"""Publishing: what is written and deleted, what stays, and everything that is refused before anything changes."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import package
import pytest
from loopback import TOKEN
from users import CPU, HUBS_OWN, NOARCH, REPO, bump, change_python, child_environment, rebuild, variants_of

from tools.publish import source
from tools.publish.errors import PublishError

# ---- what is published ----


def test_version_1(shared_hub, pristine_project):
    build, main = shared_hub.files(REPO, "v1"), shared_hub.files(REPO, "main")
    assert set(shared_hub.refs(REPO)) == {"main", "v1"}
    assert variants_of(build) == {CPU, *NOARCH}
    names = ("benchmark", "benchmark_linear", "benchmark_mlp")
    assert set(main) == {"README.md", *(f"benchmarks/{name}.py" for name in names), *HUBS_OWN}
    files = {name: sha for name, sha in build.items() if name not in HUBS_OWN}
    assert all(name.startswith("build/") for name in files)
    for name, sha in files.items():
        assert shared_hub.content(sha) == (pristine_project.root / name).read_bytes()


def test_everything_that_is_built_here_fits(project, empty_hub):
    """12 MB for all variants of the version, by the plan; the CUDA one joins where there is a build of it."""
    (head,) = {json.loads(path.read_text())["provenance"]["kernel"]["commit"] for path in metadata_of(project)}
    for folder in (package.ROOT / "build").glob("torch-stable-abi*-cu*"):
        copied = shutil.copytree(folder, project.root / "build" / folder.name)
        metadata = json.loads((copied / "metadata.json").read_text())
        metadata["provenance"]["kernel"] = {"commit": head, "dirty": False}
        (copied / "metadata.json").write_text(json.dumps(metadata))
    printed = project.publish(empty_hub).stdout
    together = re.search(r"together (\d+\.\d+) MB", printed)
    assert printed.count("all checks passed") == len(metadata_of(project))
    assert float(together[1]) <= 12


def metadata_of(project) -> list[Path]:
    return sorted((project.root / "build").glob("*/metadata.json"))


def test_more_than_fits_is_refused(pristine_project, monkeypatch):
    monkeypatch.setattr(source, "_SIZE_LIMIT", 1_000)
    with pytest.raises(PublishError, match=r"the variants take \d\.\d MB together, more than 0 MB"):
        source.collect(pristine_project.root, REPO)


def test_the_card_tells_the_truth(shared_hub, pristine_project):
    card = shared_hub.content(shared_hub.files(REPO, "main")["README.md"]).decode()
    assert "{{" not in card and "{%" not in card
    packed = "`geglu_packed(x, *, approximate='tanh', gate_first=True)`"
    for expected in (f'get_kernel("{REPO}", version=1', packed, "`GeGLUMLP`", CPU, "`torch-rocm`"):
        assert expected in card, expected
    assert "`layers`" not in card and "apache-2.0" in card
    row = next(line for line in (package.ROOT / "README.md").read_text().splitlines() if "| 8192 x 14336 |" in line)
    assert row in card and "](docs/" not in card


def test_variants_say_who_built_them(shared_hub):
    files = shared_hub.files(REPO, "v1")
    for name in (name for name in files if name.endswith("/metadata.json")):
        provenance = json.loads(shared_hub.content(files[name]))["provenance"]
        assert provenance["kernel-builder"]["version"].startswith("geglu-tools-build")
        assert provenance["kernel"]["dirty"] is False


def test_a_dry_run_changes_nothing(project, empty_hub):
    printed = project.publish(empty_hub).stdout
    assert "dry run" in printed and "version 1 is the first" in printed
    assert f"build/{CPU}/__init__.py" in printed
    assert not any(request.startswith("POST") for request in empty_hub.requests)


def test_nothing_is_uploaded_when_nothing_changed(project, hub):
    before = hub.snapshot(REPO)
    assert "nothing to publish" in project.publish(hub, "--yes").stdout
    assert hub.snapshot(REPO) == before
    assert not any(request.startswith("POST") for request in hub.requests)


def test_a_commit_that_changes_no_variant_leaves_the_version_alone(project, hub):
    """The metadata of every variant names the new commit, but nobody has to download anything for that."""
    before = hub.refs(REPO)
    project.edit("CARD.md", "## How to use", "## How it is used")
    rebuild(project)
    assert "branch v1" in (printed := project.publish(hub, "--yes").stdout) and "v1: up to date" in printed
    after = hub.refs(REPO)
    assert after["v1"] == before["v1"] and after["main"] != before["main"]


def test_one_commit_a_branch_and_only_what_differs(project, hub):
    project.edit("CARD.md", "## How to use", "## How it is used")
    change_python(project)
    before, files = hub.refs(REPO), hub.files(REPO, "v1")
    project.publish(hub, "--yes")
    after = hub.refs(REPO)
    assert [request for request in hub.requests if "/commit/" in request] == [
        f"POST /api/kernels/{REPO}/commit/v1",
        f"POST /api/kernels/{REPO}/commit/main",
    ]
    assert set(after) == set(before) and all(after[name] != before[name] for name in after)
    changed = {Path(name).name for name, sha in hub.files(REPO, "v1").items() if files.get(name) != sha}
    (library,) = (project.root / "build" / CPU).glob("*.so")
    assert changed == {"formula.py", "_ops.py", "metadata.json", library.name}


def test_what_others_keep_on_main_stays(project, hub):
    files = {"LICENSE": hub.keep(b"license"), "benchmarks/benchmark_old.py": hub.keep(b"old")}
    hub.commit(REPO, "main", files, [], "by hand", None)
    project.publish(hub, "--yes")
    main = hub.files(REPO, "main")
    assert "LICENSE" in main and "benchmarks/benchmark_old.py" not in main


def test_stale_variants_are_removed(project, hub):
    shutil.rmtree(project.root / "build" / "torch-xpu")
    printed = project.publish(hub).stdout
    assert "- build/torch-xpu/__init__.py" in printed and "torch-xpu is not in build/: v1 loses it" in printed
    project.publish(hub, "--yes")
    assert variants_of(hub.files(REPO, "v1")) == {CPU, *NOARCH} - {"torch-xpu"}


def test_version_2_leaves_version_1_alone(project, hub):
    before = hub.files(REPO, "v1")
    bump(project, 2)
    assert "version 2 is new" in project.publish(hub, "--yes").stdout
    assert hub.files(REPO, "v1") == before
    assert variants_of(hub.files(REPO, "v2")) == {CPU, *NOARCH}
    assert all(name.startswith("build/") for name in set(hub.files(REPO, "v2")) - HUBS_OWN)
    assert set(hub.refs(REPO)) == {"main", "v1", "v2"}


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
    rebuild(project)
    refused(project, hub, r"refuses the token for org/geglu \(401\)", token="hf_wrong")


def test_no_network(project, hub):
    refused(project, hub, "cannot be reached", HF_ENDPOINT="http://127.0.0.1:9")


def test_a_storage_that_does_not_answer(project, hub):
    """Libraries go to the Hub's own storage, Xet, which this one has not."""
    change_python(project)
    refused(project, hub, "cannot be reached .*xet-write-token", HF_HUB_DISABLE_XET="0")


def test_a_repository_of_another_type(project, hub):
    hub.create("org/model", kind="model")
    child = project.publish(hub, "--yes", "--repo-id", "org/model", code=1)
    assert "must be one of type kernel" in child.stderr and child.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ("geglu", "org/geglu/more", "org/ge glu"))
def test_a_name_that_is_none(project, hub, name):
    refused(project, hub, f"'{name}' is no name of a (kernel )?repository", "--repo-id", name)


def test_a_card_that_cannot_be_filled(project, hub):
    project.edit("CARD.md", "# {{ repo_id }}", "# {{ no_such_fact }}")
    rebuild(project)
    refused(project, hub, "CARD.md cannot be filled: 'no_such_fact' is undefined")
    (project.root / "CARD.md").unlink()
    rebuild(project)
    refused(project, hub, "CARD.md cannot be filled: .*No such file")


def test_a_published_version_that_cannot_be_read(project, hub):
    """Without what a version promises nobody can say that it is kept."""
    path = "build/torch-cpu/__init__.py"
    adds = {name: hub.keep(b"def") for name in hub.files(REPO, "v1") if name.endswith("/__init__.py")}
    assert path in adds
    hub.commit(REPO, "v1", adds, [], "by hand", None)
    refused(project, hub, f"what v1 of {REPO} promises cannot be read from its torch-cpu .*next version")


def test_a_dirty_tree(project, hub):
    project.edit("CARD.md", "## How to use", "## Use")
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
    rebuild(project)
    refused(project, hub, rf"{message}.*set version = 2")


def test_an_addition_needs_none(project, hub):
    project.edit(
        "torch-ext/geglu/functional.py",
        'gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh"',
        'gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh", more: bool = False',
    )
    rebuild(project)
    assert "its API is kept" in project.publish(hub, "--yes").stdout


# ---- accidents: nothing half-written is ever there, and the next run goes on ----


def test_a_server_that_dies_during_the_upload(project, empty_hub):
    """Half-way through a library: the version is not there. What did arrive is not sent again."""
    empty_hub.create(REPO)
    before = empty_hub.files(REPO, "main")
    assert unreachable(project, empty_hub, "PUT /objects/")
    assert "v1" not in empty_hub.refs(REPO) and empty_hub.files(REPO, "main") == before
    empty_hub.requests.clear()
    assert unreachable(project, empty_hub, "/commit/") and uploads(empty_hub) == 1
    assert "v1" not in empty_hub.refs(REPO) and empty_hub.files(REPO, "main") == before
    empty_hub.faults.dead = ""
    empty_hub.requests.clear()
    project.publish(empty_hub, "--yes")
    assert uploads(empty_hub) == 0
    assert variants_of(empty_hub.files(REPO, "v1")) == {CPU, *NOARCH}
    assert "README.md" in empty_hub.files(REPO, "main") and set(empty_hub.refs(REPO)) == {"main", "v1"}


def test_a_server_that_dies_before_the_version_has_its_name(project, empty_hub):
    empty_hub.create(REPO)
    assert unreachable(project, empty_hub, "/branch/v1")
    assert "v1" not in empty_hub.refs(REPO)
    empty_hub.faults.dead = ""
    project.publish(empty_hub, "--yes")
    assert variants_of(empty_hub.files(REPO, "v1")) == {CPU, *NOARCH} and set(empty_hub.refs(REPO)) == {"main", "v1"}


def test_a_server_that_dies_between_the_branches(project, empty_hub):
    """The build first: a card never describes what is not there."""
    empty_hub.create(REPO)
    before = empty_hub.files(REPO, "main")
    assert unreachable(project, empty_hub, "/commit/main")
    assert variants_of(empty_hub.files(REPO, "v1")) == {CPU, *NOARCH} and empty_hub.files(REPO, "main") == before
    empty_hub.faults.dead = ""
    empty_hub.requests.clear()
    assert "v1: up to date" in project.publish(empty_hub, "--yes").stdout
    assert not uploads(empty_hub) and "README.md" in empty_hub.files(REPO, "main")


def unreachable(project, hub, dead: str) -> bool:
    """Publishes to a server that dies at requests of this kind: one line that says so."""
    hub.faults.dead = dead
    lines = project.publish(hub, "--yes", code=1).stderr.splitlines()
    # Before the last line, huggingface_hub's own notes on its retries.
    return lines[-1].startswith("error: the Hub cannot be reached") and not any("Traceback" in line for line in lines)


def uploads(hub) -> int:
    return sum(request.startswith("PUT /objects/") for request in hub.requests)


@pytest.mark.parametrize("published", (True, False), ids=("a_newer_commit", "a_new_version"))
def test_somebody_else_published_meanwhile(project, hub, empty_hub, monkeypatch, published):
    """The commit goes on top of the head that the plan was made for, or not at all."""
    if published:
        change_python(project)
    else:
        hub = empty_hub
        hub.create(REPO)
    main, original = hub.refs(REPO)["main"], hub.commit

    def commit(repo, branch, *arguments):
        monkeypatch.setattr(hub, "commit", original)
        if not published:
            hub.branch(repo, "v1")
        hub.commit(repo, "v1", {"build/other": hub.keep(b"other")}, [], "other", None)
        return original(repo, branch, *arguments)

    monkeypatch.setattr(hub, "commit", commit)
    child = project.publish(hub, "--yes", code=1)
    assert "changed by somebody else" in child.stderr and child.stderr.count("\n") == 1
    assert "build/other" in hub.files(REPO, "v1") and hub.refs(REPO)["main"] == main


@pytest.mark.parametrize(("number", "code"), ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)))
def test_stopped_during_the_upload(project, empty_hub, monkeypatch, number, code):
    """Stopped by a signal while the server has its commit in hand."""
    empty_hub.create(REPO)
    original = empty_hub.commit

    def commit(*arguments):
        monkeypatch.setattr(empty_hub, "commit", original)
        os.kill(child.pid, number)
        child.wait()
        return original(*arguments)

    monkeypatch.setattr(empty_hub, "commit", commit)
    environment = child_environment(empty_hub, project.root.parent, PYTHONPATH=str(project.root), HF_TOKEN=TOKEN)
    child = subprocess.Popen(
        [sys.executable, "-m", "tools.publish", "--yes"],
        cwd=project.root,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Children of a job in a shell's background ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    said = child.communicate(timeout=60)[1]
    assert child.returncode == code
    assert said.count("\n") <= 1 and (number == signal.SIGKILL or said.startswith("interrupted: "))
    assert "v1" not in empty_hub.refs(REPO)
    project.publish(empty_hub, "--yes")
    assert_whole(empty_hub)


def assert_whole(hub) -> None:
    """Every published file has the digest that its variant's metadata gives it."""
    files = {name: sha for name, sha in hub.files(REPO, "v1").items() if name not in HUBS_OWN}
    assert variants_of(files) == {CPU, *NOARCH}
    for name, sha in files.items():
        folder, _, inner = name.removeprefix("build/").partition("/")
        digest = json.loads(hub.content(files[f"build/{folder}/metadata.json"]))["digest"]["files"]
        if inner != "metadata.json":
            assert digest[inner] == base64.b64encode(bytes.fromhex(sha)).decode()
