"""The object cache: an object is reused while its command, its compiler and every file that it includes stay the same.

Each unit has one slot, <source>.o and a record beside it:

    dependencies   the files that the source included when it was last compiled, itself first
    key            a hash of the command, the compiler and the content of these files
    object         a hash of the key and the variant's id, where the unit uses the id: what <source>.o was made from

The key is known before anything is compiled, which is what lets the id follow from the keys.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from .cuda import Cuda
from .errors import BuildError
from .runner import Runner
from .toolchain import Cxx, hash_files
from .units import Roots, Unit, command

# Stands in for the id where only the list of included files is wanted.
_NO_ID = "_"


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass
class Objects:
    """The slots of one variant. `stage` is where commands run, `directory` where the slots are."""

    stage: Path
    directory: Path
    cxx: Cxx
    cuda: Cuda | None
    roots: Roots
    runner: Runner
    _hashes: dict[Path, str] = field(default_factory=dict)
    _dependencies: dict[Unit, list[str]] = field(default_factory=dict)

    def path(self, unit: Unit) -> Path:
        return self.directory / unit.component / f"{unit.source}.o"

    def key(self, unit: Unit) -> str:
        """The unit's key now. Asks the compiler for the dependencies unless the recorded ones still hold."""
        record = self._record(unit)
        if record is not None and self._key(unit, record["dependencies"]) == record["key"]:
            self._dependencies[unit] = record["dependencies"]
        else:
            self._dependencies[unit] = self._scan(unit)
        return self._key(unit, self._dependencies[unit])

    def is_current(self, unit: Unit, key: str, variant_id: str) -> bool:
        record = self._record(unit)
        return record is not None and record["object"] == self._object(unit, key, variant_id)

    def compile(self, unit: Unit, key: str, variant_id: str, threads: int) -> str:
        """Compiles a unit, whose key is known, into its slot and returns the compiler's warnings."""
        target = self.path(unit)
        scratch = target.with_suffix(".tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        arguments = [*command(unit, self.cxx, self.cuda, self.roots, variant_id), "-c", unit.source]
        if unit.compiler == "nvcc":
            # Kept intermediate files have names that do not change from run to run; some of them end up in the object.
            arguments += ["--threads", str(threads), "--keep", "--keep-dir", str(scratch)]
        result = self.runner.run([*arguments, "-o", str(scratch / "object")], self.stage)
        if result.returncode != 0:
            raise self._failed(unit, result.stdout + result.stderr, [*arguments, "-o", "/dev/null"])
        (scratch / "object").replace(target)
        record = {
            "dependencies": self._dependencies[unit],
            "key": key,
            "object": self._object(unit, key, variant_id),
        }
        target.with_suffix(".json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(scratch)
        return result.stdout + result.stderr

    def _record(self, unit: Unit) -> dict | None:
        try:
            record = json.loads(self.path(unit).with_suffix(".json").read_text())
        except (OSError, ValueError):
            return None
        return record if self.path(unit).is_file() else None

    def _scan(self, unit: Unit) -> list[str]:
        """The files that a source includes, itself first: staged ones relative, others absolute."""
        arguments = [*command(unit, self.cxx, self.cuda, self.roots, _NO_ID), "-M", unit.source]
        result = self.runner.run(arguments, self.stage)
        if result.returncode != 0:
            raise self._failed(unit, result.stderr, arguments)
        # A make rule, "object: source header \ header": spaces in names and line ends are escaped.
        names = re.split(r"(?<!\\)\s+", result.stdout.replace("\\\n", " ").partition(": ")[2].strip())
        return list(dict.fromkeys([*(name.replace("\\ ", " ") for name in names), *unit.companions]))

    def _key(self, unit: Unit, dependencies: list[str]) -> str | None:
        contents = []
        for name in dependencies:
            path = self.stage / name
            if path not in self._hashes:
                if not path.is_file():
                    return None
                self._hashes[path] = hash_files([path])
            contents.append([self.roots.alias(name), self._hashes[path]])
        compilers = [self.cxx.identity, self.cuda.identity if unit.compiler == "nvcc" else None]
        return digest([compilers, unit.arguments, unit.source, unit.needs_id, contents])

    def _object(self, unit: Unit, key: str, variant_id: str) -> str:
        return digest([key, variant_id if unit.needs_id else None])

    def _failed(self, unit: Unit, output: str, arguments: list[str]) -> BuildError:
        return BuildError(
            f"{output.rstrip()}\n"
            f"{unit.source} of [{unit.component}] does not compile; to run the compiler again: "
            f"cd {self.stage} && {shlex.join(arguments)}"
        )
