"""A process that renders one request's template within limits: a JSON job on stdin, a JSON result on stdout."""

from __future__ import annotations

import os
import resource
import sys

import msgspec

from pdmesh_gateway.histories import ChatTemplate
from pdmesh_gateway.templates import TemplateFailed, compile_template

#: The limit includes the process's own start, which takes 0.4 s. Templates of long conversations take hundredths.
CPU_LIMIT_S = 1
MEMORY_LIMIT_BYTES = 1024**3
#: Gives streams on the same cores precedence.
NICENESS = 5
MAX_TEXT_CHARS = 32 * 1024 * 1024


def main() -> int:
    """Render one job, and return the exit code. The kernel kills the process at the limits."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    job = msgspec.json.decode(sys.stdin.buffer.read())
    try:
        variables = {"messages": [], **job["variables"]}
        template = ChatTemplate(compile_template(job["source"]), variables, is_for_tools=bool(variables.get("tools")))
        text = template.render(variables, tool_format=job["tool_format"])
        result = {"text": text} if len(text) <= MAX_TEXT_CHARS else {"error": "its text is too long"}
    except TemplateFailed as failed:
        result = {"error": str(failed)}
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
