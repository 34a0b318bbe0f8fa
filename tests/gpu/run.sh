#!/bin/bash
# What only a machine with a GPU can show. One command there:
#
#     tests/gpu/run.sh [PART|PART/ROW ...]      # operators, groups, train, bench, programs; all of them unless named
#     tests/gpu/run.sh --list                   # every PART/ROW
#
# A row is one thing of a part that can be run alone, such as train/peak or values/softmax, with what it needs before it. * and ?
# stand for any text: 'values/attention*'.
# BUNDLE is the folder that `cmake --preset gpu && cmake --build --preset gpu` made (default: build/gpu/bundle); OUT gets the
# results, DATE.json and the logs (default: tests/bench/results). CUDA's libraries are sought as the engine seeks them:
# MOONSHARD_CUDA_LIBS, the loader's path, CUDA_HOME, Python's packages. Each part ends within 8 minutes. Last comes a table: a line
# for each part, what did not pass, and the figures; all rows are in DATE.json.
# Parts of parts can be named alone: values, memcheck, racecheck, of operators; curves, of train; bench-kernels, bench-124m,
# bench-350m, bench-1558m, bench-b4. Without names memcheck and racecheck, which take longest, come last.
# PYTHON is the interpreter that has PyTorch (default: python3); without PyTorch only ours is measured. Before a model is measured,
# `bench step --check` tells its peak of memory, and what cannot fit is left out. Exit code 0: all has run, and passed.
# QUICK=1 takes small models and few steps: for trying this script over the stand-in driver.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
root=$PWD
out=${OUT:-tests/bench/results}
bundle=${BUNDLE:-build/gpu/bundle}
limit=480

here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
mkdir -p "$out"
out=$(cd "$out" && pwd)
logs=$here/logs
mkdir -p "$logs"
python=${PYTHON:-python3}
# shellcheck source=tests/gpu/common.sh
. "$root/tests/gpu/common.sh"
unpack
rows=()   # part|what|outcome|seconds|detail
failed=0

# ---- rows by name

all_parts="values memcheck racecheck train curves groups programs bench-kernels bench-124m bench-350m bench-1558m bench-b4"
programs_quick="fsdp_overlap fsdp_prefetch fsdp_layout overlap ddp_graph"
programs_all="fsdp_overlap fsdp_prefetch hooks overlap ddp ddp_graph ddp_precision fsdp_precision fsdp_optimizer_state fsdp_layout
    fsdp_memory fsdp_state fsdp_uneven fsdp_residuals fsdp_experts fsdp_reads fsdp_summon fsdp_checkpoint loops lora packed optim
    conformance_ddp conformance_hooks conformance_fsdp error_feedback fsdp fsdp_precision_pairs fsdp_offload"
# The rows of a part.
rows_of() {
    case $1 in
    values) ls "$here/tests"; echo golden/data golden/planes ;;
    memcheck | racecheck) ls "$here/tests" ;;
    train) echo gpt_bytes bits resume graph peak curves ;;
    groups) echo collectives tests training shards graphs peak dies ;;
    programs) echo "$programs_all" ;;
    bench-kernels) echo enqueue kernels ;;
    bench-124m | bench-350m | bench-1558m) echo autocast torch tune fast bf16 bf16-tune bf16-fast ;;
    bench-b4) echo autocast torch tune fast bf16 bf16-tune bf16-fast hook ;;
    esac
}
# matches NAME PATTERN...: whether the name is one of these.
matches() {
    local name=$1 pattern
    shift
    # shellcheck disable=SC2053
    for pattern in "$@"; do [[ $name != $pattern ]] || return 0; done
    return 1
}
# chosen ROW: whether this row of $part is to be run.
chosen() {
    local patterns
    read -ra patterns <<<"${wanted[$part]:-*}"
    matches "$1" "${patterns[@]}"
}
# The rows of $part that are to be run, of those given.
chosen_of() { local row; for row in "$@"; do ! chosen "$row" || echo "$row"; done; }

declare -A wanted=()   # of a part: the patterns of its rows
parts=()
for word in "$@"; do
    if [ "$word" = --list ]; then
        for part in $all_parts; do
            echo "$part"
            # shellcheck disable=SC2046
            for row in $(rows_of "$part"); do echo "$part/$row"; done
        done
        exit
    fi
    part=${word%%/*}
    case " operators bench $all_parts " in
    *" $part "*) ;;
    *) echo "run.sh: no part \"$part\": operators (values, memcheck, racecheck), bench (its parts), ${all_parts// /, }" >&2; exit 2 ;;
    esac
    if [ "$part" != "$word" ]; then
        found=
        for row in $(rows_of "$part"); do ! matches "$row" "${word#*/}" || found=yes; done
        if [ -z "$found" ]; then
            rows_there=$(rows_of "$part" | xargs | sed 's/ /, /g')
            echo "run.sh: $part has no row \"${word#*/}\": ${rows_there:-name a part of it alone (run.sh --list)}" >&2
            exit 2
        fi
        wanted[$part]+=" ${word#*/}"
    fi
    # Rows of one part are run together; what is named whole is run whole.
    matches "$part" "${parts[@]}" || parts+=("$part")
    [ "$part" != "$word" ] || wanted[$part]='*'
done
[ ${#parts[@]} -gt 0 ] || parts=(values groups train bench programs memcheck racecheck)

compare_commits

# note PART WHAT OUTCOME SECONDS DETAIL
note() {
    rows+=("$1|$2|$3|$4|$5")
    printf '%-12s %-46s %-8s %5s s  %s\n' "$1" "$2" "$3" "$4" "$5"
    [ "$3" = passed ] || failed=1
}

# try PART WHAT COMMAND...: passed if the command's exit code is 0. What is left of the part's time limits it.
try() {
    local part=$1 what=$2 began=$SECONDS left log=$logs/$1.${2//[^a-zA-Z0-9_]/_}.log code outcome=passed detail
    shift 2
    left=$((limit - (SECONDS - part_began)))
    if [ "$left" -lt 10 ]; then
        note "$part" "$what" "left out" 0 "the part's $limit s are over"
        return 1
    fi
    timeout --kill-after=5 "$left" "$@" >"$log" 2>&1 </dev/null
    code=$?
    detail=$(tail -1 "$log" | cut -c1-160)
    if [ $code = 124 ] || [ $code = 137 ]; then outcome="cut off"; elif [ $code != 0 ]; then outcome=failed; fi
    [ "$outcome" = passed ] || detail=$(grep -aE 'ERROR|FAILED|error|moonshard:' "$log" | head -1 | cut -c1-160)
    if [ "$outcome" = passed ] && skips_all "$log"; then outcome="left out" detail="each of its cases was skipped"; fi
    note "$part" "$what" "$outcome" $((SECONDS - began)) "$detail"
    [ "$outcome" = passed ]
}

# The unit tests of kernels, on the GPU.
values() {
    local test
    try "$part" "this machine" "$moonshard" info
    cat "$logs/$part.this_machine.log"
    export MOONSHARD_TEST_DEVICE=cuda
    # shellcheck disable=SC2046
    for test in $(chosen_of $(rows_of values)); do
        case $test in
        golden/*) try "$part" "$test" "$moonshard" test --golden "$root/tests/$test" --device cuda ;;
        *) try "$part" "$test" "$own" env -u MOONSHARD_STAND_IN "$here/tests/$test" ;;
        esac
    done
    unset MOONSHARD_TEST_DEVICE
}
# The same under a tool of compute-sanitizer, where it is; those with the most of barriers and shared memory first.
memcheck() {
    local sanitizer test first="norm softmax attention embedding reduce"
    sanitizer=$(tool compute-sanitizer)
    if [ -z "$sanitizer" ]; then
        note "$part" "compute-sanitizer" "left out" 0 "it is not on this machine"
        return
    fi
    export MOONSHARD_TEST_DEVICE=cuda
    # shellcheck disable=SC2046,SC2086
    for test in $(chosen_of $first $(rows_of "$part" | grep -vxF "${first// /$'\n'}")); do
        # The tool starts `own`, a script, which becomes the test.
        try "$part" "$test" env -u MOONSHARD_STAND_IN "$sanitizer" --target-processes all --tool "$part" --error-exitcode 9 \
            "$own" "$here/tests/$test"
    done
    unset MOONSHARD_TEST_DEVICE
}
racecheck() { memcheck; }

# gpt_bytes to 1.70 nats a byte; the same bits in every run, with graphs too; a run that is cut in two is the run in one piece; the
# peak is the one predicted; the losses of GPT-2 are PyTorch's.
train() {
    local text=() log=$logs/train.gpt_bytes.log loss most=1.70 runs=10 folder
    local long="data=$root/engine steps=1500 dtype=bf16 model.width=256 lr=2e-3 every.sample=1500" short="data=$root/engine dtype=bf16"
    if [ -n "${QUICK:-}" ]; then
        short="data=$root/README.md dtype=bf16 length=32 batch=4 model.layers=1 model.width=64 model.heads=2"
        long="$short steps=30 every.sample=1000 every.eval=1000" most=5.0 runs=2
    fi
    recipe() { "$moonshard" run "$root/recipes/gpt_bytes.lua" --device cuda "$@"; }
    export -f recipe
    if chosen gpt_bytes && try train gpt_bytes bash -c "recipe run=$here/long $long"; then
        loss=$(sed -n 's/^validation loss \([0-9.]*\) .*/\1/p' "$log")
        if awk "BEGIN { exit !(\"$loss\" != \"\" && $loss <= $most) }"; then note train "validation loss" passed 0 "$loss"
        else note train "validation loss" failed 0 "'$loss', at most $most is expected"; fi
    fi
    # shellcheck disable=SC2206
    text=(steps=20 every.save=10 every.eval=1000 every.sample=1000 $short)
    # Others are compared with the first of these runs.
    if [ -n "$(chosen_of bits resume graph)" ]; then
        chosen bits || runs=1
        for i in $(seq $runs); do
            try train "20 steps, run $i" bash -c "recipe run=$here/same$i ${text[*]}" || return
        done
    fi
    if chosen bits; then
        if [ "$(for i in $(seq $runs); do cat_model "$here/same$i" | sha256sum; done | sort -u | wc -l)" = 1 ]; then
            note train "the same bits in $runs runs" passed 0 ""
        else note train "the same bits in $runs runs" failed 0 "the models differ"; fi
    fi
    if chosen resume; then
        folder=$(ls -d "$here"/same1/step-*10 | head -1)
        try train "steps 11 to 20 again" bash -c "recipe run=$here/part ${text[*]} resume=$folder" || return
        same train "resumed bit for bit" same1 part
    fi
    ! chosen graph ||
        graphs train "20 steps, graph=true" same1 graph "$moonshard" run "$root/recipes/gpt_bytes.lua" --device cuda "${text[@]}"
    ! chosen peak || peak train "peak as predicted" 1 run="$here/peak" "${text[@]}"
    ! chosen curves || curves
}
# graphs PART WHAT RUN NEW COMMAND...: the command with graph=true, in the run NEW, must launch graphs, and give the bits of RUN.
graphs() {
    local part=$1 what=$2 run=$3 new=$4 log=$logs/$1.${2//[^a-zA-Z0-9_]/_}.log
    shift 4
    try "$part" "$what" "$@" graph=true run="$here/$new" || return
    if grep -qa 'graph: of .* are launched as' "$log"; then
        note "$part" "$what: launched" passed 0 "$(grep -a 'graph: of ' "$log" | head -1 | sed 's/.*graph: //')"
    else note "$part" "$what: launched" failed 0 "$(grep -a 'graph: ' "$log" | head -1 | sed 's/.*graph: //')"; fi
    same "$part" "$what: the same bits" "$run" "$new"
}
# peak PART WHAT RANKS OPTION...: `moonshard check` of gpt_bytes, and what its ranks tell at their end; both to the byte.
peak() {
    local part=$1 what=$2 ranks=$3 share=() run=$logs/$1.${2//[^a-zA-Z0-9_]/_}__run.log predicted told
    shift 3
    [ "$ranks" = 1 ] || share=(--share-gpu)
    predicted=$(timeout 60 "$moonshard" check "$root/recipes/gpt_bytes.lua" -n "$ranks" --device cuda --json "$@" 2>"$logs/$part.check.log" |
        sed -n 's/.*"peak_bytes":\[\([0-9,]*\)\].*/\1/p')
    try "$part" "$what, run" env RECIPE="$root/recipes/gpt_bytes.lua" "$moonshard" run "$root/tests/gpu/peak.lua" -n "$ranks" \
        --device cuda "${share[@]}" "$@" || return
    told=$(sed -n 's/.*peak of rank \([0-9]*\): \([0-9]*\) bytes.*/\1 \2/p' "$run" | sort -n | cut -d' ' -f2 | paste -sd,)
    if [ -n "$predicted" ] && [ "$predicted" = "$told" ]; then note "$part" "$what" passed 0 "$told bytes"
    else note "$part" "$what" failed 0 "predicted: ${predicted:-nothing, see $part.check.log} bytes; the run's: ${told:-none}"; fi
}
# 50 steps of a small GPT-2: the loss of each step within 2% of PyTorch's, from the same weights and on the same bytes.
curves() {
    local small="" files="$here/curves $root/engine/README.md $here/curves.json"
    [ -z "${QUICK:-}" ] || small="layers=1 width=64 heads=2 length=32 batch=4"
    if ! has_torch; then
        note "$part" "losses beside PyTorch's" "left out" 0 "no PyTorch that sees the GPU: set PYTHON"
        return
    fi
    # shellcheck disable=SC2086
    try "$part" "GPT-2, 50 steps" "$moonshard" run "$root/tests/gpu/curves.lua" --device cuda text="$root/engine/README.md" \
        weights="$here/curves" out="$here/curves.json" $small || return
    # shellcheck disable=SC2086
    try "$part" "losses beside PyTorch's" "$python" "$root/tests/gpu/torch_curves.py" $files 0.02
}
# Several ranks on one GPU, the first that is shown: over NCCL, where each process says that it is a host of its own, and with
# --share-gpu. Tests of ranks as threads and processes compare with sums in the CPU's order.
groups() {
    local n test small
    show_one_gpu
    if chosen collectives; then
        for n in 1 2 4; do try groups "nccl: collectives, $n" bash -c "apart $n '$root/tests/dist/collectives.lua'"; done
        for n in 2 4; do
            try groups "--share-gpu: collectives, $n" "$moonshard" run "$root/tests/dist/collectives.lua" -n $n --device cuda --share-gpu
            try groups "threads: collectives, $n" "$moonshard" run "$root/tests/dist/collectives.lua" -n $n --device cuda --share-gpu --thread-ranks
        done
    fi
    if chosen tests; then
        export MOONSHARD_TEST_DEVICE=cuda
        for test in "$here"/ranks/*; do
            try groups "--share-gpu: $(basename "$test")" "$own" env -u MOONSHARD_STAND_IN MOONSHARD_TRANSPORT=local "$test"
        done
        unset MOONSHARD_TEST_DEVICE
    fi
    small="data=$root/README.md dtype=bf16 length=32 batch=4 model.layers=1 model.width=64 model.heads=2 steps=20 every.sample=0 every.eval=0"
    # Graphs are compared with runs of two ranks without them.
    if [ -n "$(chosen_of training graphs)" ]; then
        for n in 2 4; do
            [ $n = 2 ] || chosen training || continue
            try groups "nccl: training, $n" bash -c "apart $n '$root/recipes/gpt_bytes.lua' $small run='$here/nccl$n'"
            try groups "--share-gpu: training, $n" "$moonshard" run "$root/recipes/gpt_bytes.lua" -n $n --device cuda --share-gpu $small \
                run="$here/shared$n"
        done
    fi
    if chosen training; then
        for n in 2 4; do
            # Threads reach each other's tensors on the GPU.
            try groups "threads: training, $n" "$moonshard" run "$root/recipes/gpt_bytes.lua" -n $n --device cuda --share-gpu --thread-ranks \
                $small run="$here/threads$n"
            same groups "threads: the same bits, $n" shared$n threads$n
        done
        # Two numbers have one sum.
        same groups "the same bits, 2" nccl2 shared2
        try groups "--share-gpu: training again, 4" "$moonshard" run "$root/recipes/gpt_bytes.lua" -n 4 --device cuda --share-gpu $small \
            run="$here/again4"
        same groups "the same bits again, 4" shared4 again4
    fi
    if chosen graphs; then
        # Over NCCL reductions are graphs, too.
        # shellcheck disable=SC2016,SC2086
        graphs groups "nccl: graph=true, 2" nccl2 ncclgraph2 bash -c 'apart 2 "$@"' apart "$root/recipes/gpt_bytes.lua" $small
        # shellcheck disable=SC2086
        graphs groups "--share-gpu: graph=true, 2" shared2 graph2 "$moonshard" run "$root/recipes/gpt_bytes.lua" -n 2 --device cuda \
            --share-gpu $small
    fi
    # shellcheck disable=SC2086
    ! chosen peak || peak groups "--share-gpu: peak as predicted, 2" 2 run="$here/peak2" $small
    if chosen shards; then
        # shellcheck disable=SC2086
        try groups "--share-gpu: shards, 2" "$moonshard" run "$root/recipes/gpt_bytes.lua" -n 2 --device cuda --share-gpu $small \
            shard=full_shard run="$here/shards2"
        try groups "nccl: shards, 2" bash -c "apart 2 '$root/recipes/gpt_bytes.lua' $small shard=full_shard run='$here/ncclshards2'"
        same groups "shards: the same bits, 2" ncclshards2 shards2
        # Gathers and reductions are graphs.
        # shellcheck disable=SC2016,SC2086
        graphs groups "nccl: shards, graph=true, 2" ncclshards2 shardgraph2 bash -c 'apart 2 "$@"' apart "$root/recipes/gpt_bytes.lua" \
            $small shard=full_shard
    fi
    if chosen dies; then
        try groups "nccl: a rank is killed" bash -c "dies apart 2 '$root/tests/gpu/dies.lua'"
        try groups "nccl: a rank is killed, graphs" bash -c "dies apart 2 '$root/tests/gpu/dies.lua' graph"
        try groups "--share-gpu: a rank is killed" bash -c "dies '$moonshard' run '$root/tests/gpu/dies.lua' -n 2 --device cuda --share-gpu"
    fi
}
# The programs of tests/dist, each of which knows what its ranks expect: sharding, prefetch plans, hooks, overlap. Two ranks share
# the GPU.
programs() {
    local program all=$programs_all
    # Without names QUICK takes a few.
    [ -z "${QUICK:-}" ] || [ "${wanted[programs]:-*}" != '*' ] || all=$programs_quick
    # shellcheck disable=SC2086
    for program in $(chosen_of $all); do
        try programs "$program" env MOONSHARD_SOURCE="$root" "$moonshard" run "$root/tests/dist/$program.lua" -n 2 --device cuda --share-gpu
    done
}
# same PART WHAT RUN RUN: passed if the models of both have the same bits.
same() {
    if [ "$(cat_model "$here/$3" | wc -c)" -gt 0 ] && [ "$(cat_model "$here/$3" | sha256sum)" = "$(cat_model "$here/$4" | sha256sum)" ]; then
        note "$1" "$2" passed 0 ""
    else note "$1" "$2" failed 0 "the models differ"; fi
}

# ---- bench: ours beside PyTorch, in turns

turns=3
export TORCHINDUCTOR_CACHE_DIR=$here/inductor TORCHINDUCTOR_FX_GRAPH_CACHE=1

# What `figures` keeps, for the results.
export kept=$here/bench.jsonl
# With graphs: that is what somebody who wants speed takes.
ours() { try "$part" "$1" bash -c "figures \"$moonshard\" bench step --device cuda --graph --json $2"; }
ours_if_it_fits() { ! fits "$1" "$2" || ours "$1" "$2"; }
# fits WHAT SWITCHES: whether the step has its memory here. If not, a row says so.
fits() {
    local lack
    # shellcheck disable=SC2046
    lack=$(lack_of_memory $(sed 's/--hook-pairs//; s/--tune//' <<<"$2"))
    [ -z "$lack" ] || note "$part" "$1" "left out" 0 "$lack"
    [ -z "$lack" ]
}
peer() { try "$part" "$1" bash -c "figures $python \"$root/tests/gpu/torch_gpt2.py\" $2"; }
# The median of what `field` finds in the last lines of these logs.
median_of() {
    local key=$1 log values=()
    shift
    for log in "$@"; do [ ! -f "$log" ] || values+=("$(grep -a '^{' "$log" | tail -1 >"$here/line"; field "$here/line" "$key")"); done
    printf '%s\n' "${values[@]}" | grep . | sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'
}

# beside NAME AIM WAY TIMES LENGTH BATCH STEPS: TURNS of ours and of PyTorch in turns, then the ratio of their medians. Where ours
# cannot be measured so, for its memory, the ratio is that of bf16 parameters.
beside() {
    local name=$1 aim=$2 way=$3 times=$4 length=$5 batch=$6 steps=$7 config=$1 turn with="" own other ratio detail turns_of how="" size whole=""
    # Algorithms of products that rows with --tune choose. Others do not read it.
    local -x MOONSHARD_TUNED=$here/products.json
    ! chosen torch || ! has_torch || with=yes
    if [ -n "${QUICK:-}" ]; then config=micro length=16 batch=2 steps=2; fi
    size="--config $config --batch $batch --length $length --steps $steps"
    ! chosen autocast || ! fits "$name, ours" "$size --dtype bf16" || whole=yes
    for turn in $(seq $turns); do
        [ -z "$whole" ] || ours "$name, ours, turn $turn" "$size --dtype bf16"
        [ -z "$with" ] || peer "$name, PyTorch $way, turn $turn" "$config $way $batch $length $steps"
    done
    # Beside the medians: products by the algorithms that are fastest here.
    ! chosen tune || ours_if_it_fits "$name, ours, tuned" "$size --dtype bf16 --tune"
    # Gradients of attention in no certain order, as PyTorch's.
    ! chosen fast || ours_if_it_fits "$name, ours, fast attention" "$size --dtype bf16 --attention fast"
    # Parameters and all else in bf16, with f32 copies in the optimizer.
    ! chosen bf16 || ours_if_it_fits "$name, ours, bf16 parameters" "$size --parameters bf16"
    ! chosen bf16-tune || ours_if_it_fits "$name, ours, bf16 parameters, tuned" "$size --parameters bf16 --tune"
    ! chosen bf16-fast || ours_if_it_fits "$name, ours, bf16 parameters, fast attention" "$size --parameters bf16 --attention fast"
    turns_of="$logs/$part.${name//-/_}__"
    own=$(median_of tok_s "${turns_of}ours__turn_"*.log)
    other=$(median_of tok_s "${turns_of}PyTorch_${way}__turn_"*.log)
    if [ -z "$own" ] && chosen bf16; then
        own=$(median_of tok_s "${turns_of}ours__bf16_parameters.log")
        how=" with bf16 parameters"
    fi
    if [ -z "$own" ]; then
        if printf '%s\n' "${rows[@]}" | grep -qE "^$part\|$name, ours[^|]*\|(failed|cut off)\|"; then
            note "$part" "$name" failed 0 "ours was not measured"
        elif [ -n "$(chosen_of autocast bf16)" ]; then note "$part" "$name" "left out" 0 "ours was left out"; fi
        return
    fi
    detail=$(printf '%.0f tokens/s%s%s' "$own" "$how" "${aim:+ (aim $aim)}")
    if [ -n "$other" ]; then
        ratio=$(awk "BEGIN { printf \"%.3f\", $own / $other }")
        detail+=$(printf ', PyTorch %.0f: %s times (aim %s)' "$other" "$ratio" "$times")
    elif [ -n "$with" ]; then detail+="; PyTorch failed"
    elif chosen torch; then detail+="; no PyTorch on this machine"; fi
    note "$part" "$name, medians of $turns" passed 0 "$detail"
    [ -n "$with" ] || return
    # The memory of the whole process: parts of it belong to the driver and to libraries.
    own=$(median_of process_mib "${turns_of}ours__turn_"*.log)
    [ -z "$how" ] || own=$(median_of process_mib "${turns_of}ours__bf16_parameters.log")
    other=$(median_of process_mib "${turns_of}PyTorch_${way}__turn_"*.log)
    if [ -n "$own" ] && [ -n "$other" ]; then
        detail=$(awk "BEGIN { printf \"%.0f MiB, PyTorch %.0f: %.3f times (aim: at most 1.0)\", $own, $other, $own / $other }")
        note "$part" "$name, memory beside PyTorch" passed 0 "$detail"
    else note "$part" "$name, memory beside PyTorch" "left out" 0 "nvidia-smi tells no memory of these processes"; fi
}

bench_kernels() {
    local small=${QUICK:+--small}
    # ns_lua_enqueue: what a small task costs the host; 3000 at most is the aim.
    ! chosen enqueue || try "$part" "enqueue" bash -c "figures \"$moonshard\" bench enqueue --device cuda --json"
    chosen kernels || return
    try "$part" "kernels" bash -c "figures \"$moonshard\" bench kernels --device cuda --json $small"
    # The table for people, from the same figures.
    grep -a '^{' "$logs/$part.kernels.log" | tail -1 | tr '{' '\n' | sed -n \
        's/.*"\(bytes\|flops\)":\([0-9.eE+-]*\).*"kernel":"\([^"]*\)".*"share":\([0-9.eE+-]*\).*"us":\([0-9.eE+-]*\).*/\3|\4|\5|\2|\1/p' |
        awk -F'|' '{ printf "%-40s %14.3f %-5s %12.1f us %5.0f%%\n", $1, $4 / 1e6, $5 == "bytes" ? "MB" : "MFLOP", $3, 100 * $2 }'
}
bench_124m() { beside gpt2-124m 560000 compiled 1.10 1024 64 20; }
bench_350m() { beside gpt2-350m 202000 compiled 1.10 1024 32 12; }
bench_1558m() { beside gpt2-1558m 52000 compiled 1.10 1024 32 8; }
# Small batches, where launches count; and what a hook in Lua that does nothing costs at the full batch.
bench_b4() {
    local config=gpt2-124m
    beside gpt2-124m "" eager 2.0 1024 4 40
    [ -z "${QUICK:-}" ] || config=micro
    ! chosen hook || ours_if_it_fits "a hook in Lua" "--config $config --dtype bf16 --hook-pairs"
}

: >"$here/bench.jsonl"
for part in "${parts[@]}"; do
    case $part in
    operators) for part in values memcheck racecheck; do part_began=$SECONDS; $part; done ;;
    values | memcheck | racecheck | train | groups | programs | curves) part_began=$SECONDS; $part ;;
    bench) for part in bench-kernels bench-124m bench-350m bench-1558m bench-b4; do part_began=$SECONDS; "${part/-/_}"; done ;;
    bench-kernels | bench-124m | bench-350m | bench-1558m | bench-b4) part_began=$SECONDS; "${part/-/_}" ;;
    esac
done

# JSON's strings need two characters escaped; logs hold no control characters in their last lines but tabs.
text() { printf '%s' "$1" | tr -d '\000-\037' | sed 's/\\/\\\\/g; s/"/\\"/g'; }
file=$out/$(date -u +%Y-%m-%dT%H%M%SZ).json
{
    printf '{"commit": "%s", "dirty": %s, "checkout": "%s", "gpu": "%s", "rows": [\n' "$commit" "$dirty" "$checkout" \
        "$(text "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -1)")"
    comma=
    for row in "${rows[@]}"; do
        IFS='|' read -r part what outcome seconds detail <<<"$row"
        printf '%s{"part": "%s", "what": "%s", "outcome": "%s", "seconds": %s, "detail": "%s"}' "$comma" \
            "$(text "$part")" "$(text "$what")" "$(text "$outcome")" "$seconds" "$(text "$detail")"
        comma=$',\n'
    done
    printf '\n], "bench": [\n'
    sed '$!s/$/,/' "$here/bench.jsonl"
    printf ']}\n'
} >"$file"
tar -C "$logs" -czf "${file%.json}.logs.tar.gz" .

# A line for each part, then the rows that did not pass and those that give figures.
echo
printf '%-14s %7s %7s %9s %7s\n' part passed failed "left out" s
printf '%s\n' "${rows[@]}" | awk -F'|' '
    !seen[$1]++ { order[++parts] = $1 }
    { if ($3 == "passed") passed[$1]++; else if ($3 == "left out") left[$1]++; else failed[$1]++; seconds[$1] += $4 }
    END { for (i = 1; i <= parts; i++) { p = order[i]; printf "%-14s %7d %7d %9d %7d\n", p, passed[p], failed[p], left[p], seconds[p] } }'
for row in "${rows[@]}"; do
    IFS='|' read -r part what outcome seconds detail <<<"$row"
    case $outcome/$what in
    passed/*medians* | passed/*memory\ beside* | passed/*hook\ in\ Lua* | passed/enqueue | passed/validation\ loss) ;;
    passed/*) continue ;;
    esac
    printf '%-14s %-46s %-8s %s\n' "$part" "$what" "$outcome" "$detail"
done
[ ${#warnings[@]} = 0 ] || printf '%s\n' "${warnings[@]}"
echo "written: $file"
exit $failed
