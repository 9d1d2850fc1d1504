"""The parent on the host of a task in a container, with a stand-in that starts it without one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp.processes.container import withheld
from tests.waiting import dying_with_us, has_gone, wait_for

# As `apptainer exec`: drops its options and the image, sets what APPTAINERENV_* says, and starts.
_APPTAINER = """#!/bin/sh
while [ "$1" != "$IMAGE" ]; do shift; done
shift
export RUNTIME=$$
exec "$@"
"""


class Site:
    """A directory with a runtime, an image and a run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.image = folder, folder / "run", folder / "image.sif"
        (folder / "bin").mkdir()
        self.run.mkdir()
        self.image.touch()
        self.provide("apptainer", _APPTAINER)

    def provide(self, name: str, text: str) -> None:
        program = self.folder / "bin" / name
        program.write_text(text)
        program.chmod(0o755)

    def start(self, *task: str, box: Mapping[str, object] = {}, **more: str) -> Any:
        environ = {name: os.environ[name] for name in os.environ if not name.startswith("SLURM")}
        for name in withheld(environ, ()):
            del environ[name]
        environ |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "IMAGE": str(self.image)}
        argv = [sys.executable, "-m", "clusterddp", "exec", f"--run-dir={self.run}"]
        fields = {"image": str(self.image), "runtime": "apptainer", "python": task[0], **box}
        argv.append(f"--container={json.dumps(fields)}")
        return subprocess.Popen(
            [*argv, "--", *task],
            env=environ | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=dying_with_us(),  # noqa: PLW1509 -- calls of the system alone
        )

    def go(self, *task: str, **more: Any) -> tuple[int, str]:
        """Run a task to its end; returns the exit code and all output."""
        with self.start(*task, **more) as process:
            said = process.communicate(timeout=90)[0]
        return process.returncode, said

    @property
    def outcome(self) -> dict[str, Any]:
        outcome: dict[str, Any] = json.loads((self.run / "outcomes/rank-0.json").read_text())
        return outcome

    def check(self, *named: str, code: str) -> None:
        """The error on record has this code, and names the node, the image and what else."""
        assert self.outcome["error"]["code"] == code
        for part in (os.uname().nodename, str(self.image), *named):
            assert part in self.outcome["error"]["message"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_task_runs_and_its_end_is_recorded_from_outside(site: Site) -> None:
    assert site.go("true") == (0, "")
    assert site.outcome["exit_code"] == 0
    assert site.go("sh", "-c", "kill -KILL $$")[0] == 128 + signal.SIGKILL
    assert site.outcome["signal"] == "SIGKILL"


def test_what_the_task_itself_has_recorded_stands(site: Site) -> None:
    inner = [sys.executable, "-m", "clusterddp", "exec", f"--run-dir={site.run}", "--"]
    assert site.go(*inner, "program-of-nobody")[0] == 127
    assert "program-of-nobody' is not on PATH" in site.outcome["error"]["message"]


def test_the_hosts_own_variables_are_named_once_and_stay_in_the_runtime(site: Site) -> None:
    site.provide("apptainer", _APPTAINER.replace("exec", "env | grep ^APPTAINERENV_; exec"))
    code, said = site.go("true", LD_LIBRARY_PATH="/host", NCCL_DEBUG="INFO", CONDA_PREFIX="/c")
    assert code == 0, said
    line = said.splitlines()[0]
    assert line.startswith("clusterddp: host variables not passed to the container:")
    assert "CONDA_PREFIX" in line
    assert "LD_LIBRARY_PATH" in line
    assert "APPTAINERENV_NCCL_DEBUG=INFO" in said
    assert "APPTAINERENV_CLUSTERDDP_CONTAINER_IMAGE=" in said
    assert "APPTAINERENV_LD_LIBRARY_PATH" not in said
    _, said = site.go("true", box={"variables": ["LD_LIBRARY_PATH"]}, LD_LIBRARY_PATH="/mine")
    assert "APPTAINERENV_LD_LIBRARY_PATH=/mine" in said


def test_a_node_without_the_image_is_named(site: Site) -> None:
    site.image.unlink()
    assert site.go("true")[0] == 1
    site.check("--exclude", code="CD1002")


def test_a_node_without_a_mounts_source_is_named(site: Site) -> None:
    assert site.go("true", box={"mounts": ["/not/there:/data:ro"]})[0] == 1
    site.check("/not/there", "--exclude", code="CD1003")


@pytest.mark.parametrize("runtime", ["apptainer", "auto"])
def test_a_node_without_the_runtime_is_named(site: Site, runtime: str) -> None:
    (site.folder / "bin/apptainer").unlink()
    assert site.go("true", box={"runtime": runtime}, PATH=f"{site.folder}/bin")[0] == 1
    site.check("apptainer", "--container-runtime", code="CD1001")


def test_an_image_without_the_python_is_named(site: Site) -> None:
    assert site.go("python-of-nobody")[0] == 127
    site.check("python-of-nobody", "--python", code="CD1006")


def test_an_image_whose_python_is_too_old_is_named(site: Site) -> None:
    site.provide("oldpython", '#!/bin/sh\n[ "$1" = -c ] || exit 1\necho 3 8\n')
    assert site.go("oldpython", "run.pyz", "train", "-v")[0] == 1
    site.check("oldpython", "Python 3.8", "3.10", "--python", code="CD1006")


def test_an_image_without_the_program_that_starts_the_task_is_named(site: Site) -> None:
    """As torchrun's template has bash do."""
    assert site.go("bash-of-nobody", box={"python": sys.executable})[0] == 127
    site.check("has no bash-of-nobody", code="CD1006")


def test_an_image_without_a_shell_is_named_by_the_runtimes_words(site: Site) -> None:
    said = "Error: crun: executable file `sh` not found in $PATH"
    site.provide("apptainer", f"#!/bin/sh\necho '{said}' >&2\nexit 127\n")
    assert site.go("true")[0] == 127
    site.check("cannot start", said, code="CD1007")


def test_what_a_runtime_says_that_cannot_start_is_passed_on(site: Site) -> None:
    site.provide("apptainer", "#!/bin/sh\necho 'FATAL: no user namespaces' >&2\nexit 255\n")
    code, said = site.go("true")
    assert (code, said.splitlines()[-1][-8:]) == (255, "[CD1007]")
    site.check("FATAL: no user namespaces", "--container-runtime", code="CD1007")


def test_a_second_container_that_is_ended_too_tells_nothing(site: Site) -> None:
    site.provide("apptainer", '#!/bin/sh\ncase "$*" in *version_info*) exit 0;; esac\nexit 3\n')
    code, said = site.go("true")
    assert (code, said) == (3, "")
    assert site.outcome["error"] is None


def test_an_agent_in_a_container_stands_for_the_first_of_its_ranks(site: Site) -> None:
    agent = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "h01", "MASTER_PORT": "12345",
    }  # fmt: skip
    assert site.go("false", box={"ranks": 4, "python": "python-of-nobody"}, **agent)[0] == 1
    outcome = json.loads((site.run / "outcomes/rank-4.json").read_text())
    assert "no working python-of-nobody" in outcome["error"]["message"]


def test_a_runtime_that_ends_well_before_its_container_has_begun_is_no_end_of_the_task(
    site: Site,
) -> None:
    """As podman does, exit code 0, that gets SIGTERM meanwhile."""
    site.provide("apptainer", "#!/bin/sh\nexit 0\n")
    assert site.go("true")[0] == 128 + signal.SIGTERM
    assert site.outcome["signal"] == "SIGTERM"


@pytest.mark.parametrize(
    ("task", "end", "removed"), [(3, "kill -TERM $$", 1), (0, "kill -TERM $$", 1), (0, "exit 0", 0)]
)
def test_what_podman_leaves_that_is_ended_as_it_removes_a_container_is_removed(
    site: Site, task: int, end: str, removed: int
) -> None:
    """As scancel does, or the end of another rank: the task has ended, podman has not."""
    site.provide(
        "podman",
        f"""#!/bin/sh
        [ "$1" != rm ] || echo "$*" >>'{site.folder}/removed'
        [ "$1" = run ] || exit 0
        while [ "$1" != an-image ]; do shift; done
        shift
        "$@"
        {end}
        """,
    )
    box = {"runtime": "podman", "image": "an-image"}
    assert site.go("sh", "-c", f"exit {task}", box=box) == (task, "")
    log = site.folder / "removed"
    lines = log.read_text().splitlines() if log.exists() else []
    of_task = [line for line in lines if not line.endswith("-probe")]
    assert len(of_task) == removed
    assert all(line.startswith("rm --force --ignore --time=0 clusterddp-") for line in of_task)


def test_what_was_above_a_container_is_no_zombie_that_podman_waits_for(site: Site) -> None:
    """As its monitor that is told to end: podman looks whether there is a process of its number."""
    site.provide(
        "apptainer",
        """#!/bin/sh
        monitor=$(sh -c 'true & echo $!')
        for _ in $(seq 100); do kill -0 "$monitor" 2>/dev/null || exit 0; sleep 0.1; done
        echo 'it is still there'
        """,
    )
    assert "it is still there" not in site.go("true")[1]


@pytest.mark.parametrize("victim", ["parent", "runtime"])
def test_no_task_outlives_its_parent_or_its_runtime(site: Site, victim: str) -> None:
    """A runtime that stays above its container, as apptainer's and podman's do."""
    site.provide("apptainer", _APPTAINER.replace('exec "$@"', '"$@" & wait'))
    pids = site.folder / "pids"
    task = (
        f'trap "" TERM; echo "$$ $RUNTIME" >{pids}.new; mv {pids}.new {pids}; while :; do :; done'
    )
    with site.start("sh", "-c", task) as process:
        wait_for(pids.exists, "the task")
        task_pid, runtime = map(int, pids.read_text().split())
        os.kill(process.pid if victim == "parent" else runtime, signal.SIGKILL)
        assert has_gone(task_pid)
