#!/bin/bash
# First light: the most valuable of what a GPU can tell, where it is at hand for fifteen minutes. Three calls, each at once after the
# one before:
#
#     tests/gpu/first_light.sh 1       # 300 s: the machine, unit tests, golden data, gpt_bytes: the same bits, graphs, 1.70 nats
#     tests/gpu/first_light.sh 2       # 380 s: tokens a second and memory of GPT-2, beside PyTorch; the time of each task; kernels
#     tests/gpu/first_light.sh 3       # 280 s: two ranks over NCCL, memcheck and racecheck, counters of kernels
#
# Each row has a limit of its own and none stops the others; a part ends within its seconds, and what it had no time for is left out.
# OUT gets the results (default: first_light in TMPDIR or /tmp): partN.txt, a line for each row, partN.log, the output of all rows,
# part2.jsonl, the figures of benches, profiles and ncu.csv. BUNDLE, PYTHON and the libraries of CUDA are as for run.sh; where PYTHON has the `nvidia` packages, those are
# taken before the system's, which may be older. TESTS, a regular expression, chooses unit tests. Exit code 0: all passed; 1: some
# did not, or were left out. QUICK=1 is for trying this script over the stand-in driver.
set -uo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.." || exit 2
root=$PWD
part=${1:-}
case $part in
1) limit=300 ;;
2) limit=380 ;;
3) limit=280 ;;
*) echo "usage: first_light.sh 1|2|3: see its first lines" >&2; exit 2 ;;
esac
# What is under way at the end needs some seconds to be killed.
deadline=$((EPOCHSECONDS + limit - 10))
out=${OUT:-${TMPDIR:-/tmp}/first_light}
bundle=${BUNDLE:-build/gpu/bundle}
python=${PYTHON:-python3}
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
mkdir -p "$out"
out=$(cd "$out" && pwd)
export kept=$out/part2.jsonl   # by `figures`
log=$out/part$part.log table=$out/part$part.txt
: >"$log"
: >"$table"
[ "$part" != 2 ] || { rm -f "$out"/profile_*.txt; : >"$kept"; }
# shellcheck source=tests/gpu/common.sh
. "$root/tests/gpu/common.sh"
unpack
compare_commits
[ ${#warnings[@]} = 0 ] || printf '%s\n' "${warnings[@]}" >>"$table"
export out log table deadline
export TORCHINDUCTOR_CACHE_DIR=$here/inductor
# Of several versions of a library the engine takes the first that it finds.
if [ -z "${MOONSHARD_CUDA_LIBS:-}" ]; then
    MOONSHARD_CUDA_LIBS=$("$python" -c 'import glob, sysconfig
print(":".join(sorted(glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib"))))' 2>/dev/null)
    export MOONSHARD_CUDA_LIBS
fi
show_one_gpu

# ---- rows

# row SECONDS NAME COMMAND...: passed if the command's exit code is 0, left out if it is 77. Of what passed the row shows the last
# line, of what failed the first error. Rows may run at the same time.
row() {
    local limit=$1 name=$2 began=$EPOCHREALTIME code left file outcome=passed told
    shift 2
    file=$(mktemp -p "$here")
    left=$((deadline - EPOCHSECONDS))
    [ "$left" -ge "$limit" ] || limit=$left
    if [ "$limit" -lt 3 ]; then
        echo "the part's time is over" >"$file"
        code=77
    else
        # shellcheck disable=SC2016
        timeout --kill-after=5 "$limit" bash -c '"$@"' row "$@" >"$file" 2>&1 </dev/null
        code=$?
    fi
    told=$(tail -1 "$file")
    case $code in
    0) if skips_all "$file"; then outcome="left out" told="each of its cases was skipped"; fi ;;
    77) outcome="left out" ;;
    124 | 137) outcome="cut off" ;;
    *)
        left=$(grep -aE 'ERROR|FAILED|[Ee]rror|moonshard:' "$file" | head -1)
        outcome=failed told="code $code: ${left:-$told}"
        ;;
    esac
    {
        flock 9
        printf '%-40s %-8s %6.1f s  %s\n' "$name" "$outcome" \
            "$(awk "BEGIN { print $EPOCHREALTIME - $began }")" "$(tr -d '\000-\010\016-\037' <<<"$told" | cut -c1-200)" | tee -a "$table"
        { echo "==== $name: $outcome, code $code"; tail -c 60000 "$file"; } >>"$log"
    } 9>"$here/lock"
    rm -f "$file"
    [ "$outcome" = passed ]
}
leave_out() { echo "$*"; exit 77; }
export -f row leave_out
# What a row starts; each in a shell of its own.
gpu_line() {
    command -v nvidia-smi >/dev/null || leave_out "there is no nvidia-smi"
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free,clocks.max.sm --format=csv,noheader
}
machine() {
    uname -r
    nproc
    ldd --version | head -1
    PATH=$PATH:/sbin ldconfig -p | grep -E 'libcudnn\.so|libnccl\.so|libcublasLt\.so|libnvrtc\.so'
    echo "MOONSHARD_CUDA_LIBS: ${MOONSHARD_CUDA_LIBS:-}"
    "$moonshard" info
}
unit_test() { MOONSHARD_TEST_DEVICE=cuda "$own" env -u MOONSHARD_STAND_IN "$here/tests/$1"; }
recipe() { "$moonshard" run "$root/recipes/gpt_bytes.lua" --device cuda "$@"; }
# learns MOST OPTION...: trains, and passes if the loss on the validation bytes is at most this.
learns() {
    local most=$1 loss
    shift
    recipe "$@" >"$here/learns" 2>&1 || { cat "$here/learns"; return 1; }
    cat "$here/learns"
    loss=$(sed -n 's/^validation loss \([0-9.]*\) .*/\1/p' "$here/learns" | tail -1)
    echo "validation loss ${loss:-none}, at most $most is expected"
    awk "BEGIN { exit !(\"$loss\" != \"\" && ${loss:-0} <= $most) }" || { echo "error: validation loss ${loss:-none}"; return 1; }
}
# launches COMMAND...: passes if the command does, and has launched graphs.
launches() {
    "$@" >"$here/launches" 2>&1 || { cat "$here/launches"; return 1; }
    cat "$here/launches"
    grep -a 'graph: of .* are launched as' "$here/launches" || { echo "error: no graph was launched"; return 1; }
}
# same RUN RUN: whether the models of both have the same bits.
same() {
    [ "$(cat_model "$here/$1" | wc -c)" -gt 0 ] || { echo "error: $1 has saved no model"; return 1; }
    [ "$(cat_model "$here/$1" | sha256sum)" = "$(cat_model "$here/$2" | sha256sum)" ] || { echo "error: the models differ"; return 1; }
    echo "the same bits"
}
kernels() {
    figures "$moonshard" bench kernels --device cuda --json "$@" || return
    echo "$(tail -1 "$kept" | grep -o '"kernel":' | wc -l) kernels, in part2.jsonl"
}
bench() {
    local lack
    lack=$(lack_of_memory "$@")
    [ -z "$lack" ] || leave_out "$lack"
    figures "$moonshard" bench step --device cuda --graph --json "$@"
}
peer() {
    has_torch || leave_out "no PyTorch that sees the GPU: set PYTHON"
    figures "$python" "$root/tests/gpu/torch_gpt2.py" "$@"
}
# profile FILE SWITCHES OPTION...: the time of each task of a step. SWITCHES: how `bench step` names the same.
profile() {
    local file=$1 lack
    # shellcheck disable=SC2086
    lack=$(lack_of_memory $2)
    [ -z "$lack" ] || leave_out "$lack"
    shift 2
    "$moonshard" run "$root/tests/gpu/profile.lua" --device cuda "$@" >"$file" 2>&1 || { cat "$file"; return 1; }
    cat "$file"
    grep -a 'tokens/s' "$file" | tail -1
}
# The tools start `own`, a script, which becomes our program.
sanitize() {
    local program
    program=$(tool compute-sanitizer) || leave_out "there is no compute-sanitizer"
    MOONSHARD_TEST_DEVICE=cuda env -u MOONSHARD_STAND_IN "$program" --target-processes all --tool "$1" --error-exitcode 9 \
        "$own" "$here/tests/$2"
}
# counters FILE: of each kernel of the third step of a GPT-2 124M with two layers. Its launches are few enough for all to be counted.
counters() {
    local file=$1 program metrics kernels
    program=$(tool ncu) || leave_out "there is no ncu"
    metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_write.sum
    metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active,smsp__issue_active.avg.pct_of_peak_sustained_active
    kernels='regex:norm|cross_entropy|linear_gradient|activation|attention_heads|optimizer|embedding|reduce|cast'
    "$program" --target-processes all --clock-control none --csv --log-file "$file" --metrics "$metrics" -k "$kernels" \
        --launch-skip 100 --launch-count 80 \
        "$own" "$here/bin/moonshard" run "$root/tests/gpu/profile.lua" --device cuda "${@:2}"
    local code=$?
    grep -a '==ERROR==' "$file" && return 1
    [ $code = 0 ] || return $code
    echo "$(grep -ac '^"' "$file") lines in ${file##*/}"
}
export -f gpu_line machine unit_test recipe learns launches same kernels bench peer profile sanitize counters

# ---- the three parts

# gpt_bytes on the engine's source. Defaults of recipes may change: what is measured is named.
bytes="data=$root/engine dtype=bf16"
long="$bytes model.width=256 lr=2e-3 steps=1500 every.sample=1500"
short="$bytes steps=40 every.save=20 every.eval=1000 every.sample=1000"
small="data=$root/README.md dtype=bf16 length=32 batch=4 model.layers=1 model.width=64 model.heads=2 steps=20 every.sample=0 every.eval=0"
most=1.70 tests=${TESTS:-.} big=124m
c124=gpt2-124m c350=gpt2-350m c1558=gpt2-1558m b124=64 b350=32 b1558=32 b4=4 length=1024 steps=10
if [ -n "${QUICK:-}" ]; then
    long=${small/every.eval=0/every.eval=20} short="$small every.save=10" most=9 tests=${TESTS:-'^(cast|norm|softmax|embedding)$'} big=micro
    c124=micro c350=micro c1558=micro b124=2 b350=2 b1558=2 b4=2 length=16 steps=2
fi
size() { echo "--config $1 --batch $2 --length $length --steps $3"; }

# shellcheck disable=SC2046,SC2086
case $part in
1)
    row 20 "nvidia-smi" gpu_line
    row 30 "this machine" machine
    grep -aE '^(gpu|nccl|matrix)' "$log"
    # If nothing works, the first error says why.
    row 60 "device" unit_test device || CUDA_LAUNCH_BLOCKING=1 row 60 "device, blocking" unit_test device
    # shellcheck disable=SC2010,SC2016
    ls "$here/tests" | grep -vx device | grep -E "$tests" | xargs -P 5 -I{} bash -c 'row 150 "$1" unit_test "$1"' row {}
    for folder in data planes; do
        row 100 "golden/$folder" "$moonshard" test --golden "$root/tests/golden/$folder" --device cuda
    done
    for run in 1 2; do row 60 "gpt_bytes, run $run" recipe $short run="$here/run$run"; done
    row 60 "gpt_bytes, graph=true" launches recipe $short graph=true run="$here/graph"
    row 5 "the same bits" same run1 run2
    row 5 "graphs: the same bits" same run1 graph
    row 90 "gpt_bytes, long" learns $most $long run="$here/long"
    ;;
2)
    row 60 "124m, bf16 parameters" bench $(size $c124 $b124 $steps) --parameters bf16
    row 60 "124m, autocast" bench $(size $c124 $b124 $steps) --dtype bf16
    row 60 "124m, bf16 parameters, fast attention" bench $(size $c124 $b124 $steps) --parameters bf16 --attention fast
    row 60 "profile of 124m, bf16 parameters" profile "$out/profile_124m_bf16.txt" \
        "$(size $c124 $b124 $steps) --parameters bf16" config=$big mode=bf16
    head -15 "$out/profile_124m_bf16.txt" 2>/dev/null
    row 150 "124m, PyTorch compiled" peer $c124 compiled $b124 $length $steps
    row 90 "1558m, bf16 parameters" bench $(size $c1558 $b1558 4) --parameters bf16
    row 60 "350m, bf16 parameters" bench $(size $c350 $b350 6) --parameters bf16
    row 60 "124m, batch 4, bf16 parameters" bench $(size $c124 $b4 30) --parameters bf16
    row 60 "profile of 124m, autocast, batch 32" profile "$out/profile_124m_autocast.txt" \
        "$(size $c124 $((b124 / 2)) $steps) --dtype bf16" config=$big mode=autocast batch=$((b124 / 2))
    row 60 "enqueue" figures "$moonshard" bench enqueue --device cuda --json
    row 90 "kernels" kernels ${QUICK:+--small}
    ;;
3)
    row 90 "nccl: collectives, 2" apart 2 "$root/tests/dist/collectives.lua"
    row 60 "nccl: training, 2" apart 2 "$root/recipes/gpt_bytes.lua" $small run="$here/nccl"
    row 60 "--share-gpu: training, 2" recipe -n 2 --share-gpu $small run="$here/shared"
    row 60 "nccl: graph=true, 2" launches apart 2 "$root/recipes/gpt_bytes.lua" $small graph=true run="$here/ncclgraph"
    row 60 "nccl: shards, graph=true, 2" launches apart 2 "$root/recipes/gpt_bytes.lua" $small shard=full_shard graph=true \
        run="$here/ncclshards"
    row 60 "threads: training, 2" recipe -n 2 --share-gpu --thread-ranks $small run="$here/threads"
    # Two numbers have one sum.
    for run in shared ncclgraph threads; do row 5 "the same bits: nccl, $run" same nccl $run; done
    row 60 "nccl: a rank is killed, graphs" dies apart 2 "$root/tests/gpu/dies.lua" graph
    # shellcheck disable=SC2016
    printf '%s\n' memcheck/softmax memcheck/attention memcheck/embedding racecheck/norm |
        xargs -P 4 -I{} bash -c 'row 75 "$1" sanitize "${1%/*}" "${1#*/}"' row {}
    row 100 "counters by ncu" counters "$out/ncu.csv" config=$big mode=bf16 layers=2 batch=8
    ;;
esac

passed=$(grep -cE '^.{40} passed ' "$table") all=$(grep -cE '^.{40} (passed|left out|cut off|failed) ' "$table")
echo
echo "part $part: $passed of $all rows passed, in $((EPOCHSECONDS - deadline + limit - 10)) s; results are in $out"
grep -E '^.{40} (left out|cut off|failed) ' "$table"
[ "$passed" = "$all" ]
