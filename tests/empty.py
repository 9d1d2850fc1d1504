"""Runs the fast tests of the source distribution where there is no git, no Slurm and no network.

    python -m tests.empty
    python -m tests.empty -- -n 2 tests/test_wheel.py

A Debian's root file system with Slurm removed, in namespaces of its own, and this Python in it.
What is written there is in memory, and gone at the end. Needs root.
"""

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.on_slurm.versions import DEFAULT_ROOTS, Unavailable, root_of

ROOT = Path(__file__).parents[1]
FAST = ("-n", "3", "--dist", "loadfile", "-m", "not slow")
# $1 is the root file system, $2 the PATH, $3 the directories to show in it, $4 that of the sources,
# $5 the environment's site-packages, which name the sources; then the command.
_ENTER = """
set -e
root=$1 path=$2 shown=$3 sources=$4 work=$4.mounts site=$5; shift 5
mkdir "$work"
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root" "$work/site" "$work/site-work"
echo "$sources" >"$work/site/sources.pth"
mount -t overlay -o "lowerdir=$root,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
cd "$work/root"
mount -t tmpfs tmpfs tmp
printf '%s\\n' "$shown" | while read -r each; do
  mkdir -p "./$each"; mount --bind "$each" "./$each"
done
mount -t overlay -o "lowerdir=$site,upperdir=$work/site,workdir=$work/site-work" overlay "./$site"
mount -t proc proc proc; mount --rbind /dev dev; mount -t sysfs sysfs sys
names='dpkg-query -W -f "\\${Package}\\n" "*slurm*" munge git'
chroot . sh -c "dpkg --purge --force-all \\$($names)" \\
  >/dev/null 2>&1 || :
ip link set lo up
exec chroot . env -i HOME=/root LANG=C.UTF-8 "PATH=$path" \\
  sh -c 'cd "$0" && ! command -v git && ! command -v srun && exec "$@"' "$sources" "$@"
"""


def main() -> int:
    """Returns pytest's exit code; 1 where there is no root file system."""
    argv = sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder]
        subprocess.run(build, cwd=ROOT, check=True)
        [archive] = Path(folder).glob("*.tar.gz")
        subprocess.run(["tar", "-xzf", str(archive), "-C", folder], check=True)
        try:
            root = root_of("trixie", DEFAULT_ROOTS)
        except Unavailable as error:
            print(error, file=sys.stderr)
            return 1
        return enter(root, Path(folder, archive.name.removesuffix(".tar.gz")), argv or FAST)


def enter(root: Path, sources: Path, argv: "list[str] | tuple[str, ...]") -> int:
    """Run pytest on these sources inside a copy of the root; returns its exit code."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    shown = "\n".join(dict.fromkeys([sys.prefix, sys.base_prefix, *packages, str(sources)]))
    site = sysconfig.get_path("purelib")
    path = f"{sys.prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    spaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *argv]
    inside = ["sh", "-c", _ENTER, "sh", str(root), path, shown, str(sources), site, *pytest]
    return subprocess.run([*spaces, *inside], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
