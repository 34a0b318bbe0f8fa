# shellcheck shell=bash
# What run.sh and first_light.sh share; read by them. $root is the checkout, $bundle the bundle's folder, $here a folder of their
# own, $python the interpreter that may have PyTorch.

# The bundle's libraries are for our programs alone: Python, compilers and NVIDIA's tools need those of this machine, which may be
# newer. `$own COMMAND...` starts one of ours, `$moonshard` the program.
unpack() {
    # shellcheck disable=SC2154
    tar -C "$here" -xf "$bundle/bundle.tar.xz" || { echo "${0##*/}: no bundle in $bundle: see tests/gpu/README.md" >&2; exit 2; }
    own=$here/own moonshard=$here/moonshard
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "$@"\n' "$here" >"$own"
    printf '#!/bin/sh\nexec "%s" "%s/bin/moonshard" "$@"\n' "$own" "$here" >"$moonshard"
    chmod +x "$own" "$moonshard"
    export own moonshard here root python PYTHONDONTWRITEBYTECODE=1
}
# What the bundle was made from, in $commit and $dirty, and in $checkout what is checked out here: the tests of both should be the
# same.
compare_commits() {
    { read -r commit; read -r dirty; } <"$here/commit" || { echo "${0##*/}: $bundle/bundle.tar.xz does not say its commit: make it again" >&2; exit 2; }
    checkout=$(git rev-parse HEAD 2>/dev/null) || checkout=unknown
    warnings=()
    if [ "$checkout" != unknown ] && [ "$checkout" != "$commit" ]; then
        warnings+=("warning: the bundle is of commit $commit, this checkout is at $checkout: make the bundle again, or check that commit out")
    fi
    [ "$dirty" = false ] || warnings+=("warning: when the bundle was made there were changes beside commit $commit")
    [ ${#warnings[@]} = 0 ] || printf '%s\n' "${warnings[@]}" >&2
}
# tool NAME: where a program of the CUDA toolkit is.
tool() { command -v "$1" || ls "${CUDA_HOME:-/usr/local/cuda}/bin/$1" 2>/dev/null; }
has_torch() { "$python" -c 'import torch, sys; sys.exit(not (torch.cuda.is_available() or sys.argv[1]))' "${QUICK:-}" 2>/dev/null; }
# skips_all LOG: whether a test of cmocka has run none of its cases. Its exit code is 0 then, too.
skips_all() { grep -qa '^\[ *SKIPPED *\]' "$1" && ! grep -qa '^\[ *OK *\]' "$1"; }
# field FILE KEY: a number of the JSON in FILE.
field() { sed -n "s/.*\"$2\":\([-0-9.eE+]*\).*/\1/p" "$1" | tail -1; }
# figures_of FILE: the JSON that a bench has written in its last line, in words.
figures_of() {
    local key text="" words
    for key in tok_s:tokens/s ms_step_med:ms peak_mib:"MiB peak" process_mib:"MiB process" ns_lua_enqueue:"ns to enqueue a task" percent_med:"% by a Lua hook"; do
        words=$(field "$1" "${key%%:*}")
        [ -z "$words" ] || text+="$(printf '%.2f %s, ' "$words" "${key#*:}")"
    done
    echo "${text%, }"
}
# figures COMMAND...: its last line is JSON, which is added to the file $kept, and told in words after it.
figures() {
    local file
    file=$(mktemp -p "$here")
    "$@" >"$file" || { cat "$file"; return 1; }
    cat "$file"
    tail -1 "$file" >>"$kept"
    figures_of "$file"
}

# ---- memory, before a model is measured

# Bytes that tensors may have on the GPU: nine tenths of what is free, as the engine takes them. Nothing: not known.
gpu_bytes() {
    local mib first=${CUDA_VISIBLE_DEVICES:-0}
    first=${first%%,*}
    mib=$(nvidia-smi -i "$first" --query-gpu=memory.free --format=csv,noheader,nounits 2>/dev/null | head -1)
    [[ $mib =~ ^[0-9]+$ ]] || mib=$("$moonshard" info 2>/dev/null | sed -n 's/^gpu 0 .* \([0-9.]*\) GiB.*/\1 * 1024/p')
    [ -z "$mib" ] || awk "BEGIN { printf \"%.0f\", $mib * 1048576 * 0.9 }"
}
# lack_of_memory SWITCHES...: prints why `bench step` with these cannot have its memory here; nothing if it can. It is asked of the
# sim device, which makes the same decisions.
lack_of_memory() {
    local log=$here/check.log have need
    have=$(gpu_bytes)
    [ -n "$have" ] || return 0
    timeout 60 "$moonshard" bench step --check --device cuda --memory "$have" --json "$@" >"$log" 2>&1 && return 0
    # Another error is one of the bench, too.
    grep -q 'no memory' "$log" || return 0
    timeout 60 "$moonshard" bench step --check --device cuda --json "$@" >"$log" 2>&1
    need=$(field "$log" peak_mib)
    awk "BEGIN { need = ${need:-0} / 1024; have = $have / 1024 ^ 3
        printf \"needs %.1f GiB, the GPU has %.1f for tensors%s\n\", need, have,
            (need > have ? \"\" : \": no free block of the size would be left\") }"
}

# ---- ranks

# apart N RECIPE ...: so many processes of `moonshard run`, as torchrun starts them, all on the one GPU that is shown, over NCCL: each
# says that it is on a host of its own. The code is that of the first one that failed.
apart() {
    local n=$1 r pids=() code=0
    shift
    export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_MAX_CTAS=4
    export TORCHELASTIC_RUN_ID=$BASHPID WORLD_SIZE=$n LOCAL_WORLD_SIZE=$n MASTER_PORT=0 TMPDIR=$here MOONSHARD_TRANSPORT=nccl
    for ((r = 0; r < n; r++)); do
        RANK=$r LOCAL_RANK=$r NCCL_HOSTID=gpu-$r "$moonshard" run "$@" --device cuda &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || code=${code/#0/$?}; done
    return "$code"
}
# One GPU, the first that is shown. Ranks that share it need as many connections as the launcher sets for its own.
show_one_gpu() {
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*} CUDA_DEVICE_MAX_CONNECTIONS=32
}
# dies COMMAND...: passes if rank 0 ends, with the code for another rank that died.
dies() {
    "$@"
    local code=$?
    echo "ended with $code"
    [ $code = 7 ]
}
# The model that a run has saved in this folder.
cat_model() { find "$1" -path '*model*' -type f | sort | xargs -r cat; }
export -f tool has_torch skips_all field figures_of figures gpu_bytes lack_of_memory apart dies cat_model
