"""Modules of a bundle are imported from memory."""

import io
import zipfile

from clusterddp.archive import Finder


def test_the_program_and_compressed_modules_are_left_to_zipimport() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("__main__.py", "")
        file.writestr("plain.py", "VALUE = 7\n")
        file.writestr("small.py", "VALUE = 7\n" * 9, zipfile.ZIP_DEFLATED)
    finder = Finder("/a.pyz", content.getvalue(), [""])
    assert finder.get_source("plain") == "VALUE = 7\n"
    assert finder.find_spec("small") is None and finder.find_spec("__main__") is None
