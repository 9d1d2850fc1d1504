"""`clusterddp doctor`: checks this machine and site before runs are submitted."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp import log
from clusterddp.cli.commands import submit
from clusterddp.cli.options import held_by, options
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, RequestError
from clusterddp.request import sites
from clusterddp.request.options import Given, Settings, find_site, lacking, read_site
from clusterddp.request.spec import OPTIONS
from clusterddp.submission.fields import interpreter, job_spec, template_folder

if TYPE_CHECKING:
    from clusterddp.doctor.site_checks import Check, Diagnosis

_NAMES = (
    *("partition", "account", "qos", "nodes", "gpus-per-node", "gpu-directive"),
    *("python", "runs-dir", "dataset", "data-dir"),
)
_PROPOSED = tuple(name for name in _NAMES if name not in ("nodes", "gpus-per-node"))


@click.command(name="doctor")
@options([OPTIONS[name] for name in _NAMES], settings=False, defaults=False)
@click.option(
    "--site", metavar="FILE", help="The site.cfg to use; 'clusterddp site' shows which it is."
)
@click.option("--cluster", metavar="NAME", help="The [cluster:NAME] of site.cfg to use.")
@click.option("--write", metavar="FILE", help="Propose a site.cfg; never overwrites.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
def command(write: str | None, as_json: bool, **given: object) -> int:
    """Check this account, Slurm, the directories and the Python; queue nothing.

    Run it on a login node; elsewhere it checks only what it can without Slurm. Settings come from
    variables, site.cfg and defaults, as for a submission. It takes at most a minute. For the
    meaning of each line see docs/doctor.md.

    Exit codes: 0 nothing is bad, 1 something is, 2 usage error.
    """
    from clusterddp.doctor import examine
    from clusterddp.doctor import site_checks as found

    before = None
    if write is not None:
        _check_place(write)
        with contextlib.suppress(RequestError):  # the variable names a file that is not there
            before = find_site(None, os.environ, Path.cwd())
    args = [f"--{name.replace('_', '-')}={v}" for name, v in given.items() if v is not None]
    try:
        ctx = submit.command.make_context("submit", args)
    except click.UsageError as error:
        raise RequestError(error.format_message(), code="CD0101") from None
    held = held_by(ctx)
    spec, given_before = job_spec(held, "doctor"), _in_force(held)
    if sys.stderr.isatty():
        click.echo("clusterddp: asking Slurm and importing torch: a minute at most", err=True)
    diagnosis = examine.examine(spec, template_folder(held))
    text = found.site_cfg(diagnosis, given_before)
    if as_json:
        checks = [dataclasses.asdict(check) for check in diagnosis.checks]
        record = {"verdict": diagnosis.verdict, "checks": checks, "site_cfg": text}
        click.echo(json.dumps(record, indent=2))
    else:
        click.echo("\n".join(map(_wrapped, diagnosis.checks)))
        if isinstance(ctx.obj, Settings) and ctx.obj.path is None:
            _name_files_that_fit(diagnosis)
    if write is not None:
        _write(write, text, found.proposed(diagnosis, given_before))
        if before is not None:
            _warn_of_hidden(before)
        shown = f"clusterddp site --site {shlex.quote(write)}"
        click.echo(f"clusterddp: wrote {write}; read it, then look at: {shown}", err=True)
    return EXIT_FAILED if diagnosis.verdict == found.BAD else EXIT_DONE


def _name_files_that_fit(diagnosis: "Diagnosis") -> None:
    clusters = [str(check.facts.get("cluster", "")) for check in diagnosis.checks]
    known = sites.read_sites()
    for name in sites.fitting(known, "".join(clusters), socket.gethostname()):
        words = f"this may be {known[name].title}; its settings: clusterddp site use {name}"
        click.echo(f"clusterddp: {words}", err=True)


def _wrapped(check: "Check") -> str:
    """Return the lines of a check, wrapped at the terminal's width."""
    from clusterddp import formatting

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    head = f"{check.verdict:<7}  {check.name:<14}  "
    text = formatting.line(_words(check.seen, check.advice))
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _words(seen: str, advice: str) -> str:
    return f"{seen}. To do: {advice}" if advice else seen


def _in_force(held: Given) -> dict[str, str]:
    """Return the settings that are not defaults, with absolute paths."""
    rows = [OPTIONS[name] for name in _PROPOSED]
    given = {
        row.name: str(held.values[row.parameter])
        for row in rows
        if row.parameter in held.sources and held.values[row.parameter]
    }
    for name in ("runs-dir", "data-dir"):
        if name in given:
            given[name] = os.path.abspath(given[name])
    if "python" in given:
        given["python"] = interpreter(given["python"])
    return given


def _check_place(name: str) -> None:
    """Refuse, before anything is checked, a file that cannot be written or is there already."""
    if os.path.lexists(name):
        raise RequestError(f"--write: {name!r} already exists. Name another file. [CD0108]")
    if not name or not Path(name).parent.is_dir():
        raise RequestError(f"--write: the folder of {name!r} is not there. Make it first. [CD0108]")


def _warn_of_hidden(before: Path) -> None:
    """Warn where the new file takes the place of one that was in force, and lacks settings of it.

    before: the file that was in force.
    """
    now = find_site(None, os.environ, Path.cwd())
    if now is None or now.samefile(before):
        return
    from clusterddp import formatting

    missing = lacking(now, before, OPTIONS)
    number = formatting.count(len(missing), "setting")
    lacks = f", and lacks {number} of it: {', '.join(missing)}" if missing else ""
    log.warning(
        f"{now} hides {before} from now on, as one file alone is read{lacks}. Copy what you need, "
        "or remove the new file. [CD0207]"
    )


def _write(name: str, text: str, settings: Mapping[str, str]) -> None:
    """Write a new file that says these settings; raises RequestError, and then leaves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, "site.cfg")
        draft.write_text(text, encoding="utf-8")
        read = read_site(draft, None, OPTIONS).values
    for key, value in settings.items():
        if read.get(key) != value:
            raise RequestError(
                f"--write: site.cfg cannot carry {key} = {value!r}. Leave it out. [CD0201]"
            )
    try:
        with open(name, "x", encoding="utf-8") as file:  # noqa: PTH123 -- never over a file
            file.write(text)
    except FileExistsError:
        raise RequestError(
            f"--write: {name!r} already exists. Name another file. [CD0108]"
        ) from None
    except OSError as error:
        raise RequestError(
            f"--write: {name!r} cannot be written: {error.strerror}. [CD0108]"
        ) from None
