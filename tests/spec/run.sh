#!/bin/bash
# Runs a spec: run.sh INTERPRETER BUSTED... A process that ends before busted has counted its tests
# fails, whatever its exit code: what is tested can end the process.
set -o pipefail
"$@" | awk '
    { print; fflush() }
    / success(es)? \/ [0-9]+ failures? \/ / { counted = 1 }
    END { if (!counted) { print "the process has ended before its last test"; exit 1 } }'
