#!/bin/sh
# Run the tests with the real servers that some of them need: PostgreSQL (15 or newer) and pgbouncer.
#
#   sh tools/servers.sh COMMAND [ARGUMENT…]
#
# The tests start servers of their own from the programs found here, on free ports, and end them. As root, what is
# missing is installed first, and nothing of it is started. Otherwise COMMAND runs without those tests, the line to type
# is printed, and the end is code 3 even where COMMAND passed.
set -u

LEAST=15

# Debian keeps each version's server programs off the path; elsewhere they are on it.
has_postgres() {
    for initdb in /usr/lib/postgresql/*/bin/initdb "$(command -v initdb)"; do
        [ -x "$initdb" ] && [ -x "$(dirname "$(readlink -f "$initdb")")/postgres" ] || continue
        version=$("$initdb" --version 2>/dev/null | sed -n 's/^initdb (PostgreSQL) \([0-9][0-9]*\).*/\1/p')
        [ "${version:-0}" -ge "$LEAST" ] && return 0
    done
    return 1
}
has_pgbouncer() { PATH="$PATH:/usr/sbin" command -v pgbouncer >/dev/null; }
look() {
    missing=
    has_postgres || missing=postgresql
    has_pgbouncer || missing="${missing:+$missing }pgbouncer"
}

# Packages start their services and make a database cluster when they are installed. Both are held back until the end.
# Not by editing what is there: a file of ours is put beside it and taken away, or the old content is put back.
POLICY=/usr/sbin/policy-rc.d
CLUSTERS=/etc/postgresql-common/createcluster.conf
install() (
    ours=
    kept=
    log=$(mktemp) || exit 1
    quietly() {
        DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends "$@" </dev/null >"$log" 2>&1 ||
            { tail -n 20 "$log" >&2; return 1; }
    }
    restore() {
        rm -f "$log"
        [ -z "$ours" ] || rm -f "$POLICY"
        [ -z "$kept" ] || { cat "$kept" >"$CLUSTERS"; rm -f "$kept"; }
    }
    trap restore EXIT
    trap 'exit 130' INT TERM
    if [ ! -e "$POLICY" ]; then
        ours=yes
        printf '#!/bin/sh\nexit 101\n' >"$POLICY" && chmod 755 "$POLICY" || exit 1
    fi
    quietly update || echo "fencepost: apt-get update failed; going on with what it knew" >&2
    case $missing in
        *postgresql*)
            quietly install postgresql-common || exit 1 # which brings that file, and no server yet
            kept=$(mktemp) && cat "$CLUSTERS" >"$kept" || exit 1
            echo 'create_main_cluster = false' >>"$CLUSTERS"
            ;;
    esac
    # shellcheck disable=SC2086  # one word a package
    quietly install $missing
)

look
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "fencepost: installing with apt-get for the tests, none of it is started: $missing" >&2
    install || echo "fencepost: apt-get could not install $missing (see above)" >&2
    look
fi

if has_postgres; then export FENCEPOST_TEST_POSTGRES=1; fi
"$@"
code=$?
[ -n "$missing" ] || exit "$code"
echo "fencepost: without $missing the tests that need it were left out; to run all:  sudo apt-get install $missing" >&2
[ "$code" -ne 0 ] || code=3
exit "$code"
