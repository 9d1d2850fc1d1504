"""Imports from a run's bundle without opening it for each module: the file is read once.

Python's zipimport opens the file again for every module: 100 opens per task. On a shared file
system, each of them is a request to its server, from every rank.
"""

import importlib.util
import marshal
import struct
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType

_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s6H3L5H2L")
"""End of a zip file, and an entry of its directory (APPNOTE.TXT of PKWARE, 4.3.12 and 4.3.16)."""
_LOCAL_BYTES = 30
"""Size of the header before a member's name and content (4.3.7)."""
_HEADER_BYTES = 16
"""Size of the header of a file with bytecode (PEP 552)."""


def serve(archive: str) -> None:
    """Let the modules of a zip file on sys.path be imported from memory.

    archive: a bundle or its bytecode; see `submission.bundle`. Modules that cannot be found in
    memory are still imported by zipimport. Raises OSError.
    """
    with open(archive, "rb") as file:  # noqa: PTH123 -- pathlib is not needed otherwise
        content = file.read()
    parts = [
        entry[len(archive) + 1 :] for entry in sys.path if f"{entry}/".startswith(f"{archive}/")
    ]
    # Finders that others have put first, as debuggers do, stay first.
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
    sys.meta_path.insert(place, Finder(archive, content, parts))


class Finder:
    """Finder and loader of the modules in the content of one zip file without compression."""

    def __init__(self, archive: str, content: bytes, parts: list[str]) -> None:
        """Take the file's path and content, and the directories in it that are on sys.path."""
        self._archive, self._content = archive, content
        self._prefixes = [f"{part}/" if part else "" for part in parts]
        self._members = _members(content)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a module in the file; None for any other, also for the program."""
        if name == "__main__":
            return None
        path = name.replace(".", "/")
        for prefix in self._prefixes:
            for suffix in ("/__init__.pyc", ".pyc", "/__init__.py", ".py"):
                member = f"{prefix}{path}{suffix}"
                if member in self._members:
                    is_package = suffix.startswith("/")
                    return importlib.util.spec_from_file_location(
                        name,
                        f"{self._archive}/{member}",
                        loader=self,  # type: ignore[arg-type] # it has a loader's methods
                        submodule_search_locations=[f"{self._archive}/{prefix}{path}"]
                        if is_package
                        else None,
                    )
        return None

    def create_module(self, _: ModuleSpec) -> None:
        """Leave the module's creation to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's code."""
        exec(self.get_code(module.__name__), vars(module))

    def get_code(self, name: str) -> CodeType:
        """Return a module's code; `runpy` asks for it too. Raises ImportError."""
        origin, content = self._read(name)
        if origin.endswith(".pyc"):
            code: CodeType = marshal.loads(content[_HEADER_BYTES:])
            return code
        return compile(content, origin, "exec", dont_inherit=True)

    def get_source(self, name: str) -> str | None:
        """Return a module's source, for tracebacks; None if the file has only bytecode."""
        origin, content = self._read(name)
        return None if origin.endswith(".pyc") else content.decode()

    def _read(self, name: str) -> tuple[str, bytes]:
        spec = self.find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(f"{self._archive} has no module {name}", name=name)
        start, size = self._members[spec.origin[len(self._archive) + 1 :]]
        return spec.origin, self._content[start : start + size]


def _members(content: bytes) -> dict[str, tuple[int, int]]:
    """Return the start and the size of each member of a zip file as `submission.bundle` makes it.

    A member with compression is left to zipimport.
    Python's `zipfile` could do it, but its import takes longer than all of this.
    """
    *_, count, _, at, _ = _END.unpack_from(content, len(content) - _END.size)
    found = {}
    for _ in range(count):
        entry = _ENTRY.unpack_from(content, at)
        size, name_size, start = entry[8], entry[10], entry[16]
        at += _ENTRY.size
        name = content[at : at + name_size].decode()
        if not entry[4]:
            found[name] = (start + _LOCAL_BYTES + name_size, size)
        at += name_size
    return found
