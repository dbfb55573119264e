"""Loading over HTTP with the ecosystem's own clients: kernels' API and command line, huggingface_hub's `hf`."""

import json
import re
import subprocess
import sys
import textwrap

import package
import pytest
from loopback import Hub
from users import CPU, NOARCH, REPO, bump, change_python, variants_of

COLD_SECONDS = 2.0
WARM_SECONDS = 0.5

LOAD = """
    import time

    import torch
    from kernels import get_kernel

    start = time.perf_counter()
    kernel = get_kernel("org/geglu", {how})
    seconds = time.perf_counter() - start
    x = torch.ones(3, 8)
    assert kernel.geglu(x, x).sum().item() > 20
    print(kernel.__name__, seconds)
"""


def resolved(hub: Hub) -> set[str]:
    """The variants that files were downloaded of."""
    found = (re.search(r"GET /kernels/.*/build/([^/]+)/", request) for request in hub.requests)
    return {match[1] for match in found if match}


def loaded(child) -> tuple[str, float]:
    name, seconds = child.stdout.split()[-2:]
    return name, float(seconds)


# ---- a first and a second load ----


def test_cold_and_warm(hub, python, tmp_path):
    """Cold: one variant and nothing else. Warm: no file at all."""
    runs = []
    for attempt in range(2):  # the better of two: other tests run beside this one
        hub.requests.clear()
        home = tmp_path / f"cold{attempt}"
        cold = loaded(python(hub, LOAD.format(how="version=1"), home))
        assert resolved(hub) == {CPU}
        assert not any("README" in request or "benchmarks" in request for request in hub.requests)
        hub.requests.clear()
        warm = loaded(python(hub, LOAD.format(how="version=1"), home))
        assert not resolved(hub) and warm[0] == cold[0]
        runs.append((cold[1], warm[1]))
    assert min(cold for cold, _ in runs) <= COLD_SECONDS
    assert min(warm for _, warm in runs) <= WARM_SECONDS


def test_by_revision(shared_hub, python):
    for revision in ("v1", shared_hub.refs(REPO)["v1"]):
        loaded(python(shared_hub, LOAD.format(how=f"revision={revision!r}")))


def test_sixteen_cold_processes_at_once(hub, python, tmp_path):
    """One cache with nothing in it, and all start together: forked after the imports, which take most of the time."""
    program = """
        import os
        import sys

        import torch
        from kernels import get_kernel

        ready, go = os.pipe(), os.pipe()
        children = []
        for _ in range(16):
            child = os.fork()
            if child == 0:
                os.close(go[1])
                os.write(ready[1], b"r")
                os.read(go[0], 1)  # until the parent has closed its end
                kernel = get_kernel("org/geglu", version=1)
                x = torch.ones(3, 8)
                assert kernel.geglu(x, x).sum().item() > 20
                os.write(1, f"{kernel.__name__}\\n".encode())
                os._exit(0)
            children.append(child)
        for _ in children:
            os.read(ready[0], 1)
        os.close(go[1])
        sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
    """
    hub.requests.clear()
    home = tmp_path / "home"
    names = python(hub, program, home, OMP_NUM_THREADS="1").stdout.split()
    assert len(names) == 16 and len(set(names)) == 1
    assert resolved(hub) == {CPU}
    assert not [*home.rglob("*.incomplete")]


# ---- trust ----


def test_an_untrusted_publisher_is_refused_until_the_user_says_so(hub, python):
    hub.trusted.clear()
    refused = python(hub, LOAD.format(how="version=1"), code=1)
    assert "trusted" in refused.stderr and not resolved(hub)
    loaded(python(hub, LOAD.format(how="version=1, trust_remote_code=True")))


def test_no_example_sets_the_flag_for_the_user():
    """README and the card may name it in a sentence or a comment; code that is copied must not contain it."""
    texts = [path.read_text() for path in (package.ROOT / "README.md", package.ROOT / "CARD.md")]
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    blocks += [path.read_text() for path in (package.ROOT / "examples").rglob("*.py")]
    code = [line for block in blocks for line in block.splitlines() if not line.lstrip().startswith("#")]
    assert code and not any("trust_remote_code=True" in line for line in code)


# ---- layers ----


def test_kernelize_a_gemma(shared_hub, python):
    program = """
        import torch
        from kernels import LayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
        from kernels.layer import KernelizeFallback
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

        config = Gemma3TextConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config).eval()
        tokens = torch.arange(12).view(1, 12)
        with torch.no_grad():
            expected = model(tokens).logits
            replace_kernel_forward_from_hub(Gemma3MLP, "GeGLUMLP")
            layer = LayerRepository("org/geglu", layer_name="GeGLUMLP", version=1)
            fallback = KernelizeFallback.NO_LAYER | KernelizeFallback.NO_DEVICE
            with use_kernel_mapping({"GeGLUMLP": {"cpu": layer}}, inherit_mapping=False):
                model = kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=fallback)
            assert torch.allclose(model(tokens).logits, expected, atol=1e-5)
        homes = {block.mlp.forward.__func__.__module__ for block in model.model.layers}
        assert len(homes) == 1 and homes.pop().startswith("_geglu_cpu_"), homes
        print("kernelized")
    """
    assert "kernelized" in python(shared_hub, program).stdout


# ---- the command line: versions, info, lock, download ----


@pytest.fixture
def locked(hub, command, tmp_path):
    """A project with a kernels.lock on version 1, and the home of its caches."""
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "user"\nversion = "1"\n[tool.kernels.dependencies]\n"org/geglu" = 1\n'
    )
    command(hub, "kernels", "lock", folder, home=tmp_path / "user-home")
    return folder


def test_versions_and_info(shared_hub, command, tmp_path):
    listed = command(shared_hub, "kernels", "versions", REPO, home=tmp_path / "home").stdout
    assert listed.startswith("Version 1:") and all(variant in listed for variant in (CPU, *NOARCH))
    shown = command(shared_hub, "kernels", "info", REPO, "--version", "1", "--json", home=tmp_path / "home").stdout
    info = json.loads(shown)
    assert (info["name"], info["version"], info["license"]) == ("geglu", 1, "apache-2.0")
    assert info["backends"] == ["cpu", "cuda", "rocm", "xpu"]


def test_lock_and_download(hub, command, locked, tmp_path):
    lock = json.loads((locked / "kernels.lock").read_text())
    assert lock[0]["lock"]["commit"] == hub.refs(REPO)["v1"]
    hub.requests.clear()
    command(hub, "kernels", "download", locked, home=tmp_path / "user-home")
    assert resolved(hub) == {CPU}


LOCKED = """
    from pathlib import Path

    import torch
    from kernels import {loader}

    kernel = {loader}("org/geglu", lockfile=Path({lockfile!r}))
    print(kernel.__name__, 0)
"""


def test_a_newer_commit_is_picked_up_and_the_lock_keeps_the_old(project, hub, command, python, locked, tmp_path):
    """For the loader that never downloads, the whole commit: as `hf` takes it, `kernels download` leaves files out."""
    home, lock = tmp_path / "user-home", locked / "kernels.lock"
    commit = json.loads(lock.read_text())[0]["lock"]["commit"]
    command(hub, "hf", "download", REPO, "--repo-type", "kernel", "--revision", commit, home=home)
    old, _ = loaded(python(hub, LOAD.format(how="version=1"), home))
    change_python(project)
    project.publish(hub, "--yes")
    new, _ = loaded(python(hub, LOAD.format(how="version=1"), home))
    assert new != old
    for loader, place in (("load_kernel", home), ("get_locked_kernel", tmp_path / "empty")):
        kept, _ = loaded(python(hub, LOCKED.format(loader=loader, lockfile=str(lock)), place))
        assert kept == old


def test_a_lock_for_another_repository(hub, python, locked, tmp_path):
    program = LOCKED.format(loader="get_locked_kernel", lockfile=str(locked / "kernels.lock"))
    child = python(hub, program.replace('"org/geglu"', '"org/other"'), tmp_path / "user-home", code=1)
    assert child.stderr.splitlines()[-1].startswith("ValueError: Kernel `org/other` is not locked")


# ---- two versions ----


def test_two_versions_in_one_process(project, hub, python):
    bump(project, 2)
    project.publish(hub, "--yes")
    program = """
        import torch
        from kernels import get_kernel

        one, two = (get_kernel("org/geglu", version=version) for version in (1, 2))
        assert one.__name__ != two.__name__ and one._ops.ops.name != two._ops.ops.name
        x = torch.randn(3, 8)
        assert torch.equal(one.geglu(x, x), two.geglu(x, x))
        print("both")
    """
    assert "both" in python(hub, program).stdout


def test_a_missing_version(shared_hub, python):
    child = python(shared_hub, LOAD.format(how="version=7"), code=1)
    assert "7" in child.stderr.splitlines()[-1] and "not found" in child.stderr.splitlines()[-1]


# ---- accidents ----


@pytest.mark.parametrize("fault", ("cut_short", "dead"))
def test_a_download_that_breaks_off_leaves_nothing_to_load(hub, python, tmp_path, fault):
    """A server that dies half-way through the library: an error, and the next attempt starts over and works."""
    home = tmp_path / "home"
    setattr(hub.faults, fault, rf"{CPU}/.*\.so$")
    failed = python(hub, LOAD.format(how="version=1"), home, code=1)
    assert "_geglu_cpu_" not in failed.stdout
    setattr(hub.faults, fault, "")
    loaded(python(hub, LOAD.format(how="version=1"), home))


def verified_snapshot(hub: Hub, command, home) -> subprocess.CompletedProcess:
    """The verifier on what `hf download` left in the cache."""
    command(hub, "hf", "download", REPO, "--repo-type", "kernel", "--revision", "v1", home=home)
    (snapshot,) = home.glob("hub/kernels--org--geglu/snapshots/*")
    verifier = [sys.executable, "-m", "tools.build.check", str(snapshot)]
    return subprocess.run(verifier, cwd=package.ROOT, capture_output=True, text=True)


def test_the_verifier_on_a_good_snapshot(shared_hub, command, tmp_path):
    child = verified_snapshot(shared_hub, command, tmp_path / "home")
    assert child.returncode == 0, child.stdout
    lines = child.stdout.splitlines()
    assert len(lines) == len(variants_of(shared_hub.files(REPO, "v1")))
    assert all(
        re.search(r": ok, _geglu_\w+, built by geglu-tools-build 1 from commit \w{12}$", line) for line in lines
    )


@pytest.mark.parametrize("name", (r"_ops\.py", r"_geglu_cpu_\w+\.abi3\.so"))
def test_a_damaged_download_is_found_by_the_verifier(hub, command, tmp_path, name):
    """The loader itself compares no digest. What variants have in common is in the cache only once: not for this."""
    hub.faults.damaged = rf"{CPU}/{name}$"
    child = verified_snapshot(hub, command, tmp_path / "home")
    assert child.returncode == 1
    problems = [line for line in child.stdout.splitlines() if ": ok, " not in line]
    assert problems and all(CPU in line for line in problems)
    assert "digest: " in problems[0] and re.search(name, problems[0])


# ---- without a network ----

OFFLINE = """
    import socket

    def refuse(*arguments, **options):
        raise AssertionError(f"network access: {arguments}")

    socket.socket.connect = socket.socket.connect_ex = refuse
    socket.create_connection = socket.getaddrinfo = refuse
"""


@pytest.fixture
def downloaded(shared_hub, command, tmp_path):
    """A home into which the whole branch was downloaded, as README has it for an image's build."""
    home = tmp_path / "image"
    command(shared_hub, "hf", "download", REPO, "--repo-type", "kernel", "--revision", "v1", home=home)
    return home


def offline(shared_hub, python, how: str, home, **changes):
    program = "\n".join(textwrap.dedent(part) for part in (OFFLINE, LOAD.format(how=how)))
    return loaded(python(shared_hub, program, home, HF_ENDPOINT="http://127.0.0.1:9", **changes))


def test_offline_after_a_download_of_the_branch(shared_hub, python, downloaded):
    for how in ("version=1", 'revision="v1"', f"revision={shared_hub.refs(REPO)['v1']!r}"):
        offline(shared_hub, python, how, downloaded, HF_HUB_OFFLINE="1")


def test_offline_with_a_local_copy(shared_hub, python, pristine_project, tmp_path):
    offline(shared_hub, python, "version=1", tmp_path / "nothing", LOCAL_KERNELS=f"org/geglu={pristine_project.root}")
    program = f"""
        from pathlib import Path

        import torch
        from kernels import get_local_kernel

        kernel = get_local_kernel(Path({str(pristine_project.root)!r}))
        print(kernel.__name__, 0)
    """
    program = "\n".join(textwrap.dedent(part) for part in (OFFLINE, program))
    loaded(python(shared_hub, program, tmp_path / "nothing", HF_ENDPOINT="http://127.0.0.1:9"))


def test_offline_without_a_download_is_one_clear_error(shared_hub, python, tmp_path):
    program = "\n".join(textwrap.dedent(part) for part in (OFFLINE, LOAD.format(how="version=1")))
    child = python(shared_hub, program, tmp_path / "nothing", code=1, HF_HUB_OFFLINE="1")
    assert "cache" in child.stderr.splitlines()[-1].lower() or "offline" in child.stderr.splitlines()[-1].lower()
