#!/bin/bash
# Slurm among the hosts of hosts.sh, for tests: its controller on login, hosta and hostb as nodes with
# four cores each as far as Slurm knows. Nothing of it outlives the hosts.
#
#     slurm.sh possible         what is missing of Slurm's programs, on a line; nothing if all are here
#     slurm.sh start FOLDER     starts it, with all its files in the folder; prints the path for SLURM_CONF
set -euo pipefail
case :$PATH: in *:/usr/sbin:*) ;; *) PATH=$PATH:/usr/sbin:/sbin ;; esac
tests=$(dirname "$(readlink -f "$0")")

possible() {
    local program missing=""
    for program in munged slurmctld slurmd srun sbatch scontrol scancel; do
        command -v "$program" >/dev/null || missing+=" $program"
    done
    [ -z "$missing" ] || echo "there is no$missing (Debian: slurm-wlm, munge)"
}

# A daemon keeps nothing of this script's open, or who reads its output would wait for ever.
quietly() { "$@" </dev/null >>"$folder/starting" 2>&1; }

configure() {
    cat >"$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=login
AuthType=auth/munge
AuthInfo=socket=$folder/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
KillWait=600
SlurmdParameters=config_overrides
NodeName=hosta NodeAddr=10.77.0.1 CPUs=4
NodeName=hostb NodeAddr=10.77.0.2 CPUs=4
PartitionName=test Nodes=hosta,hostb Default=YES State=UP
END
    # The hosts share /tmp, where two nodes would make the same folder.
    echo "PMIxCliTmpDirBase=/dev/shm" >"$folder/mpi.conf"
}

start() {
    folder=$1
    mkdir -p "$folder/state"
    configure
    export SLURM_CONF=$folder/slurm.conf
    (umask 077 && head -c 1024 /dev/urandom >"$folder/key")
    quietly munged --force --key-file "$folder/key" --socket "$folder/munge" --pid-file "$folder/munge.pid" \
        --log-file "$folder/munge.log" --seed-file "$folder/munge.seed"
    quietly slurmctld -c -f "$SLURM_CONF"
    for host in hosta hostb; do
        quietly "$tests/hosts.sh" on "$host" "slurmd -f '$SLURM_CONF'"
    done
    echo "$SLURM_CONF"
}

case ${1:-} in
possible | start) "$@" ;;
*)
    echo "slurm.sh: no verb \"${1:-}\": the top of the script says what there is" >&2
    exit 2
    ;;
esac
