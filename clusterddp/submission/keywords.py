"""Requests from keywords: each is an option's name, its value what one would type for it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from clusterddp.errors import OptionError, RequestError
from clusterddp.launchers import full_name
from clusterddp.request.options import Option, nearest
from clusterddp.request.recipes import RECIPES
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.submission.fields import (
    CONTAINER,
    IMAGES_PYTHON,
    container_fields,
    made_up_name,
    request_of,
    resume_path,
)

_ROWS = {row.parameter: row for row in OPTIONS.values()}
_TRAINING = {row.parameter for row in TRAINING}
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*)(?![\w-])")


def request(command: Sequence[str], run_name: str | None, given: Mapping[str, object]) -> JobSpec:
    """Return the checked request for a command, or without one for the training.

    given: values by option. Variables and site.cfg have no part in it. Raises RequestError that
    speaks of keywords.
    """
    if isinstance(command, str) or not all(isinstance(word, str) for word in command):
        raise RequestError(
            f"the command {command!r} is no list of words; give one such as "
            '["python", "train.py"]. [CD0102]'
        )
    for name in given:
        if name not in _ROWS:
            raise RequestError(f"there is no option {name!r}{nearest(name, _ROWS)}. [CD0102]")
    of_training = [name for name in given if name in _TRAINING] if command else []
    if of_training:
        raise RequestError(
            f"{', '.join(of_training)}: of the MNIST training, but a command is given; put the "
            "command's own options into its list. [CD0103]"
        )
    with speaking_of_keywords():
        defaults = {name: row.default for name, row in _ROWS.items()} | {**given}
        values: dict[str, object] = {name: () for name, row in _ROWS.items() if row.type is tuple}
        values |= {n: _value(_ROWS[n], v) for n, v in defaults.items() if v is not None}
        container = {name: values[name] for name in CONTAINER if name in given}
        if "container_image" in given:
            container["python"] = values["python"] if "python" in given else IMAGES_PYTHON
        folder = values.get("template_dir")
        spec = request_of(
            values,
            made_up_name("run") if run_name is None else run_name,
            tuple(command) or _config(values, given),
            environment={},
            directives={},
            container=container_fields(container),
            template=full_name(str(values["template"]), Path(str(folder)) if folder else None),
        )
        spec.refuse_launcher()
        spec.check_points()
    return spec


@contextmanager
def speaking_of_keywords() -> Iterator[None]:
    """Have the messages of refused requests name keywords, `run_name`, in place of flags."""
    try:
        yield
    except RequestError as error:
        text = _FLAG.sub(lambda flag: _keyword(flag[1]) or flag[0], str(error))
        raise RequestError(text, code=error.code) from None


def _keyword(name: str) -> str:
    return name.replace("-", "_") if name in OPTIONS or name == "run-name" else ""


def _value(row: Option, value: object) -> object:
    """Return a keyword's value in the form that the command line has for the option."""
    if row.type is tuple:
        items = [value] if isinstance(value, (str, os.PathLike)) else value
        if not isinstance(items, (list, tuple)):
            raise OptionError(row.flag, f": {value!r} is neither a text nor a list of texts.")
        return tuple(str(item) for item in items)
    if row.type is str and isinstance(value, (int, os.PathLike)) and not isinstance(value, bool):
        return str(value)
    if value == "":
        raise OptionError(row.flag, " is empty; give a value, or leave it out.")
    takes = {int: (int,), float: (int, float), bool: (bool,)}.get(row.type, (str,))
    fits = isinstance(value, takes) and isinstance(value, bool) is (row.type is bool)
    if not fits and row.parameter != "requeue":  # which can be a word, too, and checks itself
        kinds = f"{type(value).__name__}, not {row.type.__name__}"
        raise OptionError(row.flag, f": {value!r} is {kinds}.")
    return value


def _config(values: Mapping[str, object], given: Mapping[str, object]) -> TrainConfig:
    """Return the training's configuration: the keywords over their recipe, paths from here."""
    fields = {name: values[name] for name in _TRAINING if name in given}
    recipe = RECIPES.get(str(fields.get("recipe", "")))
    fields = {**(recipe.settings if recipe else {}), **fields}
    if data_dir := values.get("data_dir"):
        fields["data_dir"] = os.path.abspath(str(data_dir))
    if resume := fields.get("resume"):
        fields["resume"] = resume_path(str(resume), str(values["output_root"]))
    return TrainConfig(**fields)  # type: ignore[arg-type]
