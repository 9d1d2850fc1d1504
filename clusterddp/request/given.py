"""Values of options given for a request, and where each comes from."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import OptionError
from clusterddp.request.train_config import RECIPES, TRAINING, TrainConfig

FLAG, DEFAULT = "flag", "default"
"""Sources of a value that was typed, and of one that nobody has given."""


@dataclass(frozen=True)
class Given:
    """Values that a command line or the keywords of a call hold, as plain ones."""

    values: Mapping[str, Any]
    """Values by parameter, those of defaults too; None is none."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each value but those of defaults: FLAG, or in words a variable or a file."""
    command: tuple[str, ...] | None = ()
    """COMMAND; None where there can be none."""
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Variables below those of --env."""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of the shell, of which SBATCH_* can be directives below those of --sbatch."""

    def source(self, name: str) -> str:
        """Return the source of a value, in words."""
        return self.sources.get(name, DEFAULT)

    @property
    def typed(self) -> dict[str, Any]:
        """Return the values that were typed."""
        return {name: v for name, v in self.values.items() if self.sources.get(name) == FLAG}

    def flags(self, names: Iterable[str]) -> str:
        """Return those of the parameters that were typed, as flags: `--epochs, --lr`."""
        typed = (name for name in names if self.sources.get(name) == FLAG)
        return ", ".join(f"--{name.replace('_', '-')}" for name in typed)

    def training(self, **paths: str) -> TrainConfig:
        """Return the checked configuration that the values give, with these paths.

        A recipe gives those that have their default. Raises RequestError for a value not valid.
        """
        names = (row.parameter for row in TRAINING)
        values = {name: self.values[name] for name in names if self.values.get(name) is not None}
        for name, value in recipe_settings(values.get("recipe")).items():
            if name not in self.sources:
                values[name] = value
        return TrainConfig(**{**values, **paths})

    @contextlib.contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Add the source of a value to the message that refuses it, unless it was typed."""
        try:
            yield
        except OptionError as error:
            where = self.source(error.option.removeprefix("--").replace("-", "_"))
            if where in (FLAG, DEFAULT):
                raise
            problem = str(error).removeprefix(error.option)
            raise OptionError(error.option, f"{problem} (from {where})", code=error.code) from None


def recipe_settings(name: str | None) -> Mapping[str, object]:
    """Return what a recipe gives to fields of TrainConfig, which itself refuses an unknown name."""
    return RECIPES[name].settings if name in RECIPES else {}
