#!/bin/sh
# Says what build_image.sh lacks on this machine, in a sentence; nothing where it can run.
#
#   missing.sh FOLDER    the folder that build_image.sh is going to be given
set -eu
base=$1/base

[ "$(id -u)" = 0 ] || { echo "it needs root (this is $(id -un))"; exit; }
for program in buildah debootstrap unshare setpriv; do
    command -v "$program" >/dev/null || { echo "$program is not installed"; exit; }
done
unshare --mount true 2>/dev/null || { echo "mount namespaces are not allowed here"; exit; }
[ ! -e "$base/usr/bin/python3" ] || exit 0
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
[ -e "/usr/share/debootstrap/scripts/$release" ] || {
    echo "debootstrap knows no release '$release'"
    exit
}
# The mirror's list of packages is what would be fetched first.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
timeout 180 debootstrap --variant=minbase --print-debs "$release" "$scratch/base" >/dev/null 2>&1 ||
    echo "the distribution's mirror was not reached"
