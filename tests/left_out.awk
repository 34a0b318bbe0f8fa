#!/usr/bin/awk -f
# What ctest has not tested, each with its reason, a line each: tests that ended with the code for "skipped", whose last line says
# why, busted's pending ones, and tests of cmocka that have skipped each of their cases, whose exit code is 0.
#
#     tests/left_out.awk OUTPUT LOG      of ctest: what it has printed (-O), and Testing/Temporary/LastTest.log
FNR == NR { if (/\*\*\*Skipped/) skipped[$4]; next }
/^[0-9]+\/[0-9]+ Testing: / { test = $3; last = ""; pending = 0; ran = 0; skipped_cases = 0; next }
/^<end of output>/ {
    if (test in skipped) print test ": " last
    else if (skipped_cases && !ran) print test ": each of its cases was skipped"
    pending = 0
    next
}
/^\[ +SKIPPED +\]/ { skipped_cases++; next }
/^\[ +(OK|FAILED) +\]/ { ran++ }
/^Pending (->|→) / { pending = 1; next }
pending == 1 { name = $0; pending = 2; next }
pending == 2 {
    reason = $0
    sub(/^[^ ]*:[0-9]+: /, "", reason)
    print test ": " name (reason != "" ? ": " reason : "")
    pending = 0
    next
}
NF > 0 && !/^-+$/ { last = $0 }
