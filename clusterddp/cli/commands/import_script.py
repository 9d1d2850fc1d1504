"""`clusterddp import`: converts an sbatch script into a submit line."""

import itertools
import json
from dataclasses import asdict

import click

from clusterddp.cli.commands import submit
from clusterddp.cli.options import given_by
from clusterddp.errors import EXIT_DONE, RequestError
from clusterddp.formatting import clean
from clusterddp.scripts import sbatch_file
from clusterddp.scripts.check import is_python, read_script
from clusterddp.scripts.submit_line import Note, SubmitLine, translate
from clusterddp.submission.fields import job_spec


@click.command(name="import")
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print line and notes as JSON.")
def command(file: str, as_json: bool) -> int:
    """Print a 'clusterddp submit' line that is equivalent to the sbatch script FILE.

    Directives, modules, setup lines and environment become options. torchrun, accelerate launch,
    mpirun and the like become Slurm tasks, one per rank. Differences and omissions are printed on
    stderr with the file's line number. FILE is only read ('-' is standard input); nothing is
    submitted.

    Exit codes: 0 a line is printed; 2 FILE cannot be converted.
    """
    text = _text(file)
    line = translate(sbatch_file.read(text, file))
    if "\r\n" in text:
        line.note(0, "", "the file has DOS line endings, which sbatch rejects: remove them")
    if problem := refusal(line):
        line.note(0, "", f"submit refuses this line: {problem}")
    if as_json:
        fields = {
            "argv": ["clusterddp", *line.argv],
            "directory": line.directory,
            "line": line.shell,
            "notes": [asdict(note) for note in line.notes],
        }
        click.echo(json.dumps(fields, indent=2))
        return EXIT_DONE
    click.echo(clean(line.shell))
    for note in line.notes:
        click.echo(clean(f"clusterddp: {format_note(note)}"), err=True)
    return EXIT_DONE


def format_note(note: Note) -> str:
    """Format a note: `line 4: --output=%j.out: logs are in …`."""
    where = f"line {note.line}" if note.line else ""
    return ": ".join(part for part in (where, note.source, note.why) if part)


def refusal(line: SubmitLine) -> str:
    """Return why submit would refuse the line; empty if it accepts it. Changes nothing."""
    argv = line.argv[1:]
    for at, (flag, value) in enumerate(itertools.pairwise(argv)):
        if flag == "--env" and "=" not in value:  # it will be set when the line is typed
            argv[at + 1] = f"{value}="
    try:
        with submit.command.make_context("submit", argv) as ctx:
            job_spec(given_by(ctx), "imported")
    except (click.ClickException, RequestError) as error:
        return error.message if isinstance(error, click.ClickException) else str(error)
    return ""


def _text(name: str) -> str:
    """Read the file. Raises RequestError if it is not an sbatch script."""
    text = read_script(name)
    if is_python(name, text):
        raise RequestError(
            f"{name!r} is a Python file. Give the sbatch file that starts it. [CD0315]"
        )
    if "\n#REQUEST " in text:
        raise RequestError(
            f"{name!r} is already a script of clusterddp. Submit it with sbatch, or resume its run "
            "with clusterddp resume. [CD0315]"
        )
    return text
