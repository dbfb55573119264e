"""What the builder's tests hold in their hands: a package's tree, and what a call of the builder left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What a call of the builder left: its exit code and both outputs."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Tree:
    """A package's root."""

    root: Path

    def variant(self, compute: str = "cpu") -> Path:
        return next((self.root / "build").glob(f"torch-stable-abi*-{compute}*"))

    def library(self) -> Path:
        return next(self.variant().glob("*.so"))

    def content(self) -> dict[str, bytes]:
        """Every file below build/, to see that nothing of it changed."""
        build = self.root / "build"
        return {str(path.relative_to(build)): path.read_bytes() for path in build.rglob("*") if path.is_file()}

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new))
