"""From sources to a checked variant, in order: stage, keys, id, compile, link, fill, check, hand over."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import variant
from .check import check_variant
from .config import Package
from .cuda import Cuda
from .errors import BuildError
from .link import link, link_arguments
from .objects import Objects, digest
from .runner import Progress, Runner
from .stage import TEMPLATES, listed_files, python_files, stage
from .toolchain import Cxx, hash_files
from .units import Unit, capabilities, make_roots, make_units


@dataclass(frozen=True)
class Request:
    """What to build, with what and where to. `build` is the directory of variants, `cache` that of objects."""

    package: Package
    backend: str
    cxx: Cxx
    cuda: Cuda | None
    build: Path
    cache: Path
    jobs: int
    progress: Progress

    @property
    def name(self) -> str:
        return variant.variant_name(self.package, self.backend, self.cuda)

    @property
    def compute(self) -> str:
        """The short name in messages: "cpu", "cu130"."""
        return self.cuda.compute if self.cuda else self.backend

    @property
    def archs(self) -> list[str] | None:
        """The capabilities of all components together, as kernel-builder declares them; None without CUDA."""
        if self.cuda is None:
            return None
        components = [c for c in self.package.components(self.backend) if c.has_cuda_units]
        return sorted({str(capability) for c in components for capability in capabilities(c, self.cuda)})


def build_variant(request: Request) -> Path:
    """Builds one variant, or finds it up to date. After a BuildError, what was in its place before is still there."""
    package, progress = request.package, request.progress
    work = request.cache / request.name
    staged = work / "stage"
    stage(package, request.backend, staged)
    runner = Runner(request.jobs)
    objects = Objects(staged, work / "objects", request.cxx, request.cuda, make_roots(request.cuda), runner)
    units = make_units(package, request.backend, staged, request.cuda)
    with progress.step(f"{request.compute}: what has changed"):
        keys = dict(zip(units, runner.each(objects.key, units), strict=True))
        variant_id = f"_{package.python_name}_{request.backend}_{_unique_id(request, staged, keys)}"

    place = request.build / request.name
    library = work / f"{variant_id}{variant.LIBRARY_SUFFIX}"
    if (place / library.name).exists() and not check_variant(place):
        refreshed = _write_metadata(request, variant_id, place)
        progress.say(f"{place}: up to date{', metadata refreshed' if refreshed else ''} ({variant_id})")
        return place

    _compile(request, runner, objects, keys, variant_id)
    with progress.step(f"{request.compute}: link"):
        # The order of objects is the order of their code: it must not follow from who finished first.
        link([objects.path(unit) for unit in units], library, staged, request.cxx, request.cuda, runner)

    def fill_in(directory: Path) -> None:
        variant.fill(staged / package.python_folder, library, directory)
        _write_metadata(request, variant_id, directory)

    with progress.step(f"{request.compute}: check"):
        variant.make(request.build, request.name, fill_in)
    library.unlink()
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    progress.say(f"{place}: built and checked, {size / 2**20:.2f} MB ({variant_id})")
    return place


@contextmanager
def locked(cache: Path, progress: Progress) -> Iterator[None]:
    """One build at a time in a cache: a second one waits."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for another build that uses {cache}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unique_id(request: Request, staged: Path, keys: dict[Unit, str]) -> str:
    """A hash of all that shapes the variant's digested bytes. Equal inputs have equal ids on every machine."""
    python = staged / request.package.python_folder
    inputs = {
        "variant": request.name,
        "build.toml": request.package.toml_hash,
        "python": [
            (path.relative_to(python).as_posix(), hash_files([path]))
            for path in sorted(python.rglob("*"))
            if path.is_file()
        ],
        "objects": [(unit.component, unit.source, key) for unit, key in keys.items()],
        "link": (request.cxx.identity, link_arguments(request.cuda)),
        "builder": hash_files(sorted([*Path(__file__).parent.glob("*.py"), *TEMPLATES.iterdir()])),
    }
    return digest(inputs)[: variant.ID_DIGITS]


def _compile(request: Request, runner: Runner, objects: Objects, keys: dict[Unit, str], variant_id: str) -> None:
    progress = request.progress
    waiting = [unit for unit, key in keys.items() if not objects.is_current(unit, key, variant_id)]
    if kept := len(keys) - len(waiting):
        progress.say(f"{request.compute}: {kept} of {len(keys)} objects unchanged")
    # With fewer CUDA sources than jobs, nvcc works on several architectures of one source at a time.
    cuda_units = sum(unit.compiler == "nvcc" for unit in waiting)
    threads = max(1, request.jobs // cuda_units) if cuda_units else 1
    done = iter(range(1, len(waiting) + 1))

    def compile_one(unit: Unit) -> None:
        def finished(seconds: float) -> str:
            return f"{request.compute}: [{next(done)}/{len(waiting)}] {unit.source} {seconds:.1f} s"

        with progress.step(unit.source, finished):
            warnings = objects.compile(unit, keys[unit], variant_id, threads)
        if warnings:
            progress.say(warnings.rstrip())

    runner.each(compile_one, waiting)


def _write_metadata(request: Request, variant_id: str, directory: Path) -> bool:
    """Writes metadata.json unless it is there and right; True if it was not.

    It is a label, outside of the variant's digest and of no influence on its id: a commit that follows the build
    changes what it says about the source, and nothing else.
    """
    inputs = [*listed_files(request.package, request.backend), *python_files(request.package)]
    text = variant.metadata(request.package, request.backend, variant_id, request.archs, directory, inputs)
    return variant.replace_text(directory / "metadata.json", text)
