"""Requests from keywords: each is an option's name, its value what one would type for it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from clusterddp import log
from clusterddp.errors import OptionError, RequestError
from clusterddp.launchers import full_name
from clusterddp.request.options import Option, nearest
from clusterddp.request.recipes import RECIPES
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.submission.fields import (
    CONTAINER,
    IMAGES_PYTHON,
    check_new,
    container_fields,
    folder_of_template,
    made_up_name,
    request_of,
    resume_path,
)

_ROWS = {row.parameter: row for row in OPTIONS.values()}
_NAMES = {
    flag.removeprefix("--").replace("-", "_"): row.parameter
    for row in OPTIONS.values()
    for flag in (*row.flags, row.flag)
    if flag.startswith("--")
}
"""Options by all names that they have on the command line, `ntasks_per_node` as well."""
_ELSEWHERE = {
    "dry_run": "render(spec) gives the script of a JobSpec",
    "gpus": "those of each node are gpus_per_node",
    "sweep": "'clusterddp submit --sweep …' submits one",
    "wait": "call wait() of the run that comes back",
}
"""What to do instead of giving what is no option of a request."""
_TRAINING = {row.parameter for row in TRAINING}
_FLAG = re.compile(r"(clusterddp [a-z][^.;\n]*)|(?<![\w-])--([a-z][a-z-]*)(?![\w-])")
"""A flag; or a line for the shell, which keeps its own."""


def request(
    command: Sequence[str | os.PathLike[str]], run_name: str | None, given: Mapping[str, object]
) -> JobSpec:
    """Return the checked request for a command, or without one for the training.

    given: values by option. Variables and site.cfg have no part in it. Raises RequestError that
    speaks of keywords.
    """
    if isinstance(command, str) or not all(isinstance(w, (str, os.PathLike)) for w in command):
        raise RequestError(
            f"the command {command!r} is no list of words; give one such as "
            '["python", "train.py"]. [CD0102]'
        )
    for name in given:
        if name not in _NAMES:
            raise RequestError(f"there is no option {name!r}{_instead(name)}. [CD0102]")
    given = {_NAMES[name]: value for name, value in given.items()}
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
        template, folder = str(values["template"]), template_folder(given)
        name = Path(template).name if "/" in template else full_name(template, folder)
        spec = request_of(
            values,
            made_up_name("run") if run_name is None else run_name,
            tuple(os.fspath(word) for word in command) or _config(values, given),
            environment={},
            directives={},
            container=container_fields(container),
            template=name,
        )
        check_new(spec)
    return spec


@contextmanager
def speaking_of_keywords() -> Iterator[None]:
    """Have refusals and warnings name keywords, `run_name`, in place of flags."""
    try:
        with log.worded(_worded):
            yield
    except RequestError as error:
        raise RequestError(_worded(str(error)), code=error.code) from None


def template_folder(given: Mapping[str, object]) -> Path | None:
    """Return the folder of the person's own templates, if the keywords name one."""
    folder = given.get("template_dir")
    return folder_of_template(
        str(given.get("template", "")), None if folder is None else str(folder)
    )


def _worded(text: str) -> str:
    return _FLAG.sub(lambda found: found[1] or _keyword(found[2]) or found[0], text)


def _keyword(name: str) -> str:
    return name.replace("-", "_") if name in OPTIONS or name == "run-name" else ""


def _instead(name: str) -> str:
    """Return, in words behind a wrong keyword, what is meant."""
    if name in _ELSEWHERE:
        return f": {_ELSEWHERE[name]}"
    denied = name.removeprefix("no_")
    if denied != name and denied in _ROWS:
        return f": give {denied}=False"
    return nearest(name, _ROWS)


def _value(row: Option, value: object) -> object:
    """Return a keyword's value in the form that the command line has for the option."""
    if row.type is tuple:
        items = [value] if isinstance(value, (str, os.PathLike)) else value
        if isinstance(items, Mapping):
            items = [str(k) if v is None else f"{k}={v}" for k, v in items.items()]
        if not isinstance(items, (list, tuple)):
            raise OptionError(row.flag, f": {value!r} is neither a text nor a list of texts.")
        return tuple(os.fspath(i) if isinstance(i, os.PathLike) else str(i) for i in items)
    if row.type is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if row.type is str and isinstance(value, int) and not isinstance(value, bool):
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
