#!/bin/sh
# Print, in one sentence, what build_image.sh needs and this machine lacks; nothing if it can run.
#
#   missing.sh FOLDER    the folder that build_image.sh will be given
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
# Fetch the mirror's package list, the first thing that debootstrap needs.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
timeout 180 debootstrap --variant=minbase --print-debs "$release" "$scratch/base" >/dev/null 2>&1 ||
    echo "the distribution's mirror cannot be reached"
