"""build.toml, validated by the `kernels` package's own parser and reduced to what this builder needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kernels._rust import Build, KernelName

from .errors import BuildError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where `kernels` depends on tomli
    import tomli as tomllib

BACKENDS = ("cpu", "cuda")
UNIT_SUFFIXES = (".cpp", ".cc", ".cxx", ".cu")

# What this builder acts on. build.toml may say more than that, and kernel-builder would act on it: refusing the rest
# keeps a local build from quietly differing from a published one.
_KNOWN_KEYS = {
    "general": {"name", "version", "edition", "license", "backends", "hub", "upstream", "source"},
    "torch": {"src", "include", "cxx-flags", "pyext", "stable-abi"},
    "kernel": {"backend", "depends", "src", "include", "cxx-flags", "cuda-flags", "cuda-capabilities"},
}


@dataclass(frozen=True)
class Component:
    """One [kernel.*] section, or [torch] itself: the files of one set of flags.

    `files` are all listed paths, headers included; `units` those that are compiled.
    """

    section: str
    files: tuple[str, ...]
    include: tuple[str, ...] = ()
    cxx_flags: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = ()
    cuda_capabilities: tuple[str, ...] = ()

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(file for file in self.files if file.endswith(UNIT_SUFFIXES))

    @property
    def has_cuda_units(self) -> bool:
        return any(unit.endswith(".cu") for unit in self.units)


@dataclass(frozen=True)
class Package:
    """A kernel package: the root that holds build.toml, what build.toml says, and a hash of its text."""

    root: Path
    toml_hash: str
    name: str
    python_name: str
    version: int
    license: str
    upstream: str | None
    source: str | None
    repo_id: str | None
    backends: tuple[str, ...]
    stable_abi: dict[str, tuple[int, int]]
    binding: Component
    kernels: dict[str, tuple[Component, ...]]
    data_suffixes: tuple[str, ...]

    def components(self, backend: str) -> tuple[Component, ...]:
        """The components of a backend's variant, the binding first."""
        return (self.binding, *self.kernels[backend])

    @property
    def python_folder(self) -> str:
        """The Python package, relative to the root."""
        return f"torch-ext/{self.python_name}"

    @property
    def python_root(self) -> Path:
        return self.root / self.python_folder


def load(root: Path) -> Package:
    """Reads and validates root/build.toml and the presence of every file it lists.

    Raises BuildError for anything that this builder cannot build.
    """
    path = root / "build.toml"
    if not path.is_file():
        raise BuildError(f"no build.toml in {root}: run the builder in the kernel's root or name it with --root")
    try:
        Build.open(root)
    except (ValueError, OSError) as error:
        raise BuildError(f"{path} is not a valid build.toml: {error}") from error
    text = path.read_text()
    toml = tomllib.loads(text)

    general, torch = toml["general"], toml.get("torch")
    if torch is None:
        raise BuildError(f"{path} has no [torch] section: this builder compiles torch extensions only")
    _refuse_unknown_keys("general", general, "general")
    _refuse_unknown_keys("torch", torch, "torch")
    backends = tuple(backend for backend in general["backends"] if backend in BACKENDS)
    if not backends:
        raise BuildError(f"{path} lists the backends {general['backends']}: this builder knows {', '.join(BACKENDS)}")

    kernels: dict[str, list[Component]] = {backend: [] for backend in backends}
    for name, section in toml.get("kernel", {}).items():
        if section["backend"] in kernels:
            kernels[section["backend"]].append(_kernel_component(f"kernel.{name}", section))
    package = Package(
        root=root,
        toml_hash=hashlib.sha256(text.encode()).hexdigest(),
        name=general["name"],
        python_name=KernelName(general["name"]).python_name,
        version=general["version"],
        license=general["license"],
        upstream=general.get("upstream"),
        source=general.get("source"),
        repo_id=general.get("hub", {}).get("repo-id"),
        backends=backends,
        stable_abi={backend: _stable_abi(torch, backend) for backend in backends},
        binding=_component("torch", torch),
        kernels={backend: tuple(components) for backend, components in kernels.items()},
        data_suffixes=tuple(f".{extension}" for extension in torch.get("pyext", ()) if extension not in ("py", "pyi")),
    )
    _require_files(package)
    return package


def _refuse_unknown_keys(kind: str, section: dict[str, Any], name: str) -> None:
    unknown = sorted(set(section) - _KNOWN_KEYS[kind])
    if unknown:
        raise BuildError(
            f"build.toml: [{name}] {', '.join(unknown)}: unknown to the local builder, use kernel-builder"
        )


def _component(section: str, values: dict[str, Any]) -> Component:
    return Component(
        section=section,
        files=tuple(values["src"]),
        include=tuple(values.get("include", ())),
        cxx_flags=tuple(values.get("cxx-flags", ())),
        cuda_flags=tuple(values.get("cuda-flags", ())),
        cuda_capabilities=tuple(values.get("cuda-capabilities", ())),
    )


def _kernel_component(section: str, values: dict[str, Any]) -> Component:
    _refuse_unknown_keys("kernel", values, section)
    if values["depends"] != ["torch"]:
        raise BuildError(
            f'build.toml: [{section}] depends = {values["depends"]}: the local builder provides ["torch"]'
        )
    component = _component(section, values)
    if component.has_cuda_units and not component.cuda_capabilities:
        raise BuildError(f"build.toml: [{section}] has .cu files but no cuda-capabilities: list the architectures")
    return component


def _stable_abi(torch: dict[str, Any], backend: str) -> tuple[int, int]:
    declared = torch.get("stable-abi", {})
    version = declared.get(backend) if isinstance(declared, dict) else declared
    if version is None:
        raise BuildError(
            f"build.toml: [torch.stable-abi] has no {backend}: this builder makes stable-ABI variants only"
        )
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor


def _require_files(package: Package) -> None:
    problems = []
    for component in (package.binding, *(c for components in package.kernels.values() for c in components)):
        for file in component.files:
            where = f"build.toml: [{component.section}] src lists {file}"
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                problems.append(f"{where}, which is outside of the package: move the file below {package.root}")
            elif not (package.root / file).is_file():
                problems.append(f"{where}, but there is no such file: create it or take it off the list")
    if not (package.python_root / "__init__.py").is_file():
        problems.append(f"{package.python_folder}/__init__.py is missing: the Python package starts there")
    if problems:
        raise BuildError("\n".join(problems))
