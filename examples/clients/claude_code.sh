#!/bin/sh
# Claude Code against a gateway: npm install -g @anthropic-ai/claude-code; sh examples/clients/claude_code.sh "Say hello."
#
# Its prompt is some 60,000 tokens of a small vocabulary: serve a model with room for that, and with tools; or try it
# on the stand-in: python examples/clients/standin.py --call Bash '{"command": "echo hello"}'
# gateway.model_aliases "claude-*" lets it keep its models' names; else set ANTHROPIC_MODEL.
export ANTHROPIC_BASE_URL="${PDMESH_URL:-http://127.0.0.1:8000}"
export ANTHROPIC_API_KEY="${PDMESH_API_KEY:-none}"
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
exec claude -p "${1:-Say hello with the tool.}" --allowedTools Bash
