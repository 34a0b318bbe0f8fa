#!/bin/bash
# Hosts on one machine, for tests of jobs that span several: each is a set of namespaces of the
# kernel, joined to the others by a pair of network interfaces (veth) and a bridge.
#
#     hosts.sh run N COMMAND...       makes N hosts, runs the command beside them, removes all, and
#                                     ends as the command ended
#     hosts.sh possible               says how this machine makes hosts, or why it does not
#
# The command runs on a host of its own, "login". There and on the other hosts these work:
#
#     hosts.sh on HOST COMMAND...     runs a command on a host, in place of ssh; so does on.sh
#     hosts.sh bytes HOST             how many bytes it has sent, and how many it has received
#     hosts.sh cut HOST               unplugs its cable; `hosts.sh mend HOST` plugs it in
#     hosts.sh limit HOST RATE        limits both directions of its cable, as tc(8) writes rates
#                                     ("8mbit"); `hosts.sh limit HOST none` ends that
#
# The hosts are called hosta, hostb and so on. Their addresses are 10.77.0.1, 10.77.0.2 and so on,
# and login's is 10.77.0.254. They share the files, except /dev/shm, and the numbers of processes.
# Each has its own network, host name, /dev/shm, /sys and System V memory. All have a folder for
# short-lived files (TMPDIR) that is theirs alone, and goes with them.
#
# Nothing outlives the command, even if this script is killed: the kernel ends all processes inside,
# and with them the namespaces. Other runs have hosts of the same names, and never meet these.
#
# It needs root, or a system that lets users make namespaces. Without them, and with
# MOONSHARD_NO_NETNS=1, `run` does nothing, says why in its last line, and ends with 77, which ctest
# shows as skipped.
set -euo pipefail

case :$PATH: in *:/usr/sbin:*) ;; *) PATH=$PATH:/usr/sbin:/sbin ;; esac
self=$0
subnet=10.77.0
skipped=77

fail() {
    printf 'hosts.sh: %s\n' "$*" >&2
    exit 1
}

# Fills `private` with a command that runs another in new namespaces. When it ends, all inside ends.
# Where that cannot be, it fails, and `reason` says why in one line.
choose_private() {
    local program said
    for program in ip tc unshare nsenter setpriv; do
        if ! command -v "$program" >/dev/null; then
            reason="there is no program \"$program\" (Debian: iproute2, util-linux)"
            return 1
        fi
    done
    private=(unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc)
    [ "$(id -u)" = 0 ] || private+=(--map-root-user)
    if ! said=$("${private[@]}" ip link set lo up 2>&1); then
        reason="the system makes no namespaces: ${said//$'\n'/ }. Run as root, or let users make \
namespaces (sysctl kernel.unprivileged_userns_clone=1, and user.max_user_namespaces above 0). \
A container needs --privileged"
        return 1
    fi
}

is_skipped() { [ "${MOONSHARD_NO_NETNS:-}" = 1 ]; }

possible() {
    if is_skipped; then
        echo "skipped, MOONSHARD_NO_NETNS=1"
        return
    fi
    choose_private || fail "$reason"
    if [ "$(id -u)" = 0 ]; then echo "namespaces"; else echo "namespaces of a user"; fi
}

# Outside. Job control gives the child a process group of its own: an interrupt from the terminal
# reaches this shell alone. If the shell is killed, setpriv has the kernel kill unshare.
run() {
    local child="" code=0
    if is_skipped; then
        echo "hosts.sh: skipped, MOONSHARD_NO_NETNS=1"
        exit $skipped
    elif ! choose_private; then
        echo "hosts.sh: $reason" >&2
        exit $skipped
    fi
    TMPDIR=$(mktemp -d)
    export TMPDIR
    trap 'rm -rf "$TMPDIR"' EXIT
    trap '[ -z "$child" ] || kill -KILL "$child"; exit 143' TERM INT HUP
    set -m
    setpriv --pdeathsig KILL "${private[@]}" "$self" inside "$@" <&0 &
    child=$!
    wait "$child" || code=$?
    exit $code
}

# On login, as process 1 of the new namespaces: makes the hosts, and runs the command.
inside() {
    local count=$1 number name
    shift
    hostname login
    own_folders
    ip link set lo up
    ip link add bridge type bridge
    ip address add $subnet.254/24 dev bridge
    ip link set bridge up
    printf '%s\n' "127.0.0.1 localhost" "$subnet.254 login" >/dev/shm/hosts
    mount --bind /dev/shm/hosts /etc/hosts
    export MOONSHARD_HOSTS=""
    for ((number = 1; number <= count; number++)); do
        name=host$(printf "\\x$(printf %x $((96 + number)))")
        echo "$subnet.$number $name" >>/etc/hosts
        add_host "$name" "$subnet.$number"
    done
    "$@"
}

# A host is kept by one process, whose line says that the host is ready.
add_host() {
    local ready
    exec {ready}< <(exec unshare --mount --net --uts --ipc "$self" keep "$1" "$2")
    read -r -u "$ready" || fail "$1 could not be made"
    MOONSHARD_HOSTS+="$1=$REPLY "
    exec {ready}<&-
}

# On a new host. The other end of its cable is where process 1 is, with the host's name.
keep() {
    hostname "$1"
    own_folders
    ip link set lo up
    ip link add eth0 type veth peer name "$1" netns 1
    nsenter --target 1 --net ip link set "$1" master bridge up
    ip address add "$2/24" dev eth0
    ip link set eth0 up
    echo $$
    exec sleep infinity >/dev/null
}

# Shared memory of its own, and /sys with its own interfaces beside the machine's control groups.
own_folders() {
    mount -t tmpfs -o mode=1777 shm /dev/shm
    if [ -d /sys/fs/cgroup ]; then
        mkdir /dev/shm/cgroup
        mount --rbind /sys/fs/cgroup /dev/shm/cgroup
        mount -t sysfs sysfs /sys
        mount --rbind /dev/shm/cgroup /sys/fs/cgroup
        umount --lazy /dev/shm/cgroup
        rmdir /dev/shm/cgroup
    else
        mount -t sysfs sysfs /sys
    fi
    own_sessions
}

# Open MPI makes this folder when a job begins. At a job's end it removes the files there, and then
# the folder if it is empty. Two jobs that make it at the same moment fail.
own_sessions() {
    local sessions
    sessions=$TMPDIR/ompi.$(hostname).$(id -u)
    mkdir -p "$sessions/kept"
}

# The number of the process that keeps a host.
keeper_of() {
    local hosts=" ${MOONSHARD_HOSTS:-}" rest
    rest=${hosts#* "$1="}
    if [ "$rest" = "$hosts" ]; then
        hosts=$(sed 's/=[0-9]*//g' <<<"$hosts")
        fail "there is no host \"$1\" among those that hosts.sh run has made here:$hosts"
    fi
    echo "${rest%% *}"
}

# What a login sets in the environment, what hosts.sh needs there, what tests tell sanitizers, and what
# counts assertions (tests/count).
login_variables=(HOME LANG PATH SHELL TMPDIR USER MOONSHARD_HOSTS ASAN_OPTIONS TSAN_OPTIONS UBSAN_OPTIONS
    LD_PRELOAD LUA_INIT MOONSHARD_COUNT)

# As ssh does, it joins the words of the command for a shell, in the home folder. It starts no program but nsenter: specs and
# launchers call it a thousand times.
on() {
    local keeper name kept=()
    keeper=$(keeper_of "$1")
    shift
    for name in "${login_variables[@]}"; do
        [ -z "${!name+set}" ] || kept+=("$name=${!name}")
    done
    exec nsenter --target "$keeper" --net --uts --ipc --mount env -i "${kept[@]}" sh -c "cd; $*"
}

at_bridge() { nsenter --target 1 --net --mount "$@"; }

# What the bridge receives from the host, the host has sent.
bytes() {
    local counts=/sys/class/net/$1/statistics
    keeper_of "$1" >/dev/null
    at_bridge cat "$counts/rx_bytes" "$counts/tx_bytes" | paste -s -d ' '
}

# The host's own end stays up, and has no carrier.
plug() {
    keeper_of "$1" >/dev/null
    at_bridge ip link set "$1" "$2"
}
cut() { plug "$1" down; }
mend() { plug "$1" up; }

# Each end of the cable limits what it sends. The bucket of tbf holds the largest packet of a veth.
limit() {
    local keeper rate=(tbf rate "$2" burst 128kb latency 200ms)
    keeper=$(keeper_of "$1")
    [ "$2" != none ] || rate=(pfifo_fast)
    at_bridge tc qdisc replace dev "$1" root "${rate[@]}"
    nsenter --target "$keeper" --net tc qdisc replace dev eth0 root "${rate[@]}"
}

verb=${1:-}
case $verb in
possible | run | inside | keep | on | bytes | cut | mend | limit) shift; "$verb" "$@" ;;
*) fail "no verb \"$verb\": the top of the script says what there is" ;;
esac
