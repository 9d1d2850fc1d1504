"""The words of each runtime, what is passed on, and what cannot be carried."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from clusterddp.errors import OptionError, TrainingError
from clusterddp.processes import container
from clusterddp.processes.container import (
    APPTAINER,
    AUTO,
    MAIN,
    PODMAN,
    PYXIS,
    Container,
    Mount,
    choose,
)
from tests.hostile import CARRIED, REFUSED

TASK = ["python3", "run.pyz", "train"]
BOX = Container("/img/torch.sif", (Mount("/r", "/r"), Mount("/data", "/d", True)), "/r/code")
ENVIRON = {"RANK": "1", "PYTHONPATH": "/mine", "HOME": "/home/me", "NCCL_DEBUG": "INFO"}
INNER = ["sh", "-c", MAIN, "sh", *TASK]


def words(runtime: str, box: Container, environ: dict[str, str], **more: object) -> list[str]:
    return _words(runtime, box, environ, **more)[0]


def _words(
    runtime: str, box: Container, environ: dict[str, str], **more: object
) -> tuple[list[str], dict[str, str]]:
    fields = {"program": f"/bin/{runtime}", "name": "box-0", "uid": 1000, **more}
    return container.words(runtime, box, TASK, environ, **fields)  # type: ignore[arg-type]


def test_apptainer_is_given_these_words_and_the_variables_under_names_of_its_own() -> None:
    assert _words(APPTAINER, BOX, ENVIRON) == (
        [
            "/bin/apptainer", "exec", "--cleanenv", "--no-eval", "--no-mount=home,cwd",
            "--pwd=/r/code", "--bind", "/data:/d:ro", "--bind", "/r:/r:rw", "/img/torch.sif",
            *INNER,
        ],
        {**ENVIRON, "APPTAINERENV_RANK": "1", "APPTAINERENV_NCCL_DEBUG": "INFO"},
    )  # fmt: skip
    _, environ = _words(APPTAINER, BOX, ENVIRON, program="/bin/singularity")
    assert environ["SINGULARITYENV_RANK"] == "1"


def test_podman_is_given_these_words_and_keeps_its_own_variables() -> None:
    box = Container("localhost/torch:2.9", BOX.mounts, BOX.workdir, gpus=True)
    assert _words(PODMAN, box, ENVIRON) == (
        [
            "/bin/podman", "run", "--rm", "--replace", "--name=box-0", "--label=clusterddp",
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
    argv = words(PODMAN, Container("/img/root", workdir="/"), {}, uid=0, lifeline=False)
    assert "--user=0:0" in argv
    assert "--userns=keep-id" not in argv
    assert argv[-9:] == ["--rootfs", "/img/root:O", "sh", "-c", 'exec "$@"', "sh", *TASK]


def test_pyxis_is_given_these_arguments_of_srun() -> None:
    # As in the README of NVIDIA/pyxis, "Usage"; not run.
    assert container.pyxis_arguments(BOX) == [
        "--container-image=/img/torch.sif",
        "--container-mounts=/data:/d:ro,/r:/r",
        "--container-workdir=/r/code",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    ]
    assert container.without_variables(["PYTHONPATH"]) == ["env", "-uPYTHONPATH"]
    assert container.without_variables([]) == []


def test_apptainer_has_the_gpus_of_the_node() -> None:
    assert "--nv" in words(APPTAINER, Container("a.sif", gpus=True), {})


def test_of_two_mounts_with_one_target_the_later_counts_and_outer_ones_come_first() -> None:
    mounts = (Mount("/r/code", "/r/code", True), Mount("/r", "/r"), Mount("/mine", "/r/code"))
    assert Container("a", mounts).bound == [Mount("/r", "/r"), Mount("/mine", "/r/code")]


@pytest.mark.parametrize(
    "name", ["LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME"]
)
def test_what_belongs_to_the_hosts_software_stays_out_and_is_told(name: str) -> None:
    environ = {name: "/x", "SLURM_PROCID": "0", "CLUSTERDDP_NONCE": "n", "PYTHONUNBUFFERED": "1"}
    kept = ["SLURM_PROCID", "CLUSTERDDP_NONCE", "PYTHONUNBUFFERED"]
    assert list(container.passed_on(environ, ())) == kept
    assert container.kept_out(environ, ()) == [name]
    assert list(container.passed_on(environ, [name])) == [name, *kept], "asked for"
    assert container.kept_out(environ, [name]) == []


@pytest.mark.parametrize("name", ["PATH", "HOME", "XDG_RUNTIME_DIR", "BASH_FUNC_ml%%", "TMPDIR"])
def test_the_hosts_shell_and_session_stay_out_without_a_word(name: str) -> None:
    assert container.passed_on({name: "x"}, ()) == {}
    assert container.kept_out({name: "x"}, ()) == []


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


@pytest.mark.parametrize("text", ["", ":", "/a:", "/a:b", "/a:/b:wr", "/a:/b:ro:x", ":/b"])
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
    box = Container("a", (mount,))
    assert f"--volume={path}:{path}" in words(PODMAN, box, {})
    carried = words(APPTAINER, box, {})
    if "," in path:
        assert f'type=bind,"source={path}","destination={path}"' in carried
        with pytest.raises(OptionError, match="pyxis"):
            container.pyxis_arguments(box)
    else:
        assert f"{path}:{path}:rw" in carried


@pytest.mark.parametrize("value", CARRIED)
def test_a_hostile_word_and_value_reach_the_task_as_they_are(value: str) -> None:
    process, writer = start("sh", "-c", 'printf %s "$1"', "sh", value)
    with process:
        assert process.communicate(timeout=60)[0] == value
    os.close(writer)
    argv, environ = _words(APPTAINER, Container("a"), {"VALUE": value})
    assert environ["APPTAINERENV_VALUE"] == value
    assert "--no-eval" in argv, "the runtime's shell would run it"


def start(*task: str) -> tuple[subprocess.Popen[str], int]:
    """Start a container's first process, without one; returns the other end of its lifeline too."""
    reader, writer = os.pipe()
    # dash has no number above 9 in a redirection.
    inner = [
        "bash",
        "-c",
        f'exec 3<&{reader} 4>/dev/null; exec "$@"',
        "bash",
        "sh",
        "-c",
        MAIN,
        "sh",
        *task,
    ]
    process = subprocess.Popen(inner, pass_fds=[reader], stdout=subprocess.PIPE, text=True)
    os.close(reader)
    return process, writer


def test_a_task_in_a_container_ends_with_its_parent_on_the_host() -> None:
    process, writer = start("sh", "-c", "trap '' TERM; echo begun; while :; do :; done")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        os.close(writer)
        assert process.wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("code", [0, 7, 75])
def test_the_exit_code_is_the_tasks(code: int) -> None:
    process, writer = start("sh", "-c", f"exit {code}")
    with process:
        assert process.wait(60) == code
    os.close(writer)


def test_a_signal_to_the_shell_does_not_end_the_wait_for_the_task(tmp_path: Path) -> None:
    go = tmp_path / "go"
    process, writer = start("sh", "-c", f"echo begun; until [ -e {go} ]; do :; done; exit 3")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            process.send_signal(number)
        go.touch()
        assert process.wait(60) == 3
    os.close(writer)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH without anything on it yet."""
    return tmp_path


def provide(path: Path, *programs: str) -> str:
    for name in programs:
        (path / name).touch(mode=0o755)
    return str(path)


PYXIS_HELP = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"


@pytest.mark.parametrize(
    ("programs", "help_text", "image", "chosen"),
    [
        (["apptainer", "podman"], PYXIS_HELP, "pytorch", PYXIS),
        (["apptainer", "podman"], "", "pytorch", APPTAINER),
        (["singularity", "podman"], "", "pytorch", APPTAINER),
        (["podman"], "--container=PATH", "pytorch", PODMAN),
        (["apptainer"], PYXIS_HELP, "/img/torch.sif", APPTAINER),
        (["apptainer", "podman"], PYXIS_HELP, "/img/torch.sqsh", PYXIS),
    ],
)
def test_auto_takes_what_is_there_for_the_image(
    path: Path, programs: list[str], help_text: str, image: str, chosen: str
) -> None:
    assert choose(AUTO, image, provide(path, *programs), help_text, "h01") == chosen


@pytest.mark.parametrize(
    ("runtime", "image", "programs"),
    [(AUTO, "pytorch", []), (AUTO, "/a.sif", ["podman"]), (PODMAN, "/a.sqsh", ["podman"]),
     (APPTAINER, "a", ["podman"]), (PYXIS, "a", ["apptainer"])],
)  # fmt: skip
def test_where_no_runtime_is_the_error_names_node_image_and_remedy(
    path: Path, runtime: str, image: str, programs: list[str]
) -> None:
    with pytest.raises(TrainingError) as refused:
        choose(runtime, image, provide(path, *programs), "", "h07")
    for part in ("h07", image, "--container-runtime"):
        assert part in str(refused.value)
