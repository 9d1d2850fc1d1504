"""What every test starts from: no settings or ranks of the surrounding shell, and datasets."""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

# Before absl, which TensorBoard brings along: as it sets logging up, submitit closes all handlers,
# and absl's one would close the stream that pytest captures.
import submitit  # noqa: F401

from clusterddp import log
from clusterddp.data.synthetic import generate
from clusterddp.processes.hardware import gpu_driver
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client
from clusterddp.slurm.forms import RANK_VARIABLES
from clusterddp.worker.workstation import free_port
from tests import gpu
from tests.data.made_sets import NOBODY
from tests.gpu import pytest_runtest_setup, pytest_terminal_summary  # noqa: F401 # pytest's hooks

# In a shell's background, or under nohup, these are ignored: what the tests start is to take them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

HERE = Path(__file__).parent
# The files that take longest, most of it waiting: begun last, they would leave processors idle.
LONGEST = (
    "on_slurm/test_endings.py", "on_slurm/test_faults.py", "on_slurm/test_launchers.py",
    "on_slurm/test_containers.py", "on_slurm/test_spares.py", "on_slurm/test_preflight.py",
    "on_slurm/test_sweeps.py", "on_slurm/test_integrations.py", "on_slurm/test_signals.py",
    "on_slurm/test_life.py", "integrations/test_accelerate.py", "integrations/test_lightning.py",
    "cli/commands/test_debug.py", "on_slurm/test_cluster.py", "launchers/test_local.py",
    "test_articles.py", "on_slurm/test_submit.py", "on_slurm/test_client.py",
    "test_examples.py", "cli/commands/test_train.py", "cli/commands/test_compare.py",
)  # fmt: skip

_SETTINGS = ("CLUSTERDDP_", "SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "PMI_", "TORCHELASTIC_")
_MNIST = "CLUSTERDDP_TEST_MNIST"
# Nothing may be skipped, as in CI; read once, as the tests clear what they see of it.
_NO_SKIPS = os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1"


_BIN = str(Path(sys.executable).parent)
if _BIN not in os.environ["PATH"].split(os.pathsep):  # `python` is this one, also if not activated
    os.environ["PATH"] = os.pathsep.join((_BIN, os.environ["PATH"]))
os.environ["XDG_STATE_HOME"] = os.devnull
"""No test finds the runs of another, or of a person, by the output roots noted there."""


def pytest_configure(config: pytest.Config) -> None:
    """Has pytest-xdist take files in the order given here, not by their number of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs the real MNIST, so that `-m mnist` runs just that; puts LONGEST first.

    A test for a release is a slow one.
    """
    for item in items:
        if item.get_closest_marker("release"):
            item.add_marker("slow")
        if "mnist_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("mnist")
    gpu.pytest_collection_modifyitems(items)
    order = {HERE / file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A shell in which nothing was set up, also when the tests run inside a Slurm job."""
    for name in list(os.environ):
        if name in RANK_VARIABLES or (
            name.startswith(_SETTINGS) and not name.startswith("CLUSTERDDP_TEST")
        ):
            monkeypatch.delenv(name)
    marked = request.node.get_closest_marker("gpu") is not None
    for name, none in gpu.hidden(marked, gpu_driver()).items():
        monkeypatch.setenv(name, none)
    client._slurmd_port.cache_clear()  # that of another test's cluster


@pytest.fixture(autouse=True)
def ignored_signals() -> Iterator[None]:
    """Holds each test to what Python ignores.

    With another answer to these, a closed pipe or a full disk in a later test ends the whole
    process, without a word.
    """
    yield
    kept = [signal.getsignal(each) for each in (signal.SIGPIPE, signal.SIGXFSZ)]
    assert kept == [signal.SIG_IGN] * 2


@pytest.fixture
def asked_at_each_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A training in this process sees a stop request at its step; none is left."""
    from clusterddp.distributed.agreement import Poll  # torch
    from clusterddp.training import stop

    monkeypatch.setattr(Poll, "due", lambda *_: True)
    stop.requested.forget()
    yield
    stop.requested.forget()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An empty run, in a directory whose name a shell would take apart."""
    path = tmp_path / "it's a $(touch pwned) run"
    path.mkdir()
    return RunDir(path)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """The first attempt of a run, as it begins."""
    return begin(RunDir(tmp_path))


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that this process logs."""
    lines: list[str] = []
    with log.to(lines.append):
        yield lines


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """The data directory with the real MNIST that CLUSTERDDP_TEST_MNIST names; skips without it.

    Nothing beside the clone is looked for: the tests do the same on every machine.
    """
    named = os.environ.get(_MNIST)
    if not named:
        pytest.skip(f"needs the real MNIST; name a directory that holds MNIST/raw in {_MNIST}")
    path = Path(named).absolute()
    if not (path / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        pytest.fail(f"{_MNIST} is {named}, which holds no MNIST/raw/train-images-idx3-ubyte")
    return path


@pytest.fixture(scope="session")
def synthetic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with 2,000 and 500 synthetic digits; not to be written to."""
    path = tmp_path_factory.mktemp("data")
    generate(str(path), train_images=2_000, test_images=500)
    return path


@pytest.fixture(scope="session")
def gpu_digits(request: pytest.FixtureRequest) -> tuple[str, str]:
    """`--dataset` and `--data-dir` of tests on a GPU: MNIST where it is at hand, else synthetic.

    At hand is what CLUSTERDDP_TEST_MNIST names, or the directory `data` of the clone or beside it.
    """
    beside = (HERE.parent / "data", HERE.parents[1] / "shared" / "data")
    if found := gpu.digits(os.environ.get(_MNIST), beside):
        return "mnist", str(found)
    return "synthetic", str(request.getfixturevalue("synthetic_dir"))


@pytest.fixture(scope="session")
def keras_installed() -> None:
    """Skips where Keras is not installed; fails instead where nothing may be skipped, as in CI."""
    if not importlib.util.find_spec("keras"):
        _lacks("Keras is not installed. To run these tests: pip install 'clusterddp[keras]'")


@pytest.fixture
def small_disk(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in a small file system of its own, gone as it ends.

    The function takes the options of tmpfs(5) and the command's words. It skips where nothing may
    be mounted, as in a container without CAP_SYS_ADMIN; it fails where nothing may be skipped.
    """

    def within(options: str, *argv: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "disk"
        folder.mkdir(exist_ok=True)
        mount = 'mount -t tmpfs -o "$1" none "$2" && cd "$2" && shift 2 && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", mount, "sh", options, str(folder)]
        try:
            subprocess.run([*words, "true"], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            _lacks("a file system cannot be mounted here: no unshare on PATH")
        except subprocess.CalledProcessError as error:
            _lacks(f"a file system cannot be mounted here: {error.stderr.strip()}")
        return subprocess.run([*words, *argv], capture_output=True, text=True, check=False)

    return within


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one, in this process."""
    import torch
    import torch.distributed as dist

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def port() -> int:
    """A free one, of the loopback; the kernel gives none of its range to anybody else meanwhile."""
    return free_port()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A data directory of our own with 30 and 10 synthetic digits."""
    generate(str(tmp_path / "data"), train_images=30, test_images=10)
    return tmp_path / "data"


@pytest.fixture
def raw(small: Path) -> Path:
    return small / "synthetic" / "MNIST" / "raw"


@pytest.fixture
def nobody() -> Iterator[None]:
    """A user without rights, where the tests run as root, for whom permissions do not count."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def _lacks(what: str) -> NoReturn:
    if _NO_SKIPS:
        pytest.fail(what)
    pytest.skip(what)
