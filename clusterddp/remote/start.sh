# Finds a Python on the login node and starts the carried clusterddp with it. POSIX sh.
# Set before it: marker, folder, version, unpack (a program), python, before().
# Stdin belongs to what is started: no program here may read it.
say() { printf '\n%s %s\n' "$marker" "$1"; }
fits() { "$1" -c 'import sys, zlib; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 </dev/null; }
profile() { if [ -r /etc/profile ]; then . /etc/profile; fi </dev/null >/dev/null 2>&1; }

search() {
  for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10 \
    "$HOME"/.local/bin/python3.1?; do
    if fits "$python"; then
      printf 'python=%s\n' "$python"
      return
    fi
  done
  profile
  for module in $(module -t avail 2>&1 </dev/null | sed -n 's/(.*//; /^[Pp]ython\/3[.0-9]*[-.A-Za-z0-9]*$/p' | sort -Vr); do
    if (module load "$module" </dev/null && fits python3) >/dev/null 2>&1; then
      printf 'profile; module load %s; python=python3\n' "$module"
      return
    fi
  done
  for uv in uv "$HOME/.local/bin/uv"; do
    python=$("$uv" python find --no-python-downloads '>=3.10' 2>/dev/null </dev/null) || continue
    if fits "$python"; then
      printf "python='%s'\n" "$python"
      return
    fi
  done
  return 1
}

before </dev/null >&2
command -v sbatch >/dev/null || profile
if ! mkdir -p -m 700 "$folder" || ! cd "$folder" || ! mkdir -p -m 700 clients trees jobs; then
  say "folder $folder"
  exit 1
fi
if [ -z "$python" ]; then
  if [ -r clients/python ]; then . ./clients/python; fi </dev/null >&2
  if [ -z "$python" ] || ! command -v "$python" >/dev/null; then
    if ! search >"clients/python.$$"; then
      rm -f "clients/python.$$"
      say "python $(python3 -V 2>&1 </dev/null)"
      exit 1
    fi
    mv "clients/python.$$" clients/python
    . ./clients/python </dev/null >&2
  fi
elif ! command -v "$python" >/dev/null; then
  say "python there is no $python"
  exit 1
fi
if [ ! -d "clients/$version" ]; then
  say client
  read -r size && "$python" -c "$unpack" "$size" "clients/$version" >&2 || exit 1
fi
say ready
exec "$python" "clients/$version/far.py"
