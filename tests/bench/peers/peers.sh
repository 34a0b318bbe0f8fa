#!/bin/bash
# All-reduces of others between hosta and hostb, beside which ours stand: MPI_Allreduce of each MPI,
# gloo of PyTorch, and an exchange of as many bytes over TCP alone. A line of JSON for each size.
#
#     tests/hosts/hosts.sh run 2 tests/bench/peers/peers.sh BUILD [--python PYTHON] [BYTES...]
#
# Gloo is left out where the interpreter (python3, unless given) has no PyTorch.
set -euo pipefail
peers=$(dirname "$(readlink -f "$0")")
hosts=$peers/../../hosts
build=$(readlink -f "$1")
shift
python=python3
if [ "${1:-}" = --python ]; then
    python=$(readlink -f "$(dirname "$2")")/$(basename "$2")
    shift 2
fi

# The first of two processes says that it listens, and the second then prints the figures.
coproc "$hosts/on.sh" hosta "$build/tests/bench/exchange" listen 5000 "$@"
read -r -u "${COPROC[0]}"
"$hosts/on.sh" hostb "$build/tests/bench/exchange" connect hosta 5000 "$@"

for program in "$build"/tests/bench/all_reduce_*; do
    "$hosts/mpirun.sh" "${program##*_}" hosta:1,hostb:1 "$program" "$@"
done

if "$python" -c "import torch.distributed" 2>/dev/null; then
    "$hosts/on.sh" hostb "$python" "$peers/gloo.py" 1 2 hosta:5000 eth0 "$@" &
    "$hosts/on.sh" hosta "$python" "$peers/gloo.py" 0 2 hosta:5000 eth0 "$@"
    wait
fi
