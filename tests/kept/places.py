"""Placeholders in what is kept: put in for the paths of the machine that made it, and filled in."""

import pickletools
from collections.abc import Mapping
from pathlib import Path

FOLDER, PYTHON = "@FOLDER@", "@PYTHON@"


def relocate(folder: Path, paths: Mapping[str, str]) -> None:
    """Replace paths in every file below a folder, but in checkpoints, which need none of them."""
    for file in folder.rglob("*"):
        if not file.is_file() or file.is_symlink() or file.suffix in (".pt", ".sha256"):
            continue
        content = file.read_bytes()
        file.write_bytes(
            _in_pickle(content, paths) if file.suffix == ".pkl" else _in_text(content, paths)
        )


def _in_text(content: bytes, paths: Mapping[str, str]) -> bytes:
    for old, new in paths.items():
        content = content.replace(old.encode(), new.encode())
    return content


def _in_pickle(content: bytes, paths: Mapping[str, str]) -> bytes:
    """Rewrite a pickle's strings, which carry their lengths; frames, of known length, may lack."""
    written, operations = b"", list(pickletools.genops(content))
    ends = [place for _, _, place in operations[1:]] + [len(content)]
    for (operation, argument, place), end in zip(operations, ends, strict=True):
        if operation.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            text = _in_text(argument.encode(), paths)
            written += b"X" + len(text).to_bytes(4, "little") + text
        elif operation.name != "FRAME":
            written += content[place:end]
    return written
