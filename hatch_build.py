"""Adds the man pages to a wheel, and to its metadata the README as a package index shows it.

`man clusterddp-submit` finds the pages where the environment is on PATH.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]*)\)")
"""An image or a link to a file of the repository."""


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


class Readme(MetadataHookInterface):
    """Makes the description that an index shows from README.md."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description; its links begin with `address` (pyproject.toml)."""
        text = Path(self.root, "README.md").read_text()
        text = with_address(text, self.config.get("address", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_address(text: str, address: str) -> str:
    """Return a page whose relative links begin with an address; without one, their words alone."""
    if address:
        return _LINK.sub(rf"\1[\2]({address}\3)", text)
    return _LINK.sub(lambda link: "" if link[1] else link[2], text)
