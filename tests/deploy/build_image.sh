#!/bin/sh
# Build the Dockerfile with buildah, without a daemon, on a base image made from this distribution's
# packages, and unpack the result. Needs root, debootstrap, buildah, and access to package mirrors.
#
#   build_image.sh FOLDER [BUILD-ARG=VALUE ...]
#
# writes FOLDER/root, the image's file system, and FOLDER/image.json, its configuration. pip inside the
# build uses the configuration and certificates of pip on the host. FOLDER keeps what was built before,
# compiled kernels too. An existing FOLDER/base, with Python and venv, is used as the base image.
set -eu
folder=$1
shift
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd) # buildah mounts absolute paths only
export TMPDIR="$folder/tmp" # buildah keeps cache mounts there
mkdir -p "$TMPDIR"
# Overlay stores what each layer changes; vfs, where overlays cannot be mounted, a copy of everything.
driver=vfs
mkdir -p "$folder/try/lower" "$folder/try/upper" "$folder/try/work" "$folder/try/merged"
if unshare --mount mount -t overlay overlay "$folder/try/merged" -o \
    "lowerdir=$folder/try/lower,upperdir=$folder/try/upper,workdir=$folder/try/work" 2>/dev/null; then
    driver=overlay
fi
layers=$([ $driver = vfs ] || echo --layers)
storage="--root $folder/$driver --runroot $folder/run --storage-driver $driver"
bud() { buildah $storage "$@"; }

if [ ! -e "$folder/base/usr/bin/python3" ]; then
    rm -rf "$folder/base"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates \
        "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$folder/base" >"$folder/debootstrap.log"
fi
if ! bud inspect --type image localhost/python-base >/dev/null 2>&1; then
    container=$(bud from scratch)
    bud add -q "$container" "$folder/base" / >/dev/null
    bud commit -q "$container" localhost/python-base >/dev/null
    bud rm "$container" >/dev/null
fi

python3 -m pip config list | sed -n "s/^\(global\|:env:\)\.\([a-z-]*\)='\(.*\)'$/\2 = \3/p" |
    { echo "[global]"; sed 's/\\n/ /g'; } | awk -F ' = ' '!seen[$1]++' >"$folder/pip.conf"
for pair; do
    set -- "$@" --build-arg "$pair"
    shift
done
# What pip's configuration names on this host: constraints, folders of wheels, mirrors (root/simple, files beside it).
for path in $(sed -n 's/^[a-z-]* = //p' "$folder/pip.conf" | tr ' ' '\n' | sed -n 's|^file://||; s|/simple/*$||; /^\//p'); do
    [ ! -e "$path" ] || set -- "$@" -v "$path:$path:ro"
done
# shellcheck disable=SC2086
bud bud -q $layers --isolation chroot --network host --format docker \
    -v "$folder/pip.conf:/etc/pip.conf:ro" -v /etc/ssl/certs:/etc/ssl/certs:ro \
    --build-arg PYTHON_IMAGE=localhost/python-base "$@" -t localhost/convgrad "$here"
container=$(bud from --pull-never localhost/convgrad)
rm -rf "$folder/root"
cp -a "$(bud mount "$container")" "$folder/root"
bud inspect --type image localhost/convgrad >"$folder/image.json"
bud rm "$container" >/dev/null
