"""How a set comes to its place: whole.

It is made in a draft folder beside its place, checked there, and renamed into place, so that an
interrupted or concurrent writer never leaves half a set.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterddp.data import idx
from clusterddp.errors import DataError

DRAFT_PREFIX = ".draft-"


@contextmanager
def draft_beside(root: Path) -> Iterator[Path]:
    """A root with an empty MNIST/raw, on the file system of the set's place; gone afterwards.

    Raises DataError where the folder cannot be made or written.
    """
    home = root / "MNIST"
    made_root = not root.exists()
    draft = None
    try:
        draft = _make_draft(home)
        (draft / idx.RAW).mkdir(parents=True)
        yield draft
    except OSError as error:
        raise DataError(
            f"cannot write the dataset to {root}: {error.strerror or error}. Choose with "
            "--data-dir a folder that you can write and that has room."
        ) from None
    finally:
        if draft:
            shutil.rmtree(draft, ignore_errors=True)
        for place in (home, *([root] if made_root else [])):
            try:
                place.rmdir()  # only what was left empty, after a failure
            except OSError:
                pass


def _make_draft(home: Path) -> Path:
    for _ in range(100):
        home.mkdir(parents=True, exist_ok=True)
        try:
            return Path(tempfile.mkdtemp(prefix=DRAFT_PREFIX, dir=home))
        except FileNotFoundError:
            pass  # another process failed just now and took the empty folder away
    raise OSError(f"{home} vanishes as often as it is made")


def put_into_place(draft: Path, root: Path) -> None:
    """Move a whole set from its draft to its place; a set that is there already stays.

    Raises DataError when the files in place differ from the draft's: nothing is overwritten.
    """
    source, target = draft / idx.RAW, root / idx.RAW
    for path in source.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        os.rename(source, target)  # noqa: PTH104 -- fails, as wanted, on a non-empty target
        return
    except OSError:
        if not target.is_dir():
            raise
    # The folder is there: another process was faster, or it holds archives or a part of the set.
    recorded = idx.read_sums(target)
    for name in idx.FILES:
        new = idx.digest(source / name)
        old = idx.digest(target / name) if (target / name).exists() else new
        if old != new or recorded.get(name, new) != new:
            raise DataError(
                f"{target} holds another dataset already, or a damaged one: {name} there differs. "
                "Nothing was changed. Move that folder away, or choose another --data-dir."
            )
    for name in (*idx.FILES, idx.SUMS):
        if not (target / name).exists():
            (source / name).replace(target / name)
