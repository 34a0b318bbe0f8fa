#!/bin/bash
# All-reduces between the hosts of hosts.sh, ours beside those of others: MPI_Allreduce of each MPI, ours
# over it, gloo of PyTorch, and an exchange of as many bytes over TCP alone. For each of them a line of
# JSON for each size, and one that says how many bytes hosta has sent meanwhile.
#
#     tests/hosts/hosts.sh run 2 tests/bench/peers/peers.sh BUILD [--where HOST:RANKS,...]
#         [--python PYTHON] [BYTES...]
#
# There is one rank on hosta and one on hostb unless --where says otherwise; gloo and the exchange are of
# such ranks only. Gloo is left out where the interpreter (python3, unless given) has no PyTorch.
set -euo pipefail
peers=$(dirname "$(readlink -f "$0")")
hosts=$peers/../../hosts
build=$(readlink -f "$1")
shift
python=python3
pair=hosta:1,hostb:1
where=$pair
while [[ ${1:-} == --* ]]; do
    case $1 in
    --where) where=$2 ;;
    --python) python=$(readlink -f "$(dirname "$2")")/$(basename "$2") ;;
    *) echo "peers.sh: there is no switch $1" >&2 && exit 2 ;;
    esac
    shift 2
done

sent() { "$hosts/hosts.sh" bytes hosta | cut -d ' ' -f 1; }

# measure PEER COMMAND...
measure() {
    local peer=$1 before
    before=$(sent)
    shift
    "$@"
    echo "{\"peer\": \"$peer\", \"sent\": $(($(sent) - before))}"
}

# The first of two processes says that it listens, and the second then prints the figures.
exchange() {
    coproc "$hosts/on.sh" hosta "$build/tests/bench/exchange" listen 5000 "$@"
    read -r -u "${COPROC[0]}"
    "$hosts/on.sh" hostb "$build/tests/bench/exchange" connect hosta 5000 "$@"
}

gloo() {
    "$hosts/on.sh" hostb "$python" "$peers/gloo.py" 1 2 hosta:5000 eth0 "$@" &
    "$hosts/on.sh" hosta "$python" "$peers/gloo.py" 0 2 hosta:5000 eth0 "$@"
    wait
}

# all_reduce MPI PROGRAM [BYTES...]
all_reduce() {
    local mpi=$1 figures
    shift
    figures=$(mktemp)
    "$hosts/mpirun.sh" "$mpi" "$where" env "FIGURES=$figures" "$@"
    cat "$figures"
    rm "$figures"
}

[ "$where" != $pair ] || measure tcp exchange "$@"
for program in "$build"/tests/bench/all_reduce_*; do
    mpi=${program##*_}
    measure "$mpi" all_reduce "$mpi" "$program" "$@"
    measure "moonshard-$mpi" "$hosts/mpirun.sh" "$mpi" "$where" env "MOONSHARD_MPI=$mpi" \
        "$build/bin/moonshard" run --threads 1 "$peers/moonshard.lua" "peer=moonshard-$mpi" "sizes=$*"
done
if [ "$where" = $pair ] && "$python" -c "import torch.distributed" 2>/dev/null; then
    measure gloo gloo "$@"
fi
