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
from clusterddp.cli.options import GroupedCommand, given_by, options
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, RequestError
from clusterddp.request import sites
from clusterddp.request.options import Given, Settings, find_site, missing_settings, read_site
from clusterddp.request.spec import OPTIONS
from clusterddp.submission.fields import interpreter, job_spec, template_folder

if TYPE_CHECKING:
    from clusterddp.doctor.site_checks import Check, Diagnosis

_NAMES = (
    *("partition", "account", "qos", "nodes", "gpus-per-node", "gpu-directive"),
    *("python", "runs-dir", "dataset", "data-dir"),
)
_PROPOSED = tuple(name for name in _NAMES if name not in ("nodes", "gpus-per-node"))


@click.command(name="doctor", cls=GroupedCommand)
@options([OPTIONS[name] for name in _NAMES], settings=False, defaults=False)
@click.option(
    "--site", metavar="FILE", help="site.cfg to use; 'clusterddp site' shows the one in effect."
)
@click.option("--cluster", metavar="NAME", help="Section [cluster:NAME] of site.cfg to use.")
@click.option(
    "--write", metavar="FILE", help="Write a proposed site.cfg to FILE, which must not exist."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
def command(write: str | None, as_json: bool, **typed: object) -> int:
    """Check the account, Slurm, directories and Python; queue nothing.

    Run it on a login node; without Slurm it checks only the rest. Settings come from variables,
    site.cfg and defaults, as for a submission. It takes at most a minute. docs/doctor.md explains
    each line.

    Exit codes: 0 no error found, 1 an error found, 2 usage error.
    """
    from clusterddp.doctor import examine, site_checks

    before = None
    if write is not None:
        _check_new_file(write)
        with contextlib.suppress(RequestError):  # the variable names a missing file
            before = find_site(None, os.environ, Path.cwd())
    args = [f"--{name.replace('_', '-')}={v}" for name, v in typed.items() if v is not None]
    try:
        ctx = submit.command.make_context("submit", args)
    except click.UsageError as error:
        raise RequestError(error.format_message(), code="CD0101") from None
    given = given_by(ctx)
    spec, given_before = job_spec(given, "doctor"), _effective_settings(given)
    if sys.stderr.isatty():
        click.echo(
            "clusterddp: querying Slurm and importing torch; this takes at most a minute", err=True
        )
    diagnosis = examine.examine(spec, template_folder(given))
    text = site_checks.site_cfg(diagnosis, given_before)
    if as_json:
        checks = [dataclasses.asdict(check) for check in diagnosis.checks]
        record = {"result": diagnosis.result, "checks": checks, "site_cfg": text}
        click.echo(json.dumps(record, indent=2))
    else:
        click.echo("\n".join(map(_format_check, diagnosis.checks)))
        if isinstance(ctx.obj, Settings) and ctx.obj.path is None:
            _suggest_site_files(diagnosis)
    if write is not None:
        _write(write, text, site_checks.proposed_settings(diagnosis, given_before))
        if before is not None:
            _warn_if_hidden(before)
        shown = f"clusterddp site --site {shlex.quote(write)}"
        click.echo(f"clusterddp: wrote {write}. Review it, then check: {shown}", err=True)
    return EXIT_FAILED if diagnosis.result == site_checks.ERROR else EXIT_DONE


def _suggest_site_files(diagnosis: "Diagnosis") -> None:
    clusters = [str(check.facts.get("cluster", "")) for check in diagnosis.checks]
    known = sites.read_sites()
    for name in sites.fitting(known, "".join(clusters), socket.gethostname()):
        words = f"this may be {known[name].title}; its settings: clusterddp site use {name}"
        click.echo(f"clusterddp: {words}", err=True)


def _format_check(check: "Check") -> str:
    """Format a check, wrapped at the terminal's width."""
    from clusterddp import formatting

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    head = f"{check.result:<7}  {check.name:<14}  "
    more = f". To do: {check.advice}" if check.advice else ""
    text = formatting.line(check.found.removesuffix(".") + more)
    return textwrap.fill(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _effective_settings(given: Given) -> dict[str, str]:
    """Return the settings that are not defaults, with absolute paths."""
    rows = [OPTIONS[name] for name in _PROPOSED]
    settings = {
        row.name: str(given.values[row.parameter])
        for row in rows
        if row.parameter in given.sources and given.values[row.parameter]
    }
    for name in ("runs-dir", "data-dir"):
        if name in settings:
            settings[name] = os.path.abspath(settings[name])
    if "python" in settings:
        settings["python"] = interpreter(settings["python"])
    return settings


def _check_new_file(name: str) -> None:
    """Refuse a file that exists or cannot be created, before the checks."""
    if os.path.lexists(name):
        raise RequestError(f"--write: {name!r} already exists. Name another file. [CD0108]")
    if not name or not Path(name).parent.is_dir():
        raise RequestError(
            f"--write: the directory of {name!r} does not exist. Create it first. [CD0108]"
        )


def _warn_if_hidden(before: Path) -> None:
    """Warn if the new file takes precedence over the one in effect until now.

    before: the file in effect until now.
    """
    now = find_site(None, os.environ, Path.cwd())
    if now is None or now.samefile(before):
        return
    missing = missing_settings(now, before, OPTIONS)
    lacks = f", and lacks {len(missing)} of its settings: {', '.join(missing)}" if missing else ""
    log.warning(
        f"{now} now takes precedence over {before}{lacks}. Only one file is read: copy the "
        "settings that you need, or remove the new one. [CD0207]"
    )


def _write(name: str, text: str, settings: Mapping[str, str]) -> None:
    """Write these settings to a new file. Raises RequestError without leaving a file."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder, "site.cfg")
        draft.write_text(text, encoding="utf-8")
        read = read_site(draft, None, OPTIONS).values
    for key, value in settings.items():
        if read.get(key) != value:
            raise RequestError(
                f"--write: site.cfg cannot express {key} = {value!r}. Omit it. [CD0201]"
            )
    try:
        with open(name, "x", encoding="utf-8") as file:  # noqa: PTH123 -- never overwrites
            file.write(text)
    except OSError as error:
        raise RequestError(
            f"--write: {name!r} cannot be written: {error.strerror}. [CD0108]"
        ) from None
