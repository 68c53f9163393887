#!/bin/sh
# Codex against a gateway: npm install -g @openai/codex; sh examples/clients/codex.sh "Say hello."
#
# Its prompt is some 20,000 tokens of a small vocabulary: serve a model with room for that, and with tools; or try it
# on the stand-in: python examples/clients/standin.py --call exec_command '{"cmd": "echo hello"}'
export PDMESH_API_KEY="${PDMESH_API_KEY:-none}"
exec codex exec --skip-git-repo-check \
    -c model_provider=pdmesh \
    -c model_providers.pdmesh.name=pdmesh \
    -c model_providers.pdmesh.base_url="\"${PDMESH_URL:-http://127.0.0.1:8000}/v1\"" \
    -c model_providers.pdmesh.env_key=PDMESH_API_KEY \
    -c model_providers.pdmesh.wire_api=responses \
    -m "${PDMESH_MODEL:-pdmesh-demo}" \
    "${1:-Say hello with the tool.}"
