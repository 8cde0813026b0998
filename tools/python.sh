#!/bin/sh
# Prints the Python for the virtual environment: the requested one, or else the one that created the existing environment,
# or else the first supported one that runs. `python3` comes before newer versions because it is the user's default.
# Every candidate is executed, because version managers put commands on the PATH that only print an error.
# Usage: tools/python.sh VENV [PYTHON]
set -u
venv=$1
asked=${2-}

# Print the real path of the interpreter instead of a shim, and never the one inside the environment, which may be removed.
resolve() {
    "$1" -c '
import os, sys
newest = (3, int(sys.argv[2]))
if not (3, 11) <= sys.version_info[:2] <= newest: sys.exit(1)
inside = sys.prefix == os.path.abspath(sys.argv[1])
print(sys._base_executable if inside else sys.executable)' "$venv" "$2" 2>/dev/null
}

if [ -n "$asked" ]; then
    resolve "$asked" 99 && exit
    echo "error: \`$asked\` is not a working Python 3.11 or newer" >&2
    echo "hint: make PYTHON=/path/to/python3.12 ..." >&2
    exit 2
fi

made_by=$(sed -n 's/^python=//p' "$venv/stepscope.stamp" 2>/dev/null)
for candidate in ${made_by:+"$made_by"} python3 python3.13 python3.12 python3.11 python3.14 python; do
    resolve "$candidate" 14 && exit
done
cat >&2 <<'END'
error: no Python 3.11 to 3.14 found (looked for python3, python3.11 to python3.14 and python on the PATH)
hint: install one, and pass its path if it is not on the PATH:
  apt-get install python3 python3-venv        Debian 12, Ubuntu 24.04 or newer; as root
  uv python install 3.12                      any Linux, no root; then: make PYTHON="$(uv python find 3.12)" ...
END
exit 2
