# What a target has for an environment, one fact a line: its name, a blank, its value. POSIX sh.
#
#     sh -s -- ROOT FOLDER < target_fit.sh
#
# ROOT is made, since nothing else shows that it can be; of FOLDER counts what an earlier try has left.

say() { printf '%s\n' "$*"; }

libc() {
    found=$(getconf GNU_LIBC_VERSION 2>/dev/null) || found=$(ldd --version 2>/dev/null | head -n 1)
    say "$found" | sed -n 's/^.*[^0-9.]\([0-9][0-9]*\.[0-9][0-9]*\)[0-9.]*$/\1/p'
}

driver() { # of NVIDIA; the kernel knows it at once, unless the driver is yet to be loaded
    version=$(awk '/^NVRM/ { for (i = 1; i <= NF; i++) if ($i ~ /^[0-9]+\.[0-9.]+$/) { print $i; exit } }' \
        /proc/driver/nvidia/version 2>/dev/null)
    if [ -z "$version" ] && command -v nvidia-smi >/dev/null; then
        version=$(timeout 60 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    fi
    case $version in [0-9]*) say "$version" ;; esac
}

say "platform $(uname -s -m)"
say "glibc $(libc)"
say "driver $(driver)"
if ! refused=$({ mkdir -p -- "$1" && : >"$1/.writable.$$" && rm -- "$1/.writable.$$"; } 2>&1); then
    say "refused $(say "$refused" | head -n 1)"
    exit
fi
say "room $(stat -f -c '%a %S %d %c' -- "$1")"
say "left $(du -sck -- "$2.wheels" "$2.partial" 2>/dev/null | tail -n 1 | cut -f 1)"
