"""Requests from keywords: each is an option's name, its value what one would type for it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.request.options import FLAG, Given, nearest
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import TRAINING
from clusterddp.submission.fields import job_spec, made_up_name, template_folder

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
_TEMPLATES = ("template", "template_dir")
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
        held = _held(given, tuple(os.fspath(word) for word in command))
        return job_spec(held, made_up_name("run") if run_name is None else run_name)


def _held(given: Mapping[str, object], command: tuple[str, ...] = ()) -> Given:
    values: dict[str, object] = {n: () if r.type is tuple else None for n, r in _ROWS.items()}
    plain = {name: row.default for name, row in _ROWS.items()} | dict(given)
    values |= {name: _ROWS[name].parse(v) for name, v in plain.items() if v is not None}
    return Given(values, dict.fromkeys(given, FLAG), command)


@contextmanager
def speaking_of_keywords() -> Iterator[None]:
    """Have refusals and warnings name keywords, `run_name`, in place of flags."""
    try:
        with log.worded(_worded):
            yield
    except RequestError as error:
        raise RequestError(_worded(str(error)), code=error.code) from None


def folder_of_templates(given: Mapping[str, object]) -> Path | None:
    """Return the folder of the person's own templates, if the keywords name one."""
    return template_folder(_held({n: v for n, v in given.items() if n in _TEMPLATES}))


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
