"""The errors that a user can meet, and the exit code that each of them gives.

Whatever derives from `ClusterDDPError` is printed as one message without a traceback;
anything else that escapes is a defect of ours and keeps its traceback.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_REQUEST = 2
EXIT_PAUSED = 75
"""A rank has saved and left because it was asked to, or asks to be started again
(sysexits.h, EX_TEMPFAIL)."""
EXIT_INTERRUPTED = 130


class ClusterDDPError(Exception):
    """Something that the user has to know about: what was seen, what was expected, what to do."""

    exit_code = EXIT_FAILED


class RequestError(ClusterDDPError):
    """The request cannot be carried out as it stands: nothing was started and nothing written."""

    exit_code = EXIT_WRONG_REQUEST


class OptionError(RequestError):
    """The value of an option is not valid, or contradicts another one."""

    def __init__(self, option: str, problem: str = "") -> None:
        """Begin the message with the option as it is typed, `--nodes` or `--nodes 2`."""
        super().__init__(option + problem)
        self.option = option.partition(" ")[0]


class DistEnvError(ClusterDDPError):
    """The environment of this process contradicts itself, so no rank can be derived from it."""


class SlurmError(ClusterDDPError):
    """A Slurm command is missing, failed, or did not answer; carries Slurm's own words."""


class DataError(ClusterDDPError):
    """The dataset is missing, incomplete, or not what its headers say."""


class CheckpointError(ClusterDDPError):
    """A checkpoint is missing, torn, or belongs to another model or dataset."""


class TrainingError(ClusterDDPError):
    """A rank cannot train: no torch, no device, ranks that disagree."""


class PeerError(TrainingError):
    """This rank fails only because another one did; it is not the first to be named."""

    peer_lost = True


def is_debuggers_quit(error: BaseException) -> bool:
    """Return whether a person left a debugger by `q` (bdb.BdbQuit, which need not be loaded)."""
    return type(error).__module__ == "bdb" and type(error).__name__ == "BdbQuit"
