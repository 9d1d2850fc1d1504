"""A real sshd without a port: ssh starts it as its ProxyCommand, one process per connection."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or ""


def require() -> None:
    """Skip without OpenSSH; fail instead if CLUSTERDDP_REQUIRE_SLURM is 1."""
    missing = [name for name in ("ssh", "ssh-keygen") if not shutil.which(name)]
    missing += [] if SSHD else ["sshd"]
    message = f"not installed: {missing}. apt-get install openssh-server openssh-client"
    if missing and os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        pytest.fail(message)
    if missing:
        pytest.skip(message)


class Host:
    """A host `near` of ssh that is this machine, and a home from which it is used."""

    def __init__(self, folder: Path, login_shell: str = "sh -c") -> None:
        """login_shell: the words that start it, before its command."""
        self.folder, self.there = folder, folder / "there"
        for key in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True
            )
        Path("/run/sshd").mkdir(exist_ok=True) if os.geteuid() == 0 else None
        (folder / "user.pub").rename(folder / "authorized")
        self._server = folder / "sshd_config"
        self.serve(login_shell)
        (folder / "known_hosts").write_text(f"near {(folder / 'host.pub').read_text()}")
        (folder / "config").write_text(
            f"Host near\n HostKeyAlias near\n IdentityFile {folder}/user\n"
            f" UserKnownHostsFile {folder}/known_hosts\n StrictHostKeyChecking yes\n"
            f" ProxyCommand {SSHD} -i -f {self._server} -E {folder}/log\n"
        )
        self._connections = folder / "connections"
        (folder / "bin").mkdir()
        ssh = folder / "bin/ssh"
        ssh.write_text(
            f'#!/bin/sh\n[ "$1" = -G ] || echo "$@" >>{self._connections}\n'
            f'exec {shutil.which("ssh")} -F {folder}/config "$@"\n'
        )
        ssh.chmod(0o755)
        (folder / "home/.config/clusterddp").mkdir(parents=True)
        self.site()
        self.work = folder / "work"
        self.work.mkdir()
        (self.work / "train.py").write_text("print('hi')\n")

    def serve(self, login_shell: str) -> None:
        """Let every later connection run its command with these words."""
        wrapper = self.folder / "login"
        wrapper.write_text(f'#!/bin/sh\nexec {login_shell} "$SSH_ORIGINAL_COMMAND"\n')
        wrapper.chmod(0o755)
        self._server.write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/authorized\n"
            f"StrictModes no\nUsePAM no\nPidFile none\nForceCommand {wrapper}\n"
        )

    def listen(self, address: str, *lines: str) -> None:
        """Configure a sshd that listens, for `sshd -D`, and let ssh connect to it."""
        self._server.write_text(
            f"ListenAddress {address}:22\nHostKey {self.folder}/host\nStrictModes no\nUsePAM no\n"
            + "\n".join(
                [f"AuthorizedKeysFile {self.folder}/authorized", "PidFile none", *lines, ""]
            )
        )
        (self.folder / "config").write_text(
            f"Host near\n HostName {address}\n HostKeyAlias near\n"
            f" IdentityFile {self.folder}/user\n UserKnownHostsFile {self.folder}/known_hosts\n"
            " ServerAliveInterval 1\n ServerAliveCountMax 3\n"
        )

    def site(self, *lines: str, python: str = sys.executable) -> None:
        """Write the section [cluster:big] of the home's site.cfg, with more lines."""
        path = self.folder / "home/.config/clusterddp/site.cfg"
        own = f"host = near\nfolder = {self.there}" + (f"\npython = {python}" if python else "")
        path.write_text("\n".join(["[cluster:big]", own, *lines, ""]))

    def environ(self, **more: str) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("CLUSTERDDP_", "SLURM_"))}
        kept |= {"HOME": str(self.folder / "home"), "LC_ALL": "C.UTF-8", **more}
        kept.pop("XDG_CONFIG_HOME", None)
        return kept | {"PATH": f"{self.folder}/bin:{kept['PATH']}"}

    def run(self, *argv: str, on: str = "big", **more: str) -> subprocess.CompletedProcess[str]:
        """Run `clusterddp --on big ARGV` from the work tree."""
        return subprocess.run(
            [sys.executable, "-m", "clusterddp", "--on", on, *argv],
            cwd=self.work, env=self.environ(**more), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="surrogateescape", timeout=120, check=False,
        )  # fmt: skip

    def command_lines(self) -> list[str]:
        """Return those of the sessions of ssh that began since `connections` was asked."""
        return self._connections.read_text().splitlines()

    def connections(self) -> int:
        """How many sessions of ssh began since this was last asked."""
        count = len(self.command_lines()) if self._connections.exists() else 0
        self._connections.unlink(missing_ok=True)
        return count
