"""The proof that a message in the store comes from a rank of this run: an HMAC over what it says.

Whoever reaches the port can read and write the store, so each message carries a proof that its
writer holds the run's nonce, and nothing but JSON is read.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import TrainingError

NONCE = "CLUSTERDDP_NONCE"


def printable(text: str) -> str:
    """At most a line of what a stranger may have written, safe for a log."""
    return text if text.isprintable() and len(text) <= 200 else ascii(text[:200])


class UnprovenError(ValueError):
    """A message without the right proof; `content` is what it says."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__("no proof")
        self.content = content


@dataclass(frozen=True)
class Seal:
    """Writes messages with a proof that this run wrote them under this key, and checks them.

    The proof is an HMAC keyed by the nonce. It covers the run's identity and the round, so that a
    message of another attempt does not pass; without a nonce it is empty.
    """

    run: str
    key: bytes = field(repr=False)
    round: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Seal":
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
        run = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
        if environ.get(NONCE) == "":
            raise TrainingError(
                f"{NONCE} is empty: expected the random hex digits that all ranks of a run "
                "share. Unset it to start ranks without."
            )
        return cls(run, environ.get(NONCE, "").encode(errors="surrogateescape"))

    def of_round(self, number: int) -> "Seal":
        return Seal(self.run, self.key, number)

    def wrap(self, name: str, content: dict[str, Any]) -> str:
        text = json.dumps(content)
        return json.dumps({"content": text, "proof": self._proof(name, text)})

    def open(self, name: str, message: bytes) -> dict[str, Any]:
        """What was wrapped under `name`; raises ValueError, or UnprovenError where it is one."""
        try:
            outer = json.loads(message)
            text, proof = outer["content"], outer["proof"].encode()
            proven = hmac.compare_digest(proof, self._proof(name, text).encode())
            content = json.loads(text)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError("no message of a rank") from error
        if not isinstance(content, dict):
            raise ValueError("no message of a rank")
        if not proven:
            raise UnprovenError(content)
        return content

    def _proof(self, name: str, text: str) -> str:
        if not self.key:
            return ""
        scope = json.dumps([self.run, self.round, name, text])
        return hmac.new(self.key, scope.encode(), hashlib.sha256).hexdigest()
