"""The option --requeue, with Slurm's optional word `expedite`, and --no-requeue."""

from typing import Any

import click

from clusterddp.spec import EXPEDITE

_WORDS = {
    **dict.fromkeys(("yes", "true", "on", "1", "y", "t"), True),
    **dict.fromkeys(("no", "false", "off", "0", "n", "f"), False),
}


class RequeueType(click.ParamType[bool | str]):
    """Yes, no or `expedite`, from a flag, a variable or site.cfg."""

    name = EXPEDITE

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> bool | str:
        """Return True, False or `expedite`."""
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word == EXPEDITE:
            return EXPEDITE
        if word not in _WORDS:
            self.fail(f"{value!r} is neither yes, no nor {EXPEDITE}.", param, ctx)
        return _WORDS[word]


class RequeueOption(click.Option):
    """`--requeue`, `--requeue=expedite` and `--no-requeue`, as sbatch has them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs |= {"type": RequeueType(), "is_flag": False, "flag_value": "yes"}
        super().__init__(*args, **kwargs)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register both forms for one value."""
        super().add_to_parser(parser, ctx)
        parser.add_option(
            obj=self, opts=["--no-requeue"], dest=self.name, action="store_const", const="no"
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the two columns of --help."""
        record = super().get_help_record(ctx)
        return record and (f"--requeue[={EXPEDITE}] / --no-requeue", record[1])
