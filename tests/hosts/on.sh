#!/bin/sh
# Runs a command on a host of hosts.sh, for launchers that want one program in place of ssh.
exec "${0%/*}/hosts.sh" on "$@"
