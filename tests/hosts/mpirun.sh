#!/bin/bash
# Starts processes of an MPI on the hosts of hosts.sh, with on.sh in place of ssh.
#
#     mpirun.sh openmpi|mpich HOST:PROCESSES,... [OPTION OF MPIRUN...] COMMAND...
#
# The processes' environment has what the MPI passes on: MPICH all, Open MPI its own variables.
set -euo pipefail
folder=$(cd "${0%/*}" && pwd)
mpi=$1 hosts=$2
shift 2
count=0
for one in ${hosts//,/ }; do count=$((count + ${one#*:})); done

case $mpi in
openmpi)
    # There are more processes than cores, and root is only root of the namespaces.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # Open MPI does not free all that it allocates.
    export ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0
    exec mpirun.openmpi --host "$hosts" -n "$count" --mca plm_rsh_agent "$folder/on.sh" \
        --mca mpi_yield_when_idle 1 "$@"
    ;;
mpich)
    exec mpirun.mpich -hosts "$hosts" -n "$count" -launcher rsh -launcher-exec "$folder/on.sh" \
        -iface bridge "$@"
    ;;
*)
    echo "mpirun.sh: the first argument is openmpi or mpich, not $mpi" >&2
    exit 2
    ;;
esac
