"""`clusterddp check`: finds mistakes in sbatch files and training scripts."""

import json
from pathlib import Path

import click

from clusterddp import log
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, coded
from clusterddp.formatting import clean, count
from clusterddp.scripts.check import check_texts, one_device_remarks, read_script
from clusterddp.scripts.findings import Finding
from clusterddp.submission.outside import outside_paths_of_script, outside_paths_remark
from clusterddp.submission.snapshot import top_of


@click.command(name="check")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, for scripts.")
def command(files: tuple[str, ...], as_json: bool) -> int:
    """Find mistakes in your scripts without running them.

    FILE is an sbatch file or a Python training script; '-' reads standard input. Several files are
    also cross-checked. Each finding gives the line, the reason and a replacement. "will" is certain
    from the files; "may" is not. docs/check.md lists the rules.

    Exit codes: 0 no findings, 1 findings, 2 usage error, or a file cannot be read.
    """
    texts = {name: read_script(name) for name in dict.fromkeys(files)}
    findings = check_texts(texts)
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(_shown(finding))
        click.echo(_summary(findings, len(texts)), err=True)
    for remark in one_device_remarks(texts):
        log.warning(coded(clean(remark), "CD1226"))
    here = Path.cwd()
    top = top_of(here)
    for name in texts:
        if outside_paths := outside_paths_of_script(name, here, top):
            log.warning(coded(clean(outside_paths_remark(outside_paths, top)), "CD0320"))
    return EXIT_FAILED if findings else EXIT_DONE


def _shown(finding: Finding) -> str:
    word = "will" if finding.is_sure else "may"
    place = f"{clean(finding.file)}:{finding.line}".replace("\n", "\\n")
    head = f"{place}: {word} go wrong [{finding.rule}]: {clean(finding.why)}"
    lines = [f"  is:    {clean(finding.text)}"]
    for number, line in enumerate(finding.instead.splitlines()):
        lines.append(f"  {'write:' if not number else '      '} {clean(line)}")
    return "\n".join((head, *lines))


def _summary(findings: list[Finding], files: int) -> str:
    sure = sum(finding.is_sure for finding in findings)
    if not findings:
        return f"clusterddp: no findings in {count(files, 'file')}"
    found = f"{count(len(findings), 'finding')} in {count(files, 'file')}"
    return f"clusterddp: {found}: {sure} certain, {len(findings) - sure} possible"
