"""Pages made from the code, and the site of docs/.

python -m docs_build reference     writes docs/reference and docs/errors.md; a test holds both
python -m docs_build site DIR       builds the site into DIR, strictly (needs the extra `docs`)
python -m docs_build man DIR        writes the man pages, which each wheel carries (hatch_build.py)
python -m docs_build session        draws docs/images/session.svg: commands on a real Slurm
"""

import ast
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import click

from clusterddp import explained
from clusterddp.cli.main import COMMANDS, cli
from clusterddp.cli.options import RequeueOption
from clusterddp.request import options as table
from clusterddp.request.options import Option
from clusterddp.request.spec import OPTIONS
from clusterddp.run import events, records
from clusterddp.status import status, sweeps
from clusterddp.version import __version__

ROOT = Path(__file__).parent
REFERENCE = ROOT / "docs" / "reference"
ERRORS = ROOT / "docs" / "errors.md"
_ERRORS_HEAD = """\
# Error codes

Every error, warning and failed run has a code, for example `[CD0401]`. Look it up here or in the
terminal:

```bash
clusterddp explain CD0401        # the page of a code
clusterddp explain port in use   # all pages that have these words
clusterddp explain               # the list of codes
```

No code? Start with [Troubleshooting](troubleshooting.md). A code keeps its meaning in every
version. Replace RUN, JOB, HOST and R in the commands with your own. "In the job" means a line of
the batch script; while the job runs, prefix the command with `srun --jobid JOB --overlap`.

<!-- Made from the code by `python -m docs_build reference`; do not edit. -->
"""
SESSION_SVG = ROOT / "docs" / "images" / "session.svg"
SESSION = (
    "clusterddp submit --nodes 2 --tasks-per-node 2 --run-name first -- python resumable.py",
    "clusterddp logs -f first",
    "clusterddp status first",
)
"""Commands typed in a copy of examples/."""
_OTHERS = {
    "spec.json": "Options of the request that are not defaults, and `format` (1). spec-N.json: the "
    "same before the Nth resume that changed them.",
    "code.json": "Your code at submission: `digests` (SHA-256 of each file), `files`, `bytes`, "
    "`commit`, `large` (linked files), `outside_paths` (the command's paths outside of it).",
    "notified-NNNN.json": "Notification of an end: `by` (script, dependent job, rehearsal), "
    "`job_id`, `time`, `state`, the program's `exit_code` and `problem`.",
    "tracked.json": "Ids in the trackers of --report-to: `wandb`, `mlflow`.",
    "batch_sizes.json": "Per size: `batch_size`, `images_per_second`, `memory_bytes`, `note`.",
    "controller": "Empty. The batch controller renews its modification time every two seconds.",
    "outcomes/clocks.json": "Seconds by which the clock of each host is ahead of rank 0's.",
    "outcomes/error-R.json": "Exception of your script on rank R, as torch's `record` writes it.",
    "outcomes/nccl-R.log": "NCCL's lines at its start on the node of rank R: version, network, "
    "variables, channels by kind.",
    "nccl-trace-R": "NCCL's flight recorder of a rank after a timeout, for torchfrtrace.",
}
"""Fields of the files that have no class in `records`."""
_TABLE_ROW = re.compile(r"^\|.*", re.MULTILINE)
_MADE = "<!-- Made from the code by `python -m docs_build reference`; do not edit. -->\n"
_Named = tuple[str, click.Command]


@click.group()
def main() -> None:
    """Make pages from the code, and build the site."""


@main.command(name="reference")
def write_reference() -> None:
    """Write docs/reference and docs/errors.md anew."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in reference().items():
        (REFERENCE / name).write_text(text)
    ERRORS.write_text(errors_page())


@main.command(name="site")
@click.argument("folder", type=click.Path(path_type=Path))
def build_site(folder: Path) -> None:
    """Build the site into DIR; a warning, as of a link or an anchor that is not there, fails."""
    with tempfile.TemporaryDirectory() as place:
        assemble(Path(place))
        # Not with --quiet: MkDocs counts the warnings that it logs.
        argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
        # Material warns in red of a MkDocs that the extra `docs` excludes.
        environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        argv.append(str(folder.absolute()))
        sys.exit(subprocess.run(argv, cwd=place, env=environ, check=False).returncode)


@main.command(name="man")
@click.argument("folder", type=click.Path(path_type=Path))
def write_man(folder: Path) -> None:
    """Write the man pages into DIR."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in man_pages().items():
        (folder / name).write_text(text)


@main.command(name="session")
def draw_session() -> None:
    """Run the commands of SESSION on a Slurm of two hosts, and draw them with their output.

    Needs Slurm, root and the extra `docs`. The temporary directory is shown as /home/you.
    """
    from rich.console import Console
    from rich.text import Text

    from tests.on_slurm.cluster import SlurmCluster

    terminal = Console(record=True, width=96, file=io.StringIO(), highlight=False)
    with tempfile.TemporaryDirectory() as place, SlurmCluster(gpus_per_host=0) as cluster:
        shutil.copytree(ROOT / "examples", place, ignore=_not("*.py"), dirs_exist_ok=True)
        Path(place).chmod(0o755)
        for line in SESSION:
            terminal.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
            argv = ["bash", "-c", f"{line} 2>&1 | grep -v '^.W[0-9]'"]  # torch's own warnings
            shown = cluster.run(argv, cwd=place, timeout=300).stdout.replace(place, "/home/you")
            terminal.print(Text.from_ansi(shown.rstrip()), "")
    drawn = terminal.export_svg(title="clusterddp", unique_id="session")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # a font of another host
    SESSION_SVG.parent.mkdir(exist_ok=True)
    SESSION_SVG.write_text(re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE))


def assemble(place: Path) -> None:
    """Lay out what the site is built from: mkdocs.yml, docs, and files beside it that have links.

    On the site docs/ is the top, so that `../examples/x.py` of a page is `examples/x.py` there.
    """
    shutil.copy(ROOT / "mkdocs.yml", place)
    pages = place / "docs"
    shutil.copytree(ROOT / "docs", pages)
    shutil.copytree(ROOT / "examples", pages / "examples", ignore=_not("*.py", "*.md"))
    shutil.copytree(ROOT / "benchmarks", pages / "benchmarks", ignore=_not("*.md", "*.svg"))
    shutil.copy(ROOT / "CHANGELOG.md", pages / "changelog.md")
    # What a code means stands in its heading there, where the search finds it; the anchor stays.
    (pages / "errors.md").write_text(errors_page(_titled))
    for page in pages.rglob("*.md"):
        up = "../" * len(page.relative_to(pages).parts[1:])
        text = page.read_text().replace(f"]({up}../", f"]({up}").replace(f"]({up}docs/", f"]({up}")
        page.write_text(_TABLE_ROW.sub(_unescaped, text))


def _unescaped(row: re.Match[str]) -> str:
    """Return a table's row with `a|b` for `a\\|b`: GitHub needs what MkDocs would show."""
    return re.sub("`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])


def reference() -> dict[str, str]:
    """Return the pages of docs/reference by their names."""
    return {
        "commands.md": _commands_page(),
        "options.md": _options_page(),
        "fields.md": _fields_page(),
    }


def errors_page(heading: Callable[[str, str], str] = "### {}\n\n**{}**".format) -> str:
    """Return docs/errors.md, which is made of the catalogue's files.

    heading: Markdown that begins the part of a code and its title.
    """

    def begin(part: re.Match[str]) -> str:
        return heading(*part.groups())

    parts = [_ERRORS_HEAD]
    for path in sorted(explained.FOLDER.glob("*.md")):
        text = re.sub(r"^#", "##", path.read_text(), flags=re.MULTILINE)
        parts.append(re.sub(r"^### (CD\d{4})\n\n(.+)$", begin, text, flags=re.MULTILINE))
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", "\n".join(parts))


def _titled(code: str, title: str) -> str:
    return f"### {code}: {title} {{ #{code.lower()} }}"


def man_pages() -> dict[str, str]:
    """Return the man pages of all commands by their names, `clusterddp-submit.1`."""
    pages = {f"{name.replace(' ', '-')}.1": _man_page(name, each) for name, each in commands()}
    see = [name.removesuffix(".1") for name in pages]
    listed = [(f"clusterddp {name}", line) for name, line in COMMANDS.items() if line]
    top = [_head("clusterddp", "runs PyTorch distributed training on a Slurm cluster")]
    top += [".SH SYNOPSIS", "clusterddp COMMAND [OPTIONS] [ARGS]", ".SH COMMANDS"]
    top += [
        line for term, text in listed for line in (".TP", f"\\fB{_roff(term)}\\fR", _roff(text))
    ]
    top += _man_options("clusterddp", cli)
    top += [".SH EXIT STATUS", _roff(_split_exit_codes(cli.epilog or "")[1])]
    top += _see_also(see)
    return {"clusterddp.1": "\n".join(top) + "\n", **pages}


def commands() -> Iterator[_Named]:
    """Yield the commands that `clusterddp --help` lists, and theirs: `clusterddp data fetch`."""
    top = click.Context(cli, info_name="clusterddp")
    for name in cli.list_commands(top):
        command = cli.get_command(top, name)
        assert command is not None
        yield f"clusterddp {name}", command
        if isinstance(command, click.Group):
            yield from (
                (f"clusterddp {name} {sub}", each) for sub, each in command.commands.items()
            )


def _not(*patterns: str) -> Callable[[str, list[str]], set[str]]:
    """Return what has `copytree` leave out all files but those of the patterns."""

    def others(folder: str, names: list[str]) -> set[str]:
        kept = {path.name for pattern in patterns for path in Path(folder).glob(pattern)}
        return {name for name in names if name not in kept and not Path(folder, name).is_dir()}

    return others


def _commands_page() -> str:
    parts = [
        "# Commands\n",
        _MADE,
        "Every command with its options and exit codes; `clusterddp COMMAND --help` prints the "
        "same text. `submit` and `resume` also take the [options of a request](options.md).\n",
    ]
    for name, command in commands():
        parts.append(f"{'##' if name.count(' ') == 1 else '###'} {name}\n")
        parts.append(f"```bash\n{_usage(name, command)}\n```\n")
        parts += [_paragraph(text) for text in _texts(command)]
        own = [p for p in _typed(command) if p.name not in _PARAMETERS]
        rows = [(_code(_forms(each)), _default(each), _help(each)) for each in own]
        parts.append(_table(("option", "default", "description"), rows))
        parts.append(_taken(command))
    return _joined(parts)


def _taken(command: click.Command) -> str:
    """Name the options of a request that a command takes: all of a section, or one by one."""
    names = {parameter.name for parameter in command.params}
    words = []
    for group in table.GROUPS:
        rows = [row for row in OPTIONS.values() if row.group == group]
        taken = [row for row in rows if row.parameter in names]
        page = f"[{group}](options.md#{group.lower().replace(' ', '-')})"
        if taken:
            some = ", ".join(f"`{row.flag}`" for row in taken)
            words.append(f"- {page}: {'all' if taken == rows else some}\n")
    return "It also takes these options of a request:\n\n" + "".join(words) if words else ""


def _options_page() -> str:
    parts = [
        "# Options of a request\n",
        _MADE,
        "The options of `clusterddp submit`: resources of the job, launch of the ranks, built-in "
        "training.\n",
        "Each option `--NAME` is also the variable `CLUSTERDDP_NAME`, with `_` for `-`, and the "
        "key `NAME` in site.cfg and `--config` files. Their order: [Configure your "
        "site](../sites.md#precedence-of-settings). The tables also name the `#SBATCH` directive "
        "that an option sets, and the variable that sbatch reads.\n",
    ]
    for group in table.GROUPS:
        parts.append(f"## {group}\n")
        rows = [_option_row(row) for row in OPTIONS.values() if row.group == group]
        parts.append(_table(("option", "default", "description"), rows))
    parts.append("## Replaced sbatch options\n")
    parts.append("clusterddp sets these itself; use its own option instead.\n")
    replaced = table.REPLACED_FLAGS.items()
    rows = [(_code(f"--{name}"), _md(text)) for name, text in replaced if text != f"--{name}"]
    parts.append(_table(("sbatch option", "use instead"), rows))
    parts.append("## sbatch variables passed on\n")
    parts.append("If one of these is set where you submit, its directive is in the batch script.\n")
    rows = [(_code(name), _code(f"--{text}")) for name, text in sorted(table.PASSED_ON.items())]
    parts.append(_table(("variable", "directive"), rows))
    return _joined(parts)


def _option_row(row: Option) -> tuple[str, ...]:
    negated = [f"--no-{row.name}"] if row.negatable else []
    value = "" if row.type is bool else f" {row.metavar or _kind(row)}"
    forms = ", ".join([*row.flags, *negated]) + value
    if row.name == "requeue":
        forms = ", ".join([RequeueOption.FORM.replace("[no-]", ""), *negated, "--no-requeue"])
    value = row.text(row.default)
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    usual = _switch(row) if row.type is bool else shown
    default = row.shown or ("" if row.default is None else usual)
    of_sbatch = [f"#SBATCH --{row.directive}"] if row.directive else []
    of_sbatch += [row.variable] if row.variable else []
    second = f"<br><small>{', '.join(map(_code, of_sbatch))}</small>" if of_sbatch else ""
    return _code(forms), _md(default), _md(row.help) + second


def _switch(row: Option) -> str:
    return "on" if row.default else "off"


def _kind(row: Option) -> str:
    if isinstance(row.form, table.Choice):
        return "|".join(row.form.names)
    return {int: "N", float: "X"}.get(row.type, "TEXT")


def _fields_page() -> str:
    parts = [
        "# Fields of the records\n",
        _MADE,
        "Every field of the JSON files in a run's directory. [Files of a run](../records.md) lists "
        "the files. Times are in seconds since the epoch, steps are optimizer steps. A missing "
        "field has its default. A `Loss` is a number that may be NaN or infinite.\n",
        "## Events\n",
        "Each line of `events.jsonl` is an event: `event` has its name, given before each "
        "description. Every event has the fields of `Event`.\n",
        *_classes(events),
        "## Records\n",
        *_classes(records),
        "### Other files\n",
        _table(("file", "fields"), [(_code(name), _md(text)) for name, text in _OTHERS.items()]),
        "## Status\n",
        "Output of `status --json` and `runs --json`. [JSON output](../json.md) lists the fields "
        "that later versions keep.\n",
        *_classes(status),
        *_classes(sweeps),
    ]
    return _joined(parts)


def _classes(module: ModuleType) -> Iterator[str]:
    """Yield a heading and a table for each public dataclass, with the fields' docstrings."""
    source = ast.parse(inspect.getsource(module))
    for node in source.body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        rows: list[tuple[str, ...]] = []
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.Assign) and _told(after):  # a value of an enumeration
                rows.append((_code(ast.literal_eval(field.value)), _md(_told(after))))
            if isinstance(field, ast.AnnAssign):
                row = _field(field, after)
                if row:
                    rows.append(row)
        head = ("field", "type", "default", "description")
        word = getattr(getattr(module, node.name), "kind", "")
        yield f"### {node.name}\n"
        yield (f"`{word}`: " if word else "") + _md(ast.get_docstring(node) or "") + "\n"
        yield _table(head if rows and len(rows[0]) > 2 else ("value", "description"), rows)


def _field(field: ast.AnnAssign, after: ast.stmt | None) -> tuple[str, ...] | None:
    kind = ast.unparse(field.annotation)
    if kind.startswith("ClassVar"):
        return None
    default = ast.unparse(field.value) if field.value else ""
    if "default_factory=" in default:
        default = "empty"
    return (
        _code(ast.unparse(field.target)),
        _code(kind),
        _code(default),
        _md(_told(after)),
    )


def _told(after: ast.stmt | None) -> str:
    """Return the docstring of a field: the string that follows it, if any."""
    text = after.value if isinstance(after, ast.Expr) else None
    told = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
    return inspect.cleandoc(told)


def _man_page(name: str, command: click.Command) -> str:
    line = COMMANDS.get(name.partition(" ")[2]) or command.get_short_help_str(72)
    page = [_head(name.replace(" ", "-"), line)]
    page += [".SH SYNOPSIS", _roff(_usage(name, command)), ".SH DESCRIPTION"]
    status = []
    for text in _texts(command):
        if text.startswith("\b"):
            page += [".PP", ".nf", _roff(text[1:].strip("\n")), ".fi"]
            continue
        words, codes = _split_exit_codes(text)
        page += [".PP", _roff(words)] if words else []
        status += [codes] if codes else []
    page += _man_options(name, command)
    page += [".SH EXIT STATUS", *map(_roff, status)] if status else []
    subcommands = command.commands if isinstance(command, click.Group) else ()
    own = [f"{name} {each}".replace(" ", "-") for each in subcommands]
    return "\n".join([*page, *_see_also(["clusterddp", *own, "clusterddp-explain"])]) + "\n"


def _man_options(name: str, command: click.Command) -> list[str]:
    ctx = _context(name, command)
    lines = [".SH OPTIONS"]
    for parameter in command.get_params(ctx):
        shown = parameter.get_help_record(ctx)
        if shown and isinstance(parameter, click.Option):  # an argument stands in the synopsis
            lines += [".TP", f"\\fB{_roff(shown[0])}\\fR", _roff(shown[1])]
    return lines


def _split_exit_codes(text: str) -> tuple[str, str]:
    """Return a paragraph of help without its exit codes, and these: `0 printed, 2 …`."""
    words, _, codes = text.partition("Exit codes: ")
    return words.strip(), " ".join(codes.split())


def _see_also(pages: Sequence[str]) -> list[str]:
    """Return the section: a line a page, with commas between them."""
    *others, last = pages
    return [
        ".SH SEE ALSO",
        *(f".BR {_roff(name)} (1)," for name in others),
        f".BR {_roff(last)} (1)",
    ]


def _head(name: str, line: str) -> str:
    title = f'.TH {name.upper()} 1 "" "clusterddp {__version__}"'
    # Neither hyphens nor wide blanks: names of options and variables stay whole.
    return f"{title}\n.nh\n.ad l\n.SH NAME\n{_roff(name)} \\- {_roff(line.rstrip('.'))}"


def _roff(text: str) -> str:
    """Escape a text for man: no line of it is a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


def _usage(name: str, command: click.Command) -> str:
    return " ".join([name, *command.collect_usage_pieces(_context(name, command))])


def _context(name: str, command: click.Command) -> click.Context:
    return click.Context(command, info_name=name, **cli.context_settings)


def _texts(command: click.Command) -> list[str]:
    """Return the paragraphs of a command's help and its epilog."""
    return [*inspect.cleandoc(command.help or "").split("\n\n"), *filter(None, [command.epilog])]


def _paragraph(text: str) -> str:
    if text.startswith("\b"):
        return f"```bash\n{inspect.cleandoc(text[1:])}\n```\n"
    return _md(text) + "\n"


_PARAMETERS = {row.parameter for row in OPTIONS.values()}


def _typed(command: click.Command) -> list[click.Option]:
    shown = (each for each in command.params if isinstance(each, click.Option))
    return [each for each in shown if not each.hidden]


def _forms(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.metavar or _value(option)}"
    return ", ".join([*option.opts, *option.secondary_opts]) + value


def _value(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    numbers = {"integer": "N", "float": "X"}
    return numbers.get(option.type.name.partition(" ")[0], option.type.name.upper())


def _default(option: click.Option) -> str:
    shown, value = option.show_default, option.default
    if isinstance(shown, str):
        return _md(shown)
    return _md(str(value)) if shown and isinstance(value, str | int | float | Path) else ""


def _help(option: click.Option) -> str:
    variable = f" Variable: {_code(option.envvar)}." if isinstance(option.envvar, str) else ""
    return _md(option.help or "") + variable


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    return "".join(f"| {line} |\n" for line in lines) if len(lines) > 2 else ""


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _md(text: str) -> str:
    """Escape a text for Markdown, on one line; what stands between backticks is code."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    escaped = (re.sub(r"([\\`*_<>\[\]|])", r"\\\1", each) for each in parts[::2])
    codes = (*map(_code, parts[1::2]), "")
    return "".join(text for pair in zip(escaped, codes, strict=True) for text in pair)


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(filter(None, parts))


if __name__ == "__main__":
    main()
