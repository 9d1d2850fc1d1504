"""Adds the man pages to a wheel: `man clusterddp-submit`, where its environment is on PATH."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPages(BuildHookInterface[Any]):
    """Makes the man pages from the commands as the wheel is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the pages, and name each with its place below the environment."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from docs_build import man_pages

        self._folder = tempfile.TemporaryDirectory()
        for name, text in man_pages().items():
            path = Path(self._folder.name, name)
            path.write_text(text)
            build_data["shared_data"][str(path)] = f"share/man/man1/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what `initialize` has written."""
        if version != "editable":
            self._folder.cleanup()
