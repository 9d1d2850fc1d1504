"""Requests read from a run or a file (--config) and written to a file (--save-config).

A file is TOML; its keys are submit's flags, `gpus-per-node = 4` or `env = ["A=1"]`, and `command`
for the words after `--`. The request of a run is complete: variables and site.cfg add nothing.
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
from clusterddp.request import toml_file
from clusterddp.request.options import FLAG, Duration, Given, nearest, options_of
from clusterddp.request.program import where_instead
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import TRAINING, recipe_settings
from clusterddp.slurm import forms
from clusterddp.submission.fields import template_folder

SUFFIX = ".toml"
_COMMAND = "command"
_BY_NAME = ("env", "sbatch")
"""Lists whose items replace those of the same name, unless one is empty; others are replaced."""
_SUBMISSION_OPTIONS = ("force", "check_python", "snapshot_limit")
"""Options that affect only a submission and are not in its JobSpec."""
_NOT_IN_FILE = (
    *("run-name", "sweep", "sweep-file", "num-samples", "sample-seed", "max-concurrent"),
    *("wait", "dry-run", "test-only", "json", "config", "save-config", "site", "cluster"),
)
"""Options that differ from run to run of a request, and are not keys of a file."""


def save(given: Given, spec: JobSpec, path: Path) -> list[str]:
    """Write a request to a new private file for --config. Raises RequestError.

    Given options are written even if they have the default value. A variable with the name of a
    secret is written without its value; returns the names of these.
    """
    values = {
        name: value
        for name, value in {**_submission_options(given), **values_of(spec)}.items()
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
    if path.suffix != SUFFIX:
        raise RequestError(f"--save-config {path}: the name does not end in {SUFFIX}. [CD0108]")
    forms.refuse_carried("--save-config", os.path.abspath(path), os.environ)
    if path.exists():
        raise RequestError(
            f"--save-config {path}: the file already exists. Name another file. [CD0108]"
        )
    try:
        write_atomically(path, to_toml(named).encode())
    except OSError as error:
        raise RequestError(f"--save-config {path}: {error.strerror}. [CD0108]") from None
    return secret


def to_toml(values: Mapping[str, object]) -> str:
    """Format strings, numbers, booleans and lists of strings as TOML."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def values_of(spec: JobSpec) -> dict[str, Any]:
    """Return the values of submit's options, by parameter, that produce this request."""
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
    # The defaults of these depend on the rest of the request.
    values |= {key: None for key in ("signal", "requeue", "hang_timeout") if spec.has_default(key)}
    return {name: None if value == "" else value for name, value in values.items()}


def apply_config(given: Given, text: str) -> Given:
    """Return the given options merged over the request of a run or a file.

    A run's request already contains the variables and site.cfg of its submission.
    """
    is_other_file = Path(text).is_file() or text.endswith((".yaml", ".yml", ".json"))
    if not text.endswith(SUFFIX) and is_other_file:
        raise RequestError(
            f"--config {text} is not a {SUFFIX} file. Use a run, or a file that --save-config "
            "wrote. [CD0204]"
        )
    if not text.endswith(SUFFIX):
        from clusterddp.status.find import find_run

        spec = find_run(Path(given.values["runs_dir"]), text).load_spec()
        where, recorded, command = f"the request of {text}", values_of(spec), spec.command
        given = dataclasses.replace(given, environment={}, environ={})
    else:
        where, (recorded, command) = text, _read(Path(text))
    training = {row.parameter for row in TRAINING}
    if given.command:  # it also replaces a training
        recorded = {name: value for name, value in recorded.items() if name not in training}
    elif given.command is not None:
        given = dataclasses.replace(given, command=command)
    elif command:
        raise RequestError(
            f"--config {text}: it has a command. Use it with 'clusterddp submit'. [CD0204]"
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
        # A recipe would override defaults, but the run was trained with these values.
        if name not in training and _is_default(name, value):
            del sources[name]
    return dataclasses.replace(given, values=values, sources=sources)


def _read(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read the option values, by parameter, and the COMMAND of a file. Raises RequestError."""
    content = toml_file.read("--config", path)
    command = content.pop(_COMMAND, [])
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise RequestError(
            f'--config {path}: {_COMMAND} is not a list of words. Use ["python", "train.py"]. '
            "[CD0204]"
        )
    training = ", ".join(row.name for row in TRAINING if row.name in content)
    if command and training:
        raise RequestError(
            f"--config {path}: {_COMMAND} conflicts with {training}, which are for the "
            f"built-in training. Remove one of them.{where_instead(training)} [CD0204]"
        )
    values = {}
    for key, value in content.items():
        if key in _NOT_IN_FILE:
            raise RequestError(
                f"--config {path}: {key} is not accepted in a file, which several runs can share. "
                f"Type --{key}. [CD0204]"
            )
        if key not in OPTIONS:
            raise RequestError(
                f"--config {path}: there is no option {key!r}{nearest(key, [*OPTIONS, _COMMAND])}. "
                "Keys are submit's flags without '--'. [CD0204]"
            )
        row = OPTIONS[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        try:  # a duration needs its unit
            values[row.parameter] = row.parse(
                str(value) if is_number and isinstance(row.form, Duration) else value
            )
        except OptionError as error:
            raise error.saying(f"(from {path})") from None
    return values, tuple(command)


def _submission_options(given: Given) -> dict[str, Any]:
    """Return the given options that are not in a JobSpec."""
    values = {name: given.values[name] for name in _SUBMISSION_OPTIONS if name in given.sources}
    folder = template_folder(given)
    return {**values, "template_dir": os.path.abspath(folder)} if folder else values


def _is_default(name: str, value: object) -> bool:
    return value in (None, ()) or str(value) == str(OPTIONS[name.replace("_", "-")].default)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # TOML has JSON's escapes and requires one more
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Iterable):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)
