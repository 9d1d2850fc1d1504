"""`clusterddp import`: prints the submit line that does what an sbatch file does."""

import itertools
import json
from dataclasses import asdict

import click

from clusterddp.cli.commands import submit
from clusterddp.cli.options import held_by
from clusterddp.errors import EXIT_DONE, RequestError
from clusterddp.formatting import clean
from clusterddp.scripts import sbatch_file
from clusterddp.scripts.check import is_python, read_script
from clusterddp.scripts.submit_line import Note, SubmitLine, translate
from clusterddp.submission.fields import job_spec


@click.command(
    name="import", epilog="Exit codes: 0 there is a line, notes or not; 2 there is none."
)
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print line and notes as JSON.")
def command(file: str, as_json: bool) -> int:
    """Print the 'clusterddp submit' line that does what the sbatch script FILE does.

    Directives, modules, setup lines and environment become options. torchrun, accelerate launch,
    mpirun and the like become Slurm tasks, one per rank. Differences and omissions are printed on
    stderr with the file's line number. FILE is only read ('-' is standard input); nothing is
    submitted.
    """
    text = _text(file)
    line = translate(sbatch_file.read(text, file))
    if "\r\n" in text:
        line.note(0, "", "the file has DOS line ends, which sbatch refuses: remove them")
    if problem := refusal(line):
        line.note(0, "", f"submit refuses this line: {problem}")
    if as_json:
        fields = {
            "argv": ["clusterddp", *line.argv],
            "folder": line.folder,
            "line": line.shell,
            "notes": [asdict(note) for note in line.notes],
        }
        click.echo(json.dumps(fields, indent=2))
        return EXIT_DONE
    click.echo(clean(line.shell))
    for note in line.notes:
        click.echo(clean(f"clusterddp: {described(note)}"), err=True)
    return EXIT_DONE


def described(note: Note) -> str:
    """Word a note: `line 4: --output=%j.out: logs lie in …`."""
    where = f"line {note.line}" if note.line else ""
    return ": ".join(part for part in (where, note.source, note.why) if part)


def refusal(line: SubmitLine) -> str:
    """Return why submit would refuse the line; empty if it accepts it. Changes nothing."""
    argv = line.argv[1:]
    for at, (flag, value) in enumerate(itertools.pairwise(argv)):
        if flag == "--env" and "=" not in value:  # it is set once the line is typed
            argv[at + 1] = f"{value}="
    try:
        with submit.command.make_context("submit", argv) as ctx:
            job_spec(held_by(ctx), "imported")
    except (click.ClickException, RequestError) as error:
        return error.message if isinstance(error, click.ClickException) else str(error)
    return ""


def _text(name: str) -> str:
    """Read the file. Raises RequestError if it is not an sbatch script."""
    text = read_script(name)
    if is_python(name, text):
        raise RequestError(f"{name!r} is Python: give the sbatch file that starts it. [CD0315]")
    if "\n#REQUEST " in text:
        raise RequestError(
            f"{name!r} is a script of clusterddp's own: queue it with sbatch, or its run with "
            "clusterddp resume. [CD0315]"
        )
    return text
