#!/bin/sh
# What a build says of MPI is true: with each subset of the MPIs of this machine, by the summary of
# CMake and by `moonshard info`. The program and the engine link none.
#
#     tests/lint/mpi.sh BUILD GENERATOR [openmpi] [mpich]
set -eu
build=$1
CMAKE_GENERATOR=$2
export CMAKE_GENERATOR
shift 2
source=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
    echo "mpi.sh: $*" >&2
    exit 1
}

# expect WHAT PATTERN TEXT
expect() {
    printf '%s\n' "$3" | grep -Eq -- "$2" || fail "$1: no line '$2' in:
$3"
}

# configure MPIS SWITCHES...: the summary of a build that finds these MPIs and no others.
configure() {
    names=$1
    shift
    rm -rf "$folder/pc" "$folder/tree"
    mkdir "$folder/pc"
    for path in $(pkg-config --variable pc_path pkg-config | tr : ' '); do
        [ ! -d "$path" ] || find "$path" -name '*.pc' -exec ln -sf {} "$folder/pc" ';'
    done
    case " $names " in *' openmpi '*) ;; *) rm -f "$folder"/pc/ompi*.pc ;; esac
    case " $names " in *' mpich '*) ;; *) rm -f "$folder"/pc/mpich*.pc ;; esac
    PKG_CONFIG_LIBDIR=$folder/pc cmake -S "$source" -B "$folder/tree" \
        -DMOONSHARD_WITH_CUDA=OFF -DMOONSHARD_WITH_NCCL=OFF -DMOONSHARD_TESTS=OFF "$@" 2>&1
}

# try MPIS: what CMake says, the modules that there are, and what the program says of them.
try() {
    found=$1
    shown=$(echo "$found" | sed 's/ /, /g')
    lines=$(configure "$found")
    if [ -n "$found" ]; then
        expect "summary with $found" "MPI +$(echo "$found" | sed 's/ / [0-9.]+, /g') [0-9.]+\$" "$lines"
    else
        expect "summary without MPI" 'MPI +not found$' "$lines"
        shown='not built'
    fi
    for name in openmpi mpich; do
        case " $found " in
        *" $name "*) cmake --build "$folder/tree" --target "moonshard_mpi_$name" >/dev/null ;;
        *) rm -f "$libraries/libmoonshard_mpi_$name.so" ;;
        esac
    done
    expect "info with '$found'" "^mpi +$shown\$" "$("$folder/program/bin/moonshard" info)"
}

install() {
    cmake --install "$build" --prefix "$folder/program" >/dev/null
    libraries=$(dirname "$(find "$folder/program" -name libmoonshard.so)")
}

install
for file in "$folder/program/bin/moonshard" "$libraries/libmoonshard.so" \
    "$(find "$folder/program" -name libmoonshard_lua.so)"; do
    ! ldd "$file" | grep -i mpi || fail "$file links an MPI"
done
try ''
for name in "$@"; do
    install
    try "$name"
done
if [ $# = 2 ]; then
    install
    try "$*"
fi
expect "MOONSHARD_WITH_MPI=OFF" 'MPI +off$' "$(configure "$*" -DMOONSHARD_WITH_MPI=OFF)"
lines=$(configure '' -DMOONSHARD_WITH_MPI=ON) && fail "MOONSHARD_WITH_MPI=ON is satisfied without an MPI"
expect "MOONSHARD_WITH_MPI=ON" 'MPI \(MOONSHARD_WITH_MPI=ON, Debian: ' "$lines"
