"""Errors for the user, with their exit codes and stable codes.

A `ClusterDDPError` is printed as one message without a traceback. Any other exception is a bug and
keeps its traceback. A code, `CD0123`, names a page of `clusterddp explain`. It belongs to a class
or ends a message; a test checks both against the catalogue (`explained/`).
"""

import re

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_STOPPED = 75
"""A rank stopped on request after a checkpoint, or asks for a restart (sysexits.h, EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130


CODE_AT_END = re.compile(r" \[(CD\d{4})\]\Z")
"""Error code at the end of a message; `coded` adds it."""


class ClusterDDPError(Exception):
    """An error for the user: what happened, why, what to type."""

    exit_code = EXIT_FAILED
    code = ""
    """Code of the class, if all its errors have the same remedy."""

    def __init__(self, message: object = "", *, code: str = "") -> None:
        """Split the code off the message, so that another message can quote the text.

        code: the code of an error that this one wraps.
        """
        text = str(message)
        if own := CODE_AT_END.search(text):
            text, code = text[: own.start()], own[1]
        super().__init__(text)
        self.code = code or self.code
        if self.code:  # shown below a traceback, from Python 3.11 on
            self.__notes__ = [f"[{self.code}]"]


def coded(message: object, code: str = "") -> str:
    """Return a message with a code at the end, or before its table; by default the error's."""
    code = code or getattr(message, "code", "")
    text, indent, table = str(message).partition("\n  ")
    return f"{text} [{code}]{indent}{table}" if code else str(message)


class RequestError(ClusterDDPError):
    """An invalid request: nothing was started and nothing written."""

    exit_code = EXIT_WRONG_REQUEST


class OptionError(RequestError):
    """The value of an option is not valid, or contradicts another one."""

    code = "CD0102"

    def __init__(self, option: str, problem: str = "", *, code: str = "") -> None:
        """Begin the message with the typed option, `--nodes` or `--nodes 2`."""
        self.option = option.partition(" ")[0]
        super().__init__(option + problem, code=code or _CODE_BY_OPTION.get(self.option, ""))

    def saying(self, more: str) -> "OptionError":
        """Return the same error with more text at the end."""
        problem = str(self).removeprefix(self.option)
        return OptionError(self.option, f"{problem} {more}", code=self.code)


def no_file(option: str, path: object, error: OSError | None = None, code: str = "") -> OptionError:
    """Return the error for a file that does not exist or, with another OSError, cannot be read."""
    if error is None or isinstance(error, FileNotFoundError):
        return OptionError(option, f": there is no file {str(path)!r}.", code=code)
    return OptionError(option, f": cannot read {str(path)!r}: {error.strerror}.", code=code)


_CODE_BY_OPTION = {
    "--after": "CD1105",
    "--by": "CD1104",
    "--config": "CD0204",
    "--container-image": "CD1004",
    "--container-mount": "CD1003",
    "--container-runtime": "CD1004",
    "--env": "CD0106",
    "--max-concurrent": "CD1101",
    "--nodelist": "CD0105",
    "--notify": "CD1108",
    "--omit-directive": "CD0107",
    "--runs-dir": "CD0504",
    "--over": "CD1104",
    "--partition": "CD0407",
    "--init-from": "CD0701",
    "--num-samples": "CD1101",
    "--sample-seed": "CD1101",
    "--sbatch": "CD0107",
    "--spare-nodes": "CD0105",
    "--sweep": "CD1101",
    "--sweep-file": "CD1101",
    "--tasks-per-node": "CD0105",
    "--template": "CD0301",
    "--template-dir": "CD0301",
}
"""Codes of options whose errors have their own page."""


class DistEnvError(ClusterDDPError):
    """The environment variables of this process are inconsistent: they give no rank."""

    code = "CD0801"


class SlurmError(ClusterDDPError):
    """A Slurm command is missing, failed or did not answer; includes Slurm's message."""

    code = "CD0401"


class DataError(ClusterDDPError):
    """The dataset is missing, incomplete, or does not match its headers."""

    code = "CD0602"


class CheckpointError(ClusterDDPError):
    """A checkpoint is missing, incomplete, or belongs to another model or dataset."""

    code = "CD0701"


class TrainingError(ClusterDDPError):
    """A rank cannot train: no torch, no device, or ranks that disagree."""


class PeerError(TrainingError):
    """A failure caused by another rank; never named as the first one."""

    code = "CD0901"

    peer_lost = True


def is_debuggers_quit(error: BaseException) -> bool:
    """Return whether the user quit a debugger by `q` (bdb.BdbQuit; bdb need not be loaded)."""
    return type(error).__module__ == "bdb" and type(error).__name__ == "BdbQuit"
