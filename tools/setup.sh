#!/bin/sh
# Bring .venv to what requirements/<profile>.lock says, then install the project itself into it (editable).
#
#   sh tools/setup.sh runtime|dev         PYTHON names the interpreter to build with (default: python3)
#
# What was installed is remembered by content, not by time: a copy of the lock file and of pyproject.toml inside .venv.
# When neither changed, nothing is said and nothing is done.
set -eu

profile=${1:?usage: setup.sh runtime|dev}
python=${PYTHON:-python3}
venv=.venv
lock=requirements/$profile.lock
inside=$venv/bin/python

# Rounded up from a fresh installation on Linux; they tell a reader what to expect and decide nothing.
case $profile in
    runtime) download=10 disk=60 ;;
    dev) download=150 disk=560 ;;
    *) echo "setup: no profile '$profile' (runtime or dev)" >&2; exit 2 ;;
esac

stop() { echo "fencepost: $1" >&2; exit 1; }
same() { cmp -s "$1" "$2"; }

# The dev lock holds everything that the runtime lock holds, in the same versions.
locked() { same "$lock" "$venv/$profile.lock" || { [ "$profile" = runtime ] && same requirements/dev.lock "$venv/dev.lock"; }; }
installed() { same pyproject.toml "$venv/pyproject.toml" && [ "$(cat "$venv/installed-at" 2>/dev/null)" = "$PWD" ]; }

if [ -e "$venv" ] && ! "$inside" -c '' 2>/dev/null; then
    stop "$venv does not work (its Python is gone, or it was left half made): run 'make clean', then this again"
fi
if [ -x "$inside" ] && locked && installed; then exit 0; fi

if [ ! -e "$venv" ]; then
    command -v "$python" >/dev/null 2>&1 ||
        stop "no '$python' found: install Python 3.11 or newer, or name one with PYTHON=/path/to/python3"
    found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        stop "'$python' does not run: name a Python 3.11 or newer with PYTHON=/path/to/python3"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        stop "'$python' is Python $found, 3.11 or newer is needed: name one with PYTHON=/path/to/python3"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        stop "'$python' cannot make virtual environments: on Debian or Ubuntu run 'apt-get install python$found-venv', then this again"
fi

if ! locked; then
    count=$(grep '==' "$lock" | grep -vc "sys_platform == 'win32'")
    echo "fencepost: installing $count packages from $lock into $venv (about $download MB to fetch, $disk MB on disk)"
    echo "fencepost: nothing outside this folder changes; 'make clean' removes it again"
    if [ ! -e "$venv" ]; then
        # A half made environment must not look like a whole one to the next run.
        trap 'rm -rf "$venv"' EXIT
        trap 'exit 130' INT TERM
        "$python" -m venv "$venv"
        trap - EXIT INT TERM
    fi
    "$inside" -m pip install --quiet --disable-pip-version-check --require-hashes --requirement "$lock" ||
        stop "the packages could not be installed (see above); run this again, or 'make clean' first"
    cp "$lock" "$venv/$profile.lock"
fi

# --no-deps: the lock is the only source of packages. --no-build-isolation: hatchling comes from it too.
"$inside" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . ||
    stop "the project itself could not be installed into $venv (see above)"
cp pyproject.toml "$venv/pyproject.toml"
echo "$PWD" > "$venv/installed-at"
