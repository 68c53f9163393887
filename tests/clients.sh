#!/bin/sh
# Puts the libraries of examples/clients, which only their tests need, into the folder $1: put $1/bin on PATH. 500 MB.
#
# Some want another version of openai than the others, so there are two environments.
set -eu
mkdir -p "$1/bin"
folder=$(cd "$1" && pwd)
install() { # NAME REQUIREMENTS...
    name=$1
    shift
    python3 -m venv "$folder/$name"
    "$folder/$name/bin/pip" install -q --disable-pip-version-check "$@"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$folder/$name/bin/python" >"$folder/bin/python-of-$name"
    chmod +x "$folder/bin/python-of-$name"
}
install clients langchain-core==1.8.3 langchain-openai==1.7.4 litellm==1.110.2 openai-agents==0.24.0 \
    "pydantic-ai-slim[openai]==2.68.0" "smolagents[openai]==1.26.0"
install older-clients instructor==1.17.0 llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1
