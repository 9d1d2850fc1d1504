"""The programs that others wrote, each set of them in a virtual environment made on first use.

    python(["torchx"])             -> Path of an interpreter that imports torchx, or None
    why_not(["torchx"])            -> after a None: the reason, one line, for "not measured: ..."
    versions(["torchx", "torch"])  -> {"torchx": "0.7.0", "torch": "2.9.0"}, of the environment

`python` takes names as pip does. It downloads, once, into a directory below the user's cache
($CLUSTERDDP_BENCH_PEERS, else $XDG_CACHE_HOME/clusterddp/peers, else ~/.cache/clusterddp/peers).
Each set of names has a separate environment, so the requirements of two peers cannot clash. It
also sees what the present interpreter has installed, behind its own packages: torch is neither
downloaded a second time nor another one. This package itself is not in it; a program run there
that needs it gets the checkout in PYTHONPATH.
"""

import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# What a peer must not replace: it would be measured on another torch than ours.
_KEPT = ("torch", "torchvision", "numpy")
# What a peer's own requirements leave open, and what does not work with it.
_LIMITS = {"nemo-run": ["leptonai<0.47"]}  # NeMo-Run 0.11 imports leptonai.api.v1, gone since
_MAX_INSTALLATION_SECONDS = 900
_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""
_reasons: dict[tuple[str, ...], str] = {}


def python(names: Sequence[str]) -> Path | None:
    """The interpreter of an environment that holds the peers; None where it cannot be made."""
    return _made(_key(names))


def why_not(names: Sequence[str]) -> str:
    """Why `python` gave None for these names; empty when it did not."""
    return _reasons.get(_key(names), "")


def versions(names: Sequence[str], *, of: Sequence[str] | None = None) -> dict[str, str]:
    """The versions of the peers, or of the packages `of`, that their environment imports."""
    interpreter = python(names)
    if interpreter is None:
        return {}
    argv = [str(interpreter), "-I", "-c", _VERSIONS, *(of or _key(names))]
    answer = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


@functools.cache
def _made(names: tuple[str, ...]) -> Path | None:
    folder = _folder(names)
    ready = folder / "ready"
    try:
        with _alone(folder.with_suffix(".lock")):
            if not ready.exists():
                print(f"installing {', '.join(names)} into {folder}, once ...", file=sys.stderr)
                _install(names, folder)
                ready.touch()
    except (OSError, subprocess.SubprocessError, _InstallationError) as error:
        _reasons[names] = str(error)
        return None
    return _interpreter(folder)


class _InstallationError(Exception):
    """pip or venv failed; the message is the last line of what it said."""


def _install(names: tuple[str, ...], folder: Path) -> None:
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    interpreter = _interpreter(folder)
    ask = [str(interpreter), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = Path(_run(ask).strip())
    (own / "behind.pth").write_text("".join(f"{path}\n" for path in _present()))
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{line}\n" for line in _constraints(names)))
    pip = [str(interpreter), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "--constraint", str(constraints), *names])


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=_MAX_INSTALLATION_SECONDS
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise _InstallationError(f"{' '.join(argv[1:4])} failed: {said[-1]}")
    return done.stdout


def _key(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def _folder(names: tuple[str, ...]) -> Path:
    """One for each set of peers and each interpreter and torch that they are to stand on."""
    below = f"{sys.version} {_present()} {_constraints(names)} {names}"
    digest = hashlib.sha256(below.encode()).hexdigest()[:8]
    return _root() / f"{'+'.join(names)}-{digest}"


def _root() -> Path:
    chosen = os.environ.get("CLUSTERDDP_BENCH_PEERS")
    if chosen:
        return Path(chosen).absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "clusterddp" / "peers"


def _interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def _present() -> list[str]:
    """The directories in which this interpreter finds packages, with those that a .pth adds."""
    own = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return [path for path in sys.path if path in own or Path(path).name == "site-packages"]


def _constraints(names: tuple[str, ...]) -> list[str]:
    """What pip has to keep to: the present versions of `_KEPT`, and `_LIMITS`."""
    lines = [limit for name in names for limit in _LIMITS.get(name, [])]
    for name in _KEPT:
        with suppress(importlib.metadata.PackageNotFoundError):
            # A local label such as +cpu names a build, which no index need have.
            lines.append(f"{name}=={importlib.metadata.version(name).partition('+')[0]}")
    return lines


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One at a time: two benchmarks can begin together."""
    lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
