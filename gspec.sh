#!/bin/bash
suite=$1 name=$2; shift 2
cd /tmp/w
eval "$(grep -F 'set_tests_properties([=[spec.config]=]' build/release/tests/CTestTestfile.cmake | sed 's/.*ENVIRONMENT "//; s/" LABELS.*//; s/\\\\;/\x01/g; s/;/\n/g; s/\x01/;/g' | sed -n "s/^\([A-Z_]*\)=\(.*\)$/export \1=\"\2\"/p")"
exec tests/spec/run.sh /usr/bin/lua5.4 /usr/bin/busted --output=gtest tests/$suite/${name}_spec.lua "$@"
