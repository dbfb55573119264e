"""A shared library, read once: what it asks of others, what it offers, what it carries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


@dataclass(frozen=True, order=True)
class Import:
    """An undefined symbol of .dynsym; `version` is the one that the loader will insist on ("GLIBC_2.14"), if any."""

    name: str
    version: str | None
    weak: bool


class Library:
    """Raises elftools' ELFError if the file is not an ELF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.machine = _MACHINES.get(elf["e_machine"], elf["e_machine"])
            sections = list(elf.iter_sections())
            self.contents = {
                section.name: section.data() for section in sections if section["sh_type"] != "SHT_NOBITS"
            }
            self._dynamic = [
                (
                    tag.entry.d_tag,
                    getattr(tag, "needed", None) or getattr(tag, "rpath", None) or getattr(tag, "runpath", None),
                )
                for section in sections
                if isinstance(section, DynamicSection)
                for tag in section.iter_tags()
            ]
            versions = {
                auxiliary["vna_other"]: auxiliary.name
                for section in sections
                if isinstance(section, GNUVerNeedSection)
                for _, auxiliaries in section.iter_versions()
                for auxiliary in auxiliaries
            }
            indices = next((s for s in sections if isinstance(s, GNUVerSymSection)), None)
            self._symbols = [
                (symbol.name, symbol["st_shndx"], symbol["st_info"]["bind"], _version(indices, index, versions))
                for section in sections
                if isinstance(section, SymbolTableSection) and section.name == ".dynsym"
                for index, symbol in enumerate(section.iter_symbols())
                if symbol.name
            ]
            self._static_imports = {
                symbol.name.partition("@")[0]
                for section in sections
                if isinstance(section, SymbolTableSection) and section.name == ".symtab"
                for symbol in section.iter_symbols()
                if symbol["st_shndx"] == "SHN_UNDEF"
            }

    @property
    def needed(self) -> list[str]:
        return [value for tag, value in self._dynamic if tag == "DT_NEEDED"]

    @property
    def search_paths(self) -> list[str]:
        """DT_RPATH and DT_RUNPATH."""
        return [value for tag, value in self._dynamic if tag in ("DT_RPATH", "DT_RUNPATH")]

    @cached_property
    def imports(self) -> list[Import]:
        return sorted(
            Import(name, version, bind == "STB_WEAK")
            for name, section, bind, version in self._symbols
            if section == "SHN_UNDEF"
        )

    def exported(self) -> set[str]:
        return {name for name, section, bind, _ in self._symbols if section != "SHN_UNDEF" and bind != "STB_LOCAL"}

    def missing_from_symtab(self) -> list[str]:
        """Imports that .symtab does not list: a stripped library hides them from tools that read .symtab alone."""
        return [symbol.name for symbol in self.imports if symbol.name not in self._static_imports]


def _version(indices: GNUVerSymSection | None, index: int, versions: dict[int, str]) -> str | None:
    if indices is None:
        return None
    number = indices.get_symbol(index)["ndx"]
    return versions.get(number & 0x7FFF) if isinstance(number, int) else None
