"""What git says of a folder of code: which files it keeps there, and at which commit it stands."""

import os
import subprocess

from clusterddp.errors import RequestError

GIT_SECONDS = 60.0
"""Bound on one call of git, which walks the folders that it does not ignore."""

# They would make git list another repository, as inside one of git's own hooks.
_GIT_PLACES = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
})  # fmt: skip


def names(folder: str) -> tuple[list[str], str]:
    """What git keeps in a folder, and why git could not be asked (else empty).

    A repository in it is one name that ends in a slash, a submodule one without.
    """
    # -z: the names as they are, neither quoted nor ended by a newline that may be their own.
    arguments = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed, problem = _ask(folder, *arguments)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name], problem


def head(folder: str) -> str:
    """The hash of the commit that is checked out; empty without one."""
    return _ask(folder, "rev-parse", "--verify", "--quiet", "HEAD")[0].decode().strip()


def _ask(folder: str, *arguments: str) -> tuple[bytes, str]:
    """What git prints in a folder, or nothing and its words."""
    environ = {name: value for name, value in os.environ.items() if name not in _GIT_PLACES}
    environ["GIT_OPTIONAL_LOCKS"] = "0"  # only looks: no commit of the person's has to wait
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except OSError as error:
        return b"", f"git: {error.strerror}"
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"git {arguments[0]} gave no answer within {GIT_SECONDS:g} s in {folder}. "
            "Try again, or use --no-snapshot to run from the folder itself."
        ) from None
    if answer.returncode:
        words = answer.stderr.decode(errors="replace").strip().splitlines()
        return b"", words[0] if words else f"git exited with {answer.returncode}"
    return answer.stdout, ""
