"""Requests taken from a run or a file (--config), and written to one (--save-config).

A file is TOML with submit's flags as its keys: `gpus-per-node = 4`, `env = ["A=1"]`, and `command`
for what stands behind `--`. A run's request is whole: neither variables nor site.cfg add to it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterddp.errors import OptionError, RequestError
from clusterddp.files import write_atomically
from clusterddp.request.options import FLAG, Duration, Given, nearest, options_of
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import TRAINING, recipe_settings
from clusterddp.slurm import forms
from clusterddp.submission.fields import template_folder

SUFFIX = ".toml"
_COMMAND = "command"
_BY_NAME = ("env", "sbatch")
"""Lists whose typed items change what they name, unless one is empty; others are replaced."""
_OTHERS = ("force", "check_python", "snapshot_limit")
"""Options of a submission that are no part of its JobSpec, but for where things lie."""
_OF_A_SUBMISSION = (
    *("run-name", "sweep", "sweep-file", "num-samples", "sample-seed", "max-concurrent"),
)
"""Options that make runs of a request, and are no keys of a file."""


def save(given: Given, spec: JobSpec, path: Path) -> list[str]:
    """Write a request to a new file, private to its owner, for --config.

    What was given is written, even where it is the default. A variable that is secret by its name
    is written by name, without its value; returns these names. Raises RequestError.
    """
    values = {
        name: value
        for name, value in {**_others(given), **values_of(spec)}.items()
        if value not in (None, ()) and (not _is_default(name, value) or name in given.sources)
    }
    secret = [name for name, _ in spec.environment if re.search(forms.SECRET, name)]
    if "env" in values:
        items = [(item.partition("=")[0], item) for item in values["env"]]
        values["env"] = [name if name in secret else item for name, item in items]
    flags = {name: name.replace("_", "-") for name in values}
    named = {flags[name]: OPTIONS[flags[name]].text(value) for name, value in values.items()}
    if spec.command:
        named[_COMMAND] = spec.command
    if path.exists():
        raise RequestError(f"--save-config {path}: it exists already. Name another file. [CD0108]")
    try:
        write_atomically(path, to_toml(named).encode())
    except OSError as error:
        raise RequestError(f"--save-config {path}: {error.strerror}. [CD0108]") from None
    return secret


def to_toml(values: Mapping[str, object]) -> str:
    """Write plain values as TOML: texts, numbers, yes and no, and lists of texts."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def values_of(spec: JobSpec) -> dict[str, Any]:
    """Return the values of submit's options, by their parameters, that give this request."""
    asked = spec.resources
    values = {
        row.parameter: row.show(getattr(record, row.field))
        for record in (asked, spec)
        for row in options_of(type(record), "")
    }
    values |= spec.program.options
    usual_tasks = asked.tasks_per_node == (asked.gpus_per_node or 1)
    gpus = f"{asked.gpu_type}:" if asked.gpu_type else ""
    passed = [*(f"{name}={value}" for name, value in spec.environment), *spec.pass_environment]
    values |= {
        "gpus_per_node": f"{gpus}{asked.gpus_per_node}",
        "tasks_per_node": None if usual_tasks else asked.tasks_per_node,
        "env": tuple(passed),
        "after": tuple(f"{path}:{condition}" for path, condition in spec.after),
        "sbatch": tuple(n if value is None else f"{n}={value}" for n, value in spec.sbatch),
        "signal": spec.signal or "none",
    }
    # The defaults of these follow the rest of the request.
    values |= {name: None for name in ("signal", "requeue", "hang_timeout") if spec.is_usual(name)}
    return {name: None if value == "" else value for name, value in values.items()}


def taken(given: Given, text: str) -> Given:
    """Return what is given over the request of a run or a file.

    A run's is whole: it holds what variables and site.cfg gave when it was submitted.
    """
    if not text.endswith(SUFFIX):
        from clusterddp.status.find import find_run

        spec = find_run(Path(given.values["runs_dir"]), text).load_spec()
        where, recorded, command = f"the request of {text}", values_of(spec), spec.command
        given = dataclasses.replace(given, environment={}, environ={})
    else:
        where, (recorded, command) = text, _read(Path(text))
    training = {row.parameter for row in TRAINING}
    if given.command:  # a typed one takes the place of a training, too
        recorded = {name: value for name, value in recorded.items() if name not in training}
    elif given.command is not None:
        given = dataclasses.replace(given, command=command)
    elif command:
        raise RequestError(
            f"--config {text}: it runs a command, which is for 'clusterddp submit'. [CD0204]"
        )
    values, sources = {**given.values}, {**given.sources}
    of_recipe = recipe_settings(given.typed.get("recipe"))
    for name, value in recorded.items():
        if name not in values or name in of_recipe:
            continue
        if given.source(name) == FLAG:
            if name in _BY_NAME:
                kept = () if "" in values[name] else value or ()
                values[name] = (*kept, *filter(None, values[name]))
            continue
        values[name], sources[name] = value, where
        # A recipe's settings come over defaults, but the run was trained with these.
        if name not in training and _is_default(name, value):
            del sources[name]
    return dataclasses.replace(given, values=values, sources=sources)


def _read(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a file: the options' values by their parameters, and COMMAND. Raises RequestError."""
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"--config {path}: {error.strerror}. [CD0204]") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"--config {path} is not TOML: {error}. [CD0204]") from None
    command = content.pop(_COMMAND, [])
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise RequestError(
            f'--config {path}: {_COMMAND} is a list of words: ["python", "train.py"]. [CD0204]'
        )
    training = [row.name for row in TRAINING if row.name in content]
    if command and training:
        raise RequestError(
            f"--config {path}: {', '.join(training)} belong to the training, against {_COMMAND}: "
            "leave one of them out. [CD0204]"
        )
    values = {}
    for key, value in content.items():
        if key in _OF_A_SUBMISSION:
            raise RequestError(
                f"--config {path}: {key} is not part of a request, which several runs and sweeps "
                f"can share: type --{key}. [CD0204]"
            )
        if key not in OPTIONS:
            raise RequestError(
                f"--config {path}: there is no option {key!r}{nearest(key, [*OPTIONS, _COMMAND])}. "
                "Keys are submit's flags without '--'. [CD0204]"
            )
        row = OPTIONS[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        try:  # a duration has its unit
            values[row.parameter] = row.parse(
                str(value) if is_number and isinstance(row.form, Duration) else value
            )
        except OptionError as error:
            raise error.saying(f"(from {path})") from None
    return values, tuple(command)


def _others(given: Given) -> dict[str, Any]:
    """Return the given options that are no part of a JobSpec."""
    values = {name: given.values[name] for name in _OTHERS if name in given.sources}
    folder = template_folder(given)
    return {**values, "template_dir": os.path.abspath(folder)} if folder else values


def _is_default(name: str, value: object) -> bool:
    default = OPTIONS[name.replace("_", "-")].default
    return value in (None, ()) or str(value) == str(default)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # JSON's escapes are TOML's as well, which has one more
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Iterable):
        items = [_toml(item) for item in value]
        return f"[{', '.join(items)}]"
    return repr(value)
