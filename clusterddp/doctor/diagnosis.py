"""Findings of the checks of a login node, and the site.cfg that follows from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clusterddp import formatting

GOOD, WARNING, BAD = "good", "warning", "bad"


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    verdict: str
    seen: str
    advice: str = ""
    """Step to take; empty where it is good."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Findings, for scripts."""


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and the settings of site.cfg that follow from them."""

    checks: tuple[Check, ...]
    settings: Mapping[str, str]
    """Empty is one that must not stay as it is, and for which there is no other."""
    remarks: tuple[str, ...] = ()
    """Lines about the site for the comments of a site.cfg."""

    @property
    def verdict(self) -> str:
        """Return the worst verdict of a check."""
        verdicts = {check.verdict for check in self.checks}
        return next((verdict for verdict in (BAD, WARNING) if verdict in verdicts), GOOD)


def proposed(diagnosis: Diagnosis, given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a proposed site.cfg, without what was found to be wrong."""
    settings = {**given, **diagnosis.settings}
    return {name: value for name, value in settings.items() if value}


def site_cfg(diagnosis: Diagnosis, given: Mapping[str, str]) -> str:
    """Return the text of a site.cfg, where a hint that is no setting stands in a comment.

    given: settings that are in force; those that follow from the checks come before them.
    """
    settings = proposed(diagnosis, given)
    lines = ["# Proposed by 'clusterddp doctor'. 'clusterddp site' shows what is in force."]
    lines += [f"# {formatting.line(remark)}" for remark in diagnosis.remarks]
    lines += ["", "[defaults]", *_set(settings)]
    return "\n".join([*lines, ""])


def _set(settings: Mapping[str, str]) -> Iterator[str]:
    hints = {
        "partition": "gpu",
        "account": "physics",
        "time": "04:00:00",
        "output-root": "/shared/runs",
        "data-dir": "/shared/datasets",
    }
    for name in sorted({*hints, *settings}):
        if name in settings:
            yield f"{name} = {settings[name]}"
        else:
            yield f"# {name} = {hints[name]}"
