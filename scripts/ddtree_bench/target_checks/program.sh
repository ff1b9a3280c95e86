# What a target has for a run, one fact a line: its name, a blank, its value. POSIX sh; it changes nothing.
#
#     sh -s -- PORT ADDRESS LEASE PATH... < program.sh
#
# ADDRESS is the one that servers listen on, as /proc/net/tcp writes it (0100007F); PORT 0 is none in particular.

say() { printf '%s\n' "$*"; }

one_line() { tr '\0\n' '  '; }

ask_driver() { # FACT QUERY
    if listed=$(timeout 9 nvidia-smi "$2" --format=csv,noheader,nounits 2>&1); then
        [ -z "$listed" ] || say "$listed" | sed "s/^/$1 /"
    else
        say "gpu_error status $?: $(say "$listed" | head -n 1)"
    fi
}

gpu_facts() {
    command -v nvidia-smi >/dev/null || return 0
    fields=index,uuid,name,driver_version,memory.total,memory.used,persistence_mode,power.limit,power.default_limit
    # At once: each may take seconds where the driver has to be loaded first.
    ask_driver gpu --query-gpu=$fields &
    ask_driver gpu_process --query-compute-apps=gpu_uuid,pid,process_name &
    wait
}

listeners() { # PORT ADDRESS: inodes of the sockets that keep a server from listening there
    cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk -v port="$(printf '%04X' "$1")" -v address="$2" '
        { split($2, local, ":") }
        $4 == "0A" && local[2] == port && (local[1] == address || local[1] ~ /^0+$/) { print $10 }'
}

port_facts() { # PORT ADDRESS
    for inode in $(listeners "$1" "$2"); do
        descriptor=$(find /proc/[0-9]*/fd -lname "socket:\[$inode\]" 2>/dev/null | head -n 1)
        process=${descriptor#/proc/}
        process=${process%%/*}
        if [ -n "$process" ]; then
            say "port_holder process $process ($(one_line <"/proc/$process/cmdline" | cut -c 1-120))"
        else
            say "port_holder a process that this user cannot see"
        fi
    done
}

lease_facts() { # LEASE
    [ -r "$1" ] || return 0
    # Opened by the shell: flock(1) would create the file, which the kernel refuses for another user's in a sticky folder.
    flock -s -n 9 9<"$1"
    if [ $? -eq 1 ]; then say "lease_holder $(head -c 8192 -- "$1" | one_line)"; fi
}

path_facts() { # PATH
    if [ ! -e "$1" ]; then
        say "path missing"
    elif [ ! -r "$1" ] || { [ -d "$1" ] && [ ! -x "$1" ]; }; then
        say "path unreadable"
    elif [ -d "$1" ] && [ ! -r "$1/config.json" ]; then
        say "path unconfigured"
    else
        say "path there"
    fi
}

say "time $(date +%s)"
say "platform $(uname -s -m)"
for tool in awk env find flock sha256sum stat tail timeout; do
    command -v $tool >/dev/null || say "tool_missing $tool"
done
port_facts "$1" "$2"
lease_facts "$3"
shift 3
for path in "$@"; do path_facts "$path"; done
gpu_facts
say "end"
