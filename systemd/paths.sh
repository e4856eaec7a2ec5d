# shellcheck shell=sh disable=SC2034
# The folders of install and uninstall; variables of the environment override them.

# Prefixed to every path written to, for packagers; the files contain paths without it.
DESTDIR=${DESTDIR:-}
PREFIX=${PREFIX:-/usr/local}
SYSCONFDIR=${SYSCONFDIR:-/etc}
# systemd reads units below /usr and /usr/local, but not below another prefix.
case $PREFIX in
/usr | /usr/local) UNITDIR=${UNITDIR:-$PREFIX/lib/systemd/system} TMPFILESDIR=${TMPFILESDIR:-$PREFIX/lib/tmpfiles.d} ;;
*) UNITDIR=${UNITDIR:-/etc/systemd/system} TMPFILESDIR=${TMPFILESDIR:-/etc/tmpfiles.d} ;;
esac

PROGRAM=$PREFIX/bin/mig-manager
LIBRARY=$PREFIX/lib/mig-manager
SHARE=$PREFIX/share/mig-manager
MANUAL=$PREFIX/share/man/man1
CONFIG=$SYSCONFDIR/mig-manager
STATE=/var/lib/mig-manager
UNITS="mig-manager.service mig-manager-boot.service"
# Files that belong to the administrator once they are changed.
EDITABLE="mig-manager.env config.yaml"
# The program has one of these lines, by how it was installed. Other programs of the name have none.
PACKAGE_MARK="# Made by mig-manager's package."
MARK="# Made by mig-manager's installer."

fail() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 1
}

# Holds the lock of the GPUs until this shell ends or closes descriptor 9: a change under way starts
# the program again, to change or roll back. Fails, and says what was not done, if another manager
# keeps the lock.
lock_gpus() {
    lock=$DESTDIR/run/mig-manager/lock
    [ -e "$lock" ] && command -v flock >/dev/null || return 0
    exec 9<>"$lock"
    flock --wait "${LOCK_WAIT_S:-300}" 9 ||
        fail "another manager is at work on the GPUs; nothing was $1: $(cat "$lock.owner" 2>/dev/null)"
}

# Whether the files are for this machine, and systemd runs on it.
is_here() {
    [ -z "$DESTDIR" ] && [ -d /run/systemd/system ] && command -v systemctl >/dev/null
}
