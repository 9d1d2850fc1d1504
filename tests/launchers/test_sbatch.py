"""Scripts: what a template becomes, how values are quoted, how a faulty template is blamed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2.compiler
import pytest

from clusterddp.errors import RequestError
from clusterddp.launchers import sbatch
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep
from tests.hostile import CARRIED, REFUSED
from tests.request.test_spec import spec

TEMPLATES = ("ddp.sbatch.j2", "torchrun.sbatch.j2")
FULL: dict[str, Any] = {
    "resources": Resources(nodes=2, gpus_per_node=2, cpus_per_task=3, time="10", exclusive=True),
    "environment": tuple((f"K{i}", value) for i, value in enumerate(CARRIED)),
    "pass_environment": ("HOME",),
    "modules": ("cuda/12.4",),
    "setup": ("echo set-up",),
    "teardown": ("echo tear-down",),
    "network_interface": "ib0",
    "wrapper": ("env", "A=b c"),
    "srun_args": ("--label",),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        FULL,
        {"command": ("python", *CARRIED)},
        {"sweep": Sweep(("weight-decay",), (("0",), ("0.1",)))},
    ],
)
def test_the_script_is_sound_shell(template: str, fields: dict[str, Any]) -> None:
    script = sbatch.render(spec(template=template, **fields))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if shutil.which("shellcheck") or os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        checked = subprocess.run(
            # Quotes keep every value as it was typed, and set-up lines may use what a trial varies.
            ["shellcheck", "--exclude=SC1003,SC2016,SC2034", "-"],
            input=script, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert checked.stdout == ""


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    ("wanted", "gloo"),
    [("ib0", "ib0"), ("=ib0", "ib0"), ("=ib0,ib1", "ib0,ib1"), ("^docker0", ""), ("^=lo", "")],
)
def test_gloo_is_given_plain_names_of_interfaces(template: str, wanted: str, gloo: str) -> None:
    script = sbatch.render(spec(template=template, network_interface=wanted))
    line = "\n".join(each for each in script.split("\n") if "SOCKET_IFNAME" in each)
    show = 'printf "%s|%s" "$NCCL_SOCKET_IFNAME" "${GLOO_SOCKET_IFNAME-}"'
    seen = subprocess.run(
        ["bash", "-c", f"{line}\n{show}"], capture_output=True, text=True, check=True, env={}
    )
    assert seen.stdout == f"{wanted}|{gloo}"


@pytest.mark.parametrize("value", CARRIED)
def test_an_environment_value_reaches_bash_as_it_is(value: str, tmp_path: Path) -> None:
    line = next(
        part
        for part in sbatch.render(spec(environment=(("VALUE", value),))).split("\n")
        if part.startswith("export VALUE=")
    )
    seen = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$VALUE"'],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert seen.stdout == value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_value_of_a_trial_reaches_bash_as_it_is(template: str, tmp_path: Path) -> None:
    sweep = Sweep(("v", "n-m"), tuple((v, str(i)) for i, v in enumerate(CARRIED)))
    words = ("prog", "{v}", "it's {v}{n-m} {x}", "end")
    script = sbatch.render(spec(template=template, command=words, sweep=sweep))
    table = script[script.index("\ncase ") : script.index("\nesac\n") + 6]
    for i, value in enumerate(CARRIED):
        given = started(script, tmp_path, f"SLURM_ARRAY_TASK_ID={i}\n{table}")
        if template != TEMPLATES[0]:  # as an agent reads it
            given = [word.replace("$$", "$") for word in given]
        assert given[-4:] == ["prog", value, f"it's {value}{i} {{x}}", "end"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("value", CARRIED)
def test_a_command_word_reaches_bash_as_it_is(value: str, template: str, tmp_path: Path) -> None:
    script = sbatch.render(spec(command=("prog", value, "end"), template=template))
    given = started(script, tmp_path)
    if template != TEMPLATES[0]:
        given = [word.replace("$$", "$") for word in given]
    assert given[-3:] == ["prog", value, "end"]
    assert list(tmp_path.iterdir()) == []


def started(script: str, folder: Path, ahead: str = "") -> list[str]:
    """Return the words that bash gives to srun in the script's last command."""
    line = script[script.index("\nsrun ") :]
    seen = subprocess.run(
        ["bash", "-c", f"srun() {{ printf '%s\\0' \"$@\"; }}\n{ahead}\n{line}"],
        capture_output=True, text=True, check=True, cwd=folder,
    )  # fmt: skip
    return seen.stdout.split("\0")[:-1]


@pytest.mark.parametrize("value", CARRIED)
def test_a_directive_is_one_line_in_slurms_quoting(value: str) -> None:
    line = sbatch.directive("comment", value)
    assert "\n" not in line
    assert read_as_slurm_does(line) == f"--comment={value}"


@pytest.mark.parametrize("value", REFUSED)
def test_a_directive_that_would_become_two_lines_is_refused(value: str) -> None:
    with pytest.raises(RequestError, match="--comment"):
        sbatch.directive("comment", value)


def test_a_directive_longer_than_slurms_buffer_is_refused() -> None:
    with pytest.raises(RequestError, match="8001 bytes"):
        sbatch.directive("comment", "x" * 8001)


@pytest.mark.parametrize(
    ("style", "ddp", "torchrun"),
    [
        ("gpus-per-node", "--gpus-per-node=a100:4", "--gpus-per-node=a100:4"),
        ("gres", "--gres=gpu:a100:4", "--gres=gpu:a100:4"),
        ("gpus-per-task", "--gpus-per-task=a100:1", "--gpus-per-task=a100:4"),
    ],
)
def test_each_style_asks_for_the_same_gpus(style: str, ddp: str, torchrun: str) -> None:
    request = spec(
        resources=Resources(nodes=2, gpus_per_node=4, gpu_type="a100", gpu_directive=style)
    )
    assert ddp in sbatch.directives(request)
    assert torchrun in sbatch.directives(request, agents=True)


def test_an_agent_gets_the_cpus_of_all_its_ranks() -> None:
    request = spec(resources=Resources(nodes=2, tasks_per_node=4, cpus_per_task=3))
    assert "--cpus-per-task=3" in sbatch.directives(request)
    assert "--cpus-per-task=12" in sbatch.directives(request, agents=True)
    assert "--ntasks=2" in sbatch.directives(request, agents=True)


@pytest.mark.parametrize(
    ("resources", "fields", "cpus"),
    [
        ({"tasks_per_node": 4, "cpus_per_task": 3}, {}, 12),
        ({"gpus_per_node": 4}, {}, 4),  # as one task it would get one, with all its ranks
        ({"tasks_per_node": 4}, {}, 4),
        ({"gpus_per_node": 1}, {}, 0),
        ({"gpus_per_node": 4, "exclusive": True}, {}, 0),  # a number would take the others away
        ({"gpus_per_node": 4}, {"sbatch": (("cpus-per-gpu", "6"),)}, 0),
        ({"gpus_per_node": 4}, {"omit_directives": ("cpus-per-task",)}, 0),
    ],
)
def test_an_agent_has_a_cpu_for_each_of_its_ranks(
    resources: dict[str, Any], fields: dict[str, Any], cpus: int
) -> None:
    request = spec(
        resources=Resources(nodes=2, **resources), template="torchrun.sbatch.j2", **fields
    )
    asked = re.findall(r"--cpus-per-task=(\d+)", sbatch.render(request))
    assert asked == ([str(cpus)] * 2 if cpus else [])


@pytest.mark.parametrize(
    ("style", "fields", "all_gpus"),
    [
        ("gpus-per-task", {}, True),
        ("gpus-per-task", {"srun_args": ("--gpu-bind=closest",)}, True),
        ("gpus-per-task", {"sbatch": (("gpu-bind", "closest"),)}, False),
        ("gpus-per-task", {"sbatch": (("tres-bind", "gres/gpu:closest"),)}, False),
        ("gpus-per-node", {}, False),
        ("gres", {}, False),
    ],
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_task_that_asks_for_its_own_gpus_is_shown_all_unless_it_is_bound_on_purpose(
    template: str, style: str, fields: dict[str, Any], all_gpus: bool
) -> None:
    """What Slurm 22.05, 24.11 and 26.05 bind tasks by: srun goes by what the job was given."""
    resources = Resources(gpus_per_node=4, gpu_directive=style)
    script = sbatch.render(spec(resources=resources, template=template, **fields))
    names = "SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_TRES_BIND"
    assert (f"\nunset {names} " in script) is all_gpus


def test_a_directive_can_be_left_out() -> None:
    request = spec(resources=Resources(mem="1G"), omit_directives=("mem", "comment"))
    lines = sbatch.directives(request)
    assert not [line for line in lines if line.startswith(("--mem", "--comment"))]


def test_without_the_shells_variables_only_those_passed_by_name_come_along() -> None:
    assert "--export=NONE" in sbatch.directives(spec(export="NONE"))
    assert "--export=A,B" in sbatch.directives(spec(export="NONE", pass_environment=("A", "B")))


@dataclass
class Compiled:
    """Where the compiled forms of the shipped templates are kept, and what was compiled."""

    folder: Path
    compilations: list[str] = field(default_factory=list)


def own(folder: Path, content: str) -> str:
    (folder / "own.sbatch.j2").write_text(content)
    return "own.sbatch.j2"


def test_a_misspelt_block_is_refused_with_those_there_are(tmp_path: Path) -> None:
    middle = (
        '{% extends "shipped/torchrun.sbatch.j2" %}\n'
        "{% block setup %}{% block stage %}{% endblock %}{{ super() }}{% endblock %}\n"
    )
    (tmp_path / "middle.j2").write_text(middle)
    for parent, blocks, misspelt in (
        ("shipped/ddp.sbatch.j2", ["setup"], "setupp"),
        ("shipped/torchrun.sbatch.j2", ["launch", "teardown"], "direktives"),
        ("middle.j2", ["stage", "environment"], "stages"),
    ):
        good = "".join(
            f"{{% block {name} %}}{name} echo {name}\n{{% endblock %}}" for name in blocks
        )
        text = f'{{% extends "{parent}" %}}\n{good}\n'
        script = sbatch.render(spec(template=own(tmp_path, text)), tmp_path)
        assert all(f"echo {name}\n" in script for name in blocks)
        bad = text + f"{{% block {misspelt} %}}x{{% endblock %}}\n"
        with pytest.raises(RequestError) as caught:
            sbatch.render(spec(template=own(tmp_path, bad)), tmp_path)
        lines = bad.split("\n")
        line = next(n for n, text in enumerate(lines, 1) if f"block {misspelt}" in text)
        assert f"own.sbatch.j2, line {line}: there is no block {misspelt!r}" in str(caught.value)
        assert "directives, teardown, environment, setup, launch" in str(caught.value)
        assert "Did you mean" in str(caught.value)


def test_an_own_template_replaces_one_block(tmp_path: Path) -> None:
    name = own(
        tmp_path,
        '{% extends "shipped/ddp.sbatch.j2" %}\n{% block setup %}echo mine\n{% endblock %}\n',
    )
    script = sbatch.render(spec(template=name, setup=("echo theirs",)), tmp_path)
    assert "\necho mine\n" in script
    assert "\necho theirs\n" not in script
    assert "srun --nodes=1" in script


def test_an_own_launch_block_has_the_words_of_srun_and_of_the_tasks(tmp_path: Path) -> None:
    block = "srun prepare\n{{ srun | command }} --label -- numactl {{ task | command }}"
    extends = '{% extends "shipped/ddp.sbatch.j2" %}'
    name = own(tmp_path, f"{extends}{{% block launch %}}\n{block}\n{{% endblock %}}")
    script = sbatch.render(spec(template=name, command=("true",)), tmp_path)
    assert script.endswith(
        "\nsrun prepare\nsrun --nodes=1 --ntasks=1 --ntasks-per-node=1 --export=ALL "
        "--kill-on-bad-exit=1 --unbuffered \\\n"
        '  --open-mode=append --output="$run_dir/logs/rank-%t.log" --label -- numactl '
        '/usr/bin/python3 "$own" exec --run-dir="$run_dir" -- true\n'
    )


def test_an_own_launch_block_without_the_nodes_of_the_step_takes_no_spares(tmp_path: Path) -> None:
    extends = '{% extends "shipped/ddp.sbatch.j2" %}'
    name = own(tmp_path, f"{extends}{{% block launch %}}\nsrun a\n{{% endblock %}}")
    sbatch.render(spec(template=name), tmp_path)
    with pytest.raises(RequestError, match="does not tell srun its nodes"):
        sbatch.render(spec(template=name, resources=Resources(nodes=2, spare_nodes=1)), tmp_path)


def test_a_template_that_ignores_the_copy_of_the_environment_is_refused(tmp_path: Path) -> None:
    name = own(tmp_path, "#!/bin/bash\nsrun /shared/env/bin/python train.py\n")
    asked = spec(template=name, stage_env="auto", python="/shared/env/bin/python")
    with pytest.raises(RequestError, match="does not start the tasks from the copy"):
        sbatch.render(asked, tmp_path)


def test_srun_labels_the_lines_of_a_nodes_log(tmp_path: Path) -> None:
    script = sbatch.render(spec(log_per="node"), tmp_path)
    assert "--label --open-mode=append" in " ".join(script.split()).replace("\\ ", "")
    assert '--output="$run_dir/logs/node-%n.log"' in script
    assert "--unbuffered" not in script
    with pytest.raises(RequestError, match="does not let srun label"):
        sbatch.render(spec(log_per="node", template="torchrun.sbatch.j2"), tmp_path)
    for launcher in ("local", "submitit"):
        with pytest.raises(RequestError, match=f"conflicts with --launcher {launcher}"):
            spec(log_per="node", launcher=launcher)


@pytest.mark.parametrize(
    ("most", "fields"),
    [
        (27, {}),
        (36, {"command": ("python", "train.py", "--lr", "0.1")}),
        (36, {"container_image": "docker://pytorch/pytorch:2.9"}),
        (36, {"sweep": Sweep(("lr",), (("0.1",), ("0.01",), ("0.001",)))}),
    ],
)
def test_the_script_is_short(most: int, fields: dict[str, Any]) -> None:
    resources = Resources(nodes=2, gpus_per_node=4, tasks_per_node=4)
    more = {"requeue": True, "signal": "B:USR1@120"}
    lines = sbatch.render(spec(resources=resources, **more, **fields)).splitlines()
    assert len(lines) <= most
    long = [line for line in lines if len(line) > 100 and not line.startswith("#REQUEST")]
    assert not [line for line in long if "--container" not in line and "echo" not in line]


def test_an_own_template_can_stand_in_for_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "ddp.sbatch.j2").write_text(
        '{% extends "shipped/ddp.sbatch.j2" %}{% block launch %}echo instead\n{% endblock %}'
    )
    assert "echo instead" in sbatch.render(spec(), tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "#!/bin/bash\n\n{{ partitoin }}\n",
            ["own.sbatch.j2, line 3", "'partitoin' is undefined. docs/templates.md lists"],
        ),
        ("#!/bin/bash\n{{ resources.node }}\n", ["own.sbatch.j2, line 2", "node"]),
        ("#!/bin/bash\n{% if %}\n", ["own.sbatch.j2, line 2"]),
        ("#!/bin/bash\n{{ 1 // 0 }}\n", ["own.sbatch.j2, line 2", "ZeroDivisionError"]),
        ("#!/bin/bash\n{{ spec | nonsense }}\n", ["own.sbatch.j2, line 2", "nonsense"]),
        ("#!/bin/bash\n{% extends 'gone.j2' %}\n", ["gone.j2", "ddp.sbatch.j2"]),
        ("echo no shebang\n", ["#!/bin/bash"]),
        ("#!/bin/bash\necho hi\n#SBATCH --nodes=1\n", ["line 3", "after the first command"]),
    ],
)
def test_a_faulty_template_is_blamed_by_file_and_line(
    tmp_path: Path, content: str, words: list[str]
) -> None:
    name = own(tmp_path, content)
    with pytest.raises(RequestError) as caught:
        sbatch.render(spec(template=name), tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_a_template_with_crlf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.sbatch.j2").write_bytes(b"#!/bin/bash\r\n")
    script_spec = spec(template="own.sbatch.j2", setup=("x",))
    # Jinja itself turns the template's own line ends into plain ones.
    assert sbatch.render(script_spec, tmp_path) == "#!/bin/bash\n"


def test_a_template_that_is_not_there_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"gone\.j2.*torchrun\.sbatch\.j2"):
        sbatch.render(spec(template="gone.j2"))


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Compiled templates lie in a directory of the test's own, and compilations are counted."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    seen = Compiled(tmp_path / "prefix" / sbatch.shipped_folder().relative_to("/"))
    compile_source = jinja2.Environment._compile

    def counted(self: Any, source: str, filename: str) -> Any:
        seen.compilations.append(Path(filename).name)
        return compile_source(self, source, filename)

    monkeypatch.setattr(jinja2.Environment, "_compile", counted)
    return seen


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_shipped_template_is_compiled_once_and_renders_the_same(
    compiled: Compiled, template: str
) -> None:
    first = sbatch.render(spec(template=template, **FULL))
    kept = len(compiled.compilations)
    assert len(list(compiled.folder.iterdir())) == kept > 0
    assert sbatch.render(spec(template=template, **FULL)) == first
    assert len(compiled.compilations) == kept


def test_an_own_template_is_compiled_anew_where_it_has_changed_and_its_parent_is_not(
    compiled: Compiled, tmp_path: Path
) -> None:
    for text in ("", "", "more"):
        name = own(tmp_path, '{% extends "shipped/ddp.sbatch.j2" %}' + text)
        sbatch.render(spec(template=name), tmp_path)
    assert sorted(compiled.compilations) == ["ddp.sbatch.j2", name, name]


@pytest.mark.parametrize("keep", [0, 20, 100, -1])
def test_a_torn_compiled_template_is_made_anew(compiled: Compiled, keep: int) -> None:
    first = sbatch.render(spec())
    [path] = compiled.folder.iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert sbatch.render(spec()) == first
    assert sbatch.render(spec()) == first
    assert compiled.compilations == ["ddp.sbatch.j2"] * 2


def test_every_user_of_an_installation_can_read_what_is_compiled(compiled: Compiled) -> None:
    sbatch.render(spec())
    [path] = compiled.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644


def test_where_nothing_can_or_shall_be_kept_it_renders_all_the_same(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        first = sbatch.render(spec())
    assert not compiled.folder.exists()
    (tmp_path / "prefix").write_text("no folder")
    assert sbatch.render(spec()) == first
    assert compiled.compilations == ["ddp.sbatch.j2"] * 2


def read_as_slurm_does(line: str) -> str:
    """What Slurm's own reader of directives makes of a line."""
    out, quote, position = "", "", 0
    while position < len(line):
        char = line[position]
        if char == "\\":
            position += 1
            out += line[position]
        elif quote and char == quote:
            quote = ""
        elif not quote and char in "\"'":
            quote = char
        elif not quote and (char.isspace() or char == "#"):
            break
        else:
            out += char
        position += 1
    assert not quote
    return out


@pytest.mark.parametrize("value", CARRIED)
def test_a_script_gives_back_what_was_asked(value: str) -> None:
    asked = spec(setup=(f"A={shlex.quote(value)}",), command=("run", value), train=None)
    assert JobSpec.from_script(sbatch.render(asked), asked.run_dir) == asked
