"""The words of each runtime, what is passed on, and what cannot be carried."""

import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import OptionError
from clusterddp.processes import container
from clusterddp.processes.container import (
    APPTAINER,
    AUTO,
    MAIN,
    PODMAN,
    Container,
    ContainerStart,
    Mount,
)
from tests.hostile import CARRIED, REFUSED
from tests.waiting import wait_for

TASK = ["python3", "run.pyz", "train"]
MOUNTS = (Mount("/r", "/r"), Mount("/data", "/d", True))
BOX = Container("/img/torch.sif", mounts=MOUNTS, workdir="/r/code")
ENVIRON = {"RANK": "1", "PYTHONPATH": "/mine", "HOME": "/home/me", "NCCL_DEBUG": "INFO"}
INNER = ["sh", "-c", MAIN, "sh", *TASK]


def words(runtime: str, box: Container, environ: dict[str, str]) -> list[str]:
    return start(runtime, box, environ).command(TASK)[0]


def start(runtime: str, box: Container, environ: dict[str, str], **more: Any) -> ContainerStart:
    fields = {
        "program": f"/bin/{runtime}",
        "name": "box-0",
        "label": "clusterddp=h01",
        "node": "h01",
        **more,
    }
    return ContainerStart(box, runtime, environ=environ, **fields)


def test_apptainer_is_given_these_words_and_the_variables_under_names_of_its_own() -> None:
    assert start(APPTAINER, BOX, ENVIRON).command(TASK) == (
        [
            "/bin/apptainer", "exec", "--cleanenv", "--no-eval", "--no-mount=home,cwd",
            "--pwd=/r/code", "--bind", "/data:/d:ro", "--bind", "/r:/r:rw", "/img/torch.sif",
            *INNER,
        ],
        {**ENVIRON, "APPTAINERENV_RANK": "1", "APPTAINERENV_NCCL_DEBUG": "INFO"},
    )  # fmt: skip
    _, environ = start(APPTAINER, BOX, ENVIRON, program="/bin/singularity").command(TASK)
    assert environ["SINGULARITYENV_RANK"] == "1"


def test_podman_is_given_these_words_and_keeps_its_own_variables() -> None:
    box = replace(BOX, image="localhost/torch:2.9", gpus=True)
    assert start(PODMAN, box, ENVIRON).command(TASK) == (
        [
            "/bin/podman", "run", "--rm", "--replace", "--name=box-0", "--label=clusterddp=h01",
            "--network=host", "--ipc=host", "--cgroups=disabled", "--ulimit=host",
            "--log-driver=none", "--security-opt=label=disable",
            "--entrypoint=", "--userns=keep-id", "--workdir=/r/code",
            "--device=nvidia.com/gpu=all", "--volume=/data:/d:ro", "--volume=/r:/r",
            "--env=RANK", "--env=NCCL_DEBUG", "--preserve-fds=2", "localhost/torch:2.9",
            *INNER,
        ],
        ENVIRON,
    )  # fmt: skip


def test_podman_runs_a_folder_without_writing_into_it_and_root_as_root() -> None:
    argv, _ = start(PODMAN, Container("/img/root", workdir="/"), {}, as_root=True).probe(TASK)
    assert "--user=0:0" in argv
    assert "--userns=keep-id" not in argv
    assert argv[-9:] == ["--rootfs", "/img/root:O", "sh", "-c", 'exec "$@"', "sh", *TASK]


def test_apptainer_has_the_gpus_of_the_node() -> None:
    assert "--nv" in words(APPTAINER, Container("a.sif", gpus=True), {})


def test_the_home_of_nobody_is_a_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Mount.parse("~no-such-user/x:/x").source == str(tmp_path / "~no-such-user/x")


def test_of_two_mounts_with_one_target_the_later_counts_and_outer_ones_come_first() -> None:
    mounts = (Mount("/r/code", "/r/code", True), Mount("/r", "/r"), Mount("/mine", "/r/code"))
    assert Container("a", mounts=mounts).bound == [Mount("/r", "/r"), Mount("/mine", "/r/code")]


@pytest.mark.parametrize(
    "name", ["LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME"]
)
def test_what_belongs_to_the_hosts_software_stays_out_and_is_told(name: str) -> None:
    environ = {name: "/x", "SLURM_PROCID": "0", "CLUSTERDDP_NONCE": "n", "PYTHONUNBUFFERED": "1"}
    kept = ["SLURM_PROCID", "CLUSTERDDP_NONCE", "PYTHONUNBUFFERED"]
    assert list(container.forwarded(environ, ())) == kept
    assert container.withheld(environ, ()) == [name]
    assert list(container.forwarded(environ, [name])) == [name, *kept], "asked for"
    assert container.withheld(environ, [name]) == []


@pytest.mark.parametrize("name", ["PATH", "HOME", "XDG_RUNTIME_DIR", "BASH_FUNC_ml%%", "TMPDIR"])
def test_the_hosts_shell_and_session_stay_out_without_a_word(name: str) -> None:
    assert container.forwarded({name: "x"}, ()) == {}
    assert container.withheld({name: "x"}, ()) == []


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/a", Mount("/a", "/a")),
        ("/a:/b", Mount("/a", "/b")),
        ("/a:/b:ro", Mount("/a", "/b", True)),
        ("/a:/b:rw", Mount("/a", "/b")),
        ("a b", Mount(f"{Path.cwd()}/a b", f"{Path.cwd()}/a b")),
    ],
)
def test_a_mount_is_read(text: str, mount: Mount) -> None:
    assert Mount.parse(text) == mount
    assert Mount.parse(str(mount)) == mount


@pytest.mark.parametrize(
    "text", ["", ":", "/a:", "/a:b", "/a:/b:wr", "/a:/b:ro:x", ":/b", "/a:/", "/"]
)
def test_no_mount_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(OptionError, match=r"--container-mount: .*SRC\[:DST\[:ro\]\]"):
        Mount.parse(text)


@pytest.mark.parametrize("value", [*CARRIED, *REFUSED])
def test_a_hostile_path_is_carried_as_it_is_or_refused(value: str) -> None:
    path = f"/m/{value}"
    mount = Mount(path, path)
    try:
        mount.check()
    except OptionError as error:
        assert any(letter in value for letter in ':\\"\n\r\0\a\x1b') or value in REFUSED, error
        return
    box = Container("a", mounts=(mount,))
    assert Container.from_json(box.to_json()).mounts[0].target == path
    assert f"--volume={path}:{path}" in words(PODMAN, box, {})
    carried = words(APPTAINER, box, {})
    if "," in path:
        assert f'type=bind,"source={path}","destination={path}"' in carried
    else:
        assert f"{path}:{path}:rw" in carried


@pytest.mark.parametrize("value", CARRIED)
def test_a_hostile_word_and_value_reach_the_task_as_they_are(value: str) -> None:
    process, writer = begin("sh", "-c", 'printf %s "$1"', "sh", value)
    with process:
        assert process.communicate(timeout=60)[0] == value
    os.close(writer)
    argv, environ = start(APPTAINER, Container("a"), {"VALUE": value}).command(TASK)
    assert environ["APPTAINERENV_VALUE"] == value
    assert "--no-eval" in argv, "the runtime's shell would run it"


def begin(*task: str, shell: str = "sh") -> tuple[subprocess.Popen[str], int]:
    """Start a container's first program, without one; returns the other end of its lifeline too."""
    reader, writer = os.pipe()
    # dash has no number above 9 in a redirection.
    outer = ["bash", "-c", f'exec 3<&{reader} 4>/dev/null; exec "$@"', "bash"]
    bash = ["--posix"] if shell == "bash" else []  # as where it is the image's sh
    inner = [*outer, shell, *bash, "-c", MAIN, "sh", *task]
    process = subprocess.Popen(
        inner, pass_fds=[reader], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    os.close(reader)
    return process, writer


def test_a_task_in_a_container_ends_with_its_parent_on_the_host() -> None:
    process, writer = begin("sh", "-c", "trap '' TERM; echo begun; while :; do :; done")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.close(writer)
        assert process.wait(90) == 128 + signal.SIGKILL


@pytest.mark.parametrize("code", [0, 7, 75])
def test_the_exit_code_is_the_tasks_and_nothing_outlives_it(code: int) -> None:
    process, writer = begin("sh", "-c", f"exit {code}")
    with process:
        assert process.wait(90) == code
    readers = select.poll()
    readers.register(writer, 0)
    wait_for(lambda: readers.poll(0), "the end of what reads the lifeline")
    os.close(writer)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_signal_that_ends_the_task_leaves_its_exit_code(shell: str) -> None:
    """As Slurm signals both at once: in bash the task can be gone before its trap has run."""
    leaving = (
        "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os._exit(75)); "
        "print(flush=True); signal.pause()"
    )
    for _ in range(20):
        process, writer = begin(sys.executable, "-Sc", leaving, shell=shell)
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            os.killpg(process.pid, signal.SIGUSR1)
            assert process.wait(90) == 75
        os.close(writer)


def test_a_signal_to_the_shell_does_not_end_the_wait_for_the_task(tmp_path: Path) -> None:
    go = tmp_path / "go"
    process, writer = begin("sh", "-c", f"echo begun; until [ -e {go} ]; do :; done; exit 3")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            process.send_signal(number)
        go.touch()
        assert process.wait(90) == 3
    os.close(writer)


@pytest.mark.parametrize(
    ("asked", "image", "programs", "found"),
    [
        (AUTO, "pytorch", ["apptainer", "podman"], (APPTAINER, "apptainer")),
        (AUTO, "pytorch", ["singularity", "podman"], (APPTAINER, "singularity")),
        (AUTO, "pytorch", ["podman"], (PODMAN, "podman")),
        (AUTO, "/a.sqsh", ["podman"], (APPTAINER, "")),
        (APPTAINER, "pytorch", ["podman"], (APPTAINER, "")),
        (PODMAN, "pytorch", ["apptainer", "podman"], (PODMAN, "podman")),
    ],
)
def test_the_runtime_is_the_one_asked_for_or_the_first_on_path_that_reads_the_image(
    tmp_path: Path, asked: str, image: str, programs: list[str], found: tuple[str, str]
) -> None:
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    runtime, program = container.find_program(container.runtimes(asked, image), str(tmp_path))
    assert (runtime, program) == (found[0], f"{tmp_path}/{found[1]}" if found[1] else None)
