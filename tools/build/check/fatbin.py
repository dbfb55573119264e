"""The architectures in a library's CUDA fat binaries, from the bytes of its .nv_fatbin section.

The section is a row of fat binaries: a 16-byte header {magic, version, header size, size of the entries} and entries,
each {kind, version, header size, size of the payload, ..., architecture at byte 28, flags at byte 40} before its
payload. The payload may be compressed; the header says all that is needed. NVIDIA does not document the format; the
fields were found by compiling for one architecture after another, and an unknown shape is an error, not a guess.
"""

from __future__ import annotations

import struct

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_PTX, _ELF = 1, 2
_SUFFIXES = {0x0010_0000: "a", 0x0020_0000: "f"}


class FatBinaryError(Exception):
    """A .nv_fatbin section of an unknown shape."""


def architectures(section: bytes) -> set[str]:
    """What a .nv_fatbin section has: "9.0a" for machine code, "9.0a+PTX" for PTX."""
    found = set()
    offset = 0
    while offset + _HEADER.size <= len(section):
        magic, _, header_size, size = _HEADER.unpack_from(section, offset)
        if magic == 0:  # padding between the fat binaries of two objects
            offset += 8
            continue
        if magic != _MAGIC:
            raise FatBinaryError(f".nv_fatbin: {magic:#x} at {offset:#x} is not the start of a fat binary")
        end = offset + header_size + size
        offset += header_size
        while offset < end:
            if offset + _ENTRY.size > len(section):
                raise FatBinaryError(f".nv_fatbin: the entry at {offset:#x} is cut off")
            kind, _, entry_header_size, payload_size, arch, flags = _ENTRY.unpack_from(section, offset)
            if kind not in (_PTX, _ELF):
                raise FatBinaryError(f".nv_fatbin: the entry at {offset:#x} is of the unknown kind {kind}")
            suffix = "".join(letter for bit, letter in _SUFFIXES.items() if flags & bit)
            found.add(f"{arch // 10}.{arch % 10}{suffix}{'+PTX' if kind == _PTX else ''}")
            offset += entry_header_size + payload_size
    return found
