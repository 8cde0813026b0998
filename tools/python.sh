#!/bin/sh
# Prints the Python that makes the virtual environment: the one asked for, else the one that made the environment that
# is there, else the first that runs and is in range. `python3` comes before newer ones: it is the one its owner uses.
# Every candidate is run, because a version manager leaves commands on the path that only print an error.
# Usage: tools/python.sh VENV [PYTHON]
set -u
venv=$1
asked=${2-}

# The interpreter's own path rather than a shim's, and never the one inside the environment we may have to remove.
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
    echo "error: not a Python that runs and is 3.11 or newer: \`$asked\`" >&2
    echo "hint: make PYTHON=/path/to/python3.12 ..." >&2
    exit 2
fi

made_by=$(sed -n 's/^python=//p' "$venv/stepscope.stamp" 2>/dev/null)
for candidate in ${made_by:+"$made_by"} python3 python3.13 python3.12 python3.11 python3.14 python; do
    resolve "$candidate" 14 && exit
done
cat >&2 <<'END'
error: no Python 3.11 to 3.14 found (looked for python3, python3.11 to python3.14 and python on the path)
hint: install one and name it if it is not on the path:
  apt-get install python3 python3-venv        Debian 12, Ubuntu 24.04 or newer; as root
  uv python install 3.12                      any Linux, no root; then: make PYTHON="$(uv python find 3.12)" ...
END
exit 2
