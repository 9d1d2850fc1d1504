"""`clusterddp env`: shows who this task, or a pasted environment, is, and where it is said."""

import json
import re
import sys
from pathlib import Path

import click

from clusterddp.errors import RequestError
from clusterddp.ranks.dist_env import DistEnv


@click.command(name="env")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Derive from a pasted environment, the output of 'env', 'export -p' or 'declare -x', "
    "in place of this process's own; '-' reads standard input.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
def command(source: str | None, as_json: bool) -> None:
    """Show who this task is: every value, and the variable it came from.

    In a Slurm step: srun clusterddp env. Exit codes: 0 derived, 1 the variables contradict each
    other, 2 a wrong request.
    """
    import os

    environ = os.environ if source is None else parse_environment(_read(source))
    env = DistEnv.from_environ(environ)
    click.echo(_as_json(env) if as_json else _as_table(env))


def parse_environment(text: str) -> dict[str, str]:
    """Read a pasted environment.

    Takes the output of `env`, `env -0`, `export -p` (bash, dash, zsh) or `declare -x`. Returns the
    variables with their quotes resolved; values of several lines are kept whole. Raises
    RequestError where nothing is a variable, a quote is left open, or the lines are those of
    several tasks.
    """
    text = text.replace("\r\n", "\n")
    pairs = _records(text) if "\0" in text else _lines(text)
    environ: dict[str, str] = {}
    for name, value in pairs:
        if name in ("SLURM_PROCID", "RANK") and environ.get(name, value) != value:
            raise RequestError(
                f"{name} is {environ[name]!r} and {value!r} in the pasted environment: expected "
                "that of one task. Paste one, from 'srun --ntasks=1 env', say."
            )
        environ[name] = value
    if not environ:
        raise RequestError(
            "the pasted environment holds no NAME=value line; paste the output of 'env' or "
            "'export -p'."
        )
    return environ


# Bash exports its functions too, under such a name; their bodies are no variable's second line.
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_[^\s=]+(?:%%|\(\)))=")
_DECLARATION = re.compile(
    r"(?:(?:declare|typeset) -[A-Za-z]*x[A-Za-z]*|export)[ ]+([A-Za-z_][A-Za-z0-9_]*)(=?)"
)
_OCTAL = re.compile(r"[0-3]?[0-7]{1,2}")  # bash writes what its locale cannot show as \nnn
_ANSI_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v",
                 "E": "\x1b", "e": "\x1b"}  # fmt: skip


def _records(text: str) -> list[tuple[str, str]]:
    """The records of `env -0`, which leave no doubt about line ends."""
    return [
        (found[1], record[found.end() :])
        for record in text.split("\0")
        if (found := _ASSIGNMENT.match(record))
    ]


def _lines(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        declared = _DECLARATION.match(text, position)
        if declared is not None:
            value, position = _shell_word(text, declared.end())
            if declared[2]:  # without it the variable is exported and has no value
                pairs.append((declared[1], value))
            position += 1
            continue
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        line = text[position:end]
        assigned = _ASSIGNMENT.match(line)
        if assigned is not None:
            pairs.append((assigned[1], _unquoted(line[assigned.end() :])))
        elif pairs and line:
            # `env` quotes nothing: a line that assigns nothing goes on with the value before it.
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]}\n{line}")
        position = end + 1
    return pairs


def _unquoted(value: str) -> str:
    """Strip the quotes that `set` and .env files put around a whole value."""
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


def _shell_word(text: str, start: int) -> tuple[str, int]:
    """Return the value of the shell word at `start`, and where its line ends."""
    value: list[str] = []
    position, quote = start, ""
    while position < len(text):
        character = text[position]
        following = text[position + 1 : position + 2]
        if quote == "":
            if character == "\n":
                break
            if character == "$" and following == "'":
                quote, position = "$'", position + 1
            elif character in "'\"":
                quote = character
            elif character == "\\":
                value.append(following)
                position += 1
            else:
                value.append(character)
        elif character == quote[-1]:
            quote = ""
        elif character == "\\" and (quote == "$'" or (quote == '"' and following in '"\\$`')):
            octal = _OCTAL.match(text, position + 1) if quote == "$'" else None
            if octal is not None:
                value.append(bytes([int(octal[0], 8)]).decode(errors="surrogateescape"))
                position += len(octal[0]) - 1
            elif quote == "$'":
                value.append(_ANSI_ESCAPES.get(following, following))
            else:
                value.append(following)
            position += 1
        else:
            value.append(character)
        position += 1
    if quote:
        line = text.count("\n", 0, start) + 1
        raise RequestError(
            f"the {quote} in line {line} of the pasted environment is never closed; paste the "
            "whole output of 'export -p'."
        )
    # Bytes that were escaped one by one may form one character together.
    joined = "".join(value).encode(errors="surrogateescape")
    return joined.decode(errors="surrogateescape"), position


def _read(source: str) -> str:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise RequestError(
            f"cannot read {source!r}: {error.strerror}; give --from a file that holds the output "
            "of 'env'."
        ) from error
    return data.decode(errors="surrogateescape")


_FIELDS = (
    "rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes",
    "master_addr", "master_port", "hostnames",
)  # fmt: skip


def _as_json(env: DistEnv) -> str:
    values = {name: getattr(env, name) for name in _FIELDS}
    document = {
        "origin": env.origin,
        **values,
        "sources": dict(env.sources),
        "environ": env.to_environ(),
    }
    return json.dumps(document, indent=2)


def _as_table(env: DistEnv) -> str:
    rows: list[tuple[str, str, str]] = [("origin", env.origin, _ORIGINS[env.origin])]
    for name in _FIELDS:
        value = _shown_hosts(env.hostnames) if name == "hostnames" else str(getattr(env, name))
        rows.append((name, value, env.sources[name]))
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    return "\n".join(
        f"{name:<{name_width}}  {value:<{value_width}}  {source}" for name, value, source in rows
    )


_ORIGINS = {
    "torch": "torch's variables",
    "slurm": "a task of a Slurm step",
    "single": "neither torch's variables nor a Slurm step",
}


def _shown_hosts(hostnames: tuple[str, ...]) -> str:
    if len(hostnames) <= 4:
        return ",".join(hostnames) or "?"
    return f"{hostnames[0]},{hostnames[1]},...,{hostnames[-1]} ({len(hostnames)} hosts)"
