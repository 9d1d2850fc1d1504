"""Files in TOML that an option or a command names."""

import sys
from pathlib import Path
from typing import Any

from clusterddp.errors import RequestError, no_file


def read(option: str, path: Path) -> dict[str, Any]:
    """Return the content of a file in TOML. Raises RequestError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError:  # carried by --on from a machine whose Python needs none
            raise RequestError(
                f"{option} {path}: Python 3.10 needs tomli to read it. Use Python 3.11 or later, "
                "or install tomli where you type --on. [CD0204]"
            ) from None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise no_file(option, path, error, "CD0204") from None
    except UnicodeDecodeError:
        raise RequestError(f"{option} {path} is not UTF-8 text. [CD0204]") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{option} {path} is not TOML: {error}. [CD0204]") from None
