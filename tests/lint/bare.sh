#!/bin/sh
# Installs a .deb and a wheel in a bare Debian 12, which has neither this checkout nor a compiler, and uses them there.
#
#     tests/lint/bare.sh FOLDER    of one .deb and one .whl; needs root, mmdebstrap and a mirror of Debian
set -eu
folder=$(cd "$1" && pwd)
root=$folder/root
trap 'rm -rf "$root"' EXIT
mmdebstrap --quiet --variant=apt --include=python3-venv bookworm "$root"
cp "$folder"/*.deb "$folder"/*.whl "$root/tmp"
cp /etc/resolv.conf "$root/etc/resolv.conf"

# bare COMMAND...: in the bare system, in a namespace with processes and shared memory of its own, which end with it.
bare() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/srv DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 \
        unshare --mount --pid --fork --kill-child sh -c 'mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm" && exec chroot "$0" "$@"' \
        "$root" "$@"
}

# small PROGRAM: the main job, short, on the text that was installed.
small() {
    bare sh -ec 'cd /srv && rm -rf runs && "$0" run gpt_bytes -n 2 dtype=f32 steps=3 batch=2 length=32 warmup=1 model.layers=1 model.width=32 \
        model.heads=2 hook=recipes/hooks/dgc.lua >log 2>&1 || { cat log; exit 1; }
        grep -a "sayings in English" log || { cat log; exit 1; }
        "$0" generate runs/gpt_bytes/model --prompt Once --count 8 >log 2>&1 || { cat log; exit 1; }' "$1"
}

echo "a .deb for another architecture is refused"
other=arm64
[ "$(dpkg --print-architecture)" != arm64 ] || other=amd64
dpkg-deb -R "$root"/tmp/*.deb "$folder/other"
sed -i "s/^Architecture: .*/Architecture: $other/" "$folder/other/DEBIAN/control"
dpkg-deb -b "$folder/other" "$root/tmp/other" >/dev/null
rm -rf "$folder/other"
! bare dpkg -i /tmp/other >"$folder/log" 2>&1
grep "package architecture ($other) does not match system" "$folder/log" || { cat "$folder/log"; exit 1; }

echo "the .deb"
bare sh -c 'apt-get update -q && apt-get install -q -y --no-install-recommends /tmp/moonshard*.deb' >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
small moonshard
bare sh -c 'man -w moonshard 2>/dev/null || ls /usr/share/man/man1/moonshard.1*' >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
bare moonshard run gpt_bytes --device cuda steps=1 >"$folder/log" 2>&1 && { echo "a GPU was not missed"; exit 1; }
cat "$folder/log"
echo "its module of Open MPI"
bare sh -c 'apt-get install -q -y --no-install-recommends openmpi-bin' >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
bare sh -ec 'cd /srv && mpirun --allow-run-as-root --oversubscribe -n 2 moonshard run gpt_bytes dtype=f32 steps=2 batch=2 length=16 warmup=1 \
    model.layers=1 model.width=16 model.heads=2 run=mpi' >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
bare sh -c 'apt-get purge -q -y moonshard && apt-get autoremove -q -y --purge' >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
[ ! -e "$root/usr/share/moonshard" ]

echo "the wheel"
bare sh -ec 'python3 -m venv /srv/python && /srv/python/bin/pip install -q --no-index /tmp/*.whl' >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
small /srv/python/bin/moonshard
