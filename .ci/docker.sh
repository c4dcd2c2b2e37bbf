#!/bin/bash
# Installs and starts a Docker Engine on a Debian machine without systemd.
#
#   . .ci/docker.sh; engine_install; engine_start; …; engine_stop
#
# An engine that already answers is used and left alone; only the daemon that this
# shell started is stopped again.
: "${ENGINE_SOCKET:=/var/run/docker.sock}"
: "${ENGINE_PID_FILE:=/var/run/docker.pid}"
: "${ENGINE_STATE:=/var/run/docker}"
: "${ENGINE_LOG:=/tmp/dockerd-ci.log}"
ENGINE_STARTED=

engine_install() {
    command -v dockerd >/dev/null && command -v iptables >/dev/null && return 0
    local attempt
    for attempt in 1 2 3; do
        apt-get update -q &&
            DEBIAN_FRONTEND=noninteractive apt-get install -yq \
                --no-install-recommends docker.io iptables && return 0
        echo "engine: install attempt $attempt failed" >&2
        sleep 3
    done
    return 1
}

engine_answers() {
    [ -S "$ENGINE_SOCKET" ] &&
        [ "$(curl -fsS -m 5 --unix-socket "$ENGINE_SOCKET" http://localhost/_ping 2>/dev/null)" = OK ]
}

# Whether a pid file names a live process of that program. A zombie is not alive:
# the first process of a container may reap late.
pid_file_names() {
    local pid state
    pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] || return 1
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] || return 1
    state=$(sed -n 's/^State:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null)
    [ -n "$state" ] && [ "${state:0:1}" != Z ]
}

engine_start() {
    exec 9>"$ENGINE_PID_FILE.lock"
    flock -w 120 9 || return 1
    if engine_answers; then exec 9>&-; return 0; fi
    # dockerd refuses to start while a stale pid file names any live process
    pid_file_names "$ENGINE_PID_FILE" dockerd || rm -f "$ENGINE_PID_FILE" "$ENGINE_SOCKET"
    pid_file_names "$ENGINE_STATE/containerd/containerd.pid" containerd ||
        rm -f "$ENGINE_STATE"/containerd/containerd.pid "$ENGINE_STATE"/containerd/*.sock*
    setsid dockerd --default-address-pool base=10.210.0.0/16,size=28 \
        >>"$ENGINE_LOG" 2>&1 </dev/null 9>&- &
    for _ in $(seq 1 600); do
        if engine_answers; then
            ENGINE_STARTED=$(cat "$ENGINE_PID_FILE")
            exec 9>&-
            return 0
        fi
        sleep 0.1
    done
    echo "engine: no answer; end of $ENGINE_LOG:" >&2
    tail -n 30 "$ENGINE_LOG" >&2
    exec 9>&-
    return 1
}

engine_stop() {
    [ -n "$ENGINE_STARTED" ] || return 0
    pid_file_names "$ENGINE_PID_FILE" dockerd || return 0
    kill -TERM "$ENGINE_STARTED" 2>/dev/null
    for _ in $(seq 1 300); do
        kill -0 "$ENGINE_STARTED" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$ENGINE_STARTED" 2>/dev/null
}
