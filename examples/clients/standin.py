"""A gateway whose model is a script, to try agents on: it calls one tool, and then says that it is done.

    python examples/clients/standin.py --call Bash '{"command": "echo hello"}'

Agents send prompts that the demo model has no room for. Everything but the model is real: gateway, templates, parsers.
It answers to any model name, and prints its URL.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import anyio
from tokenizers import Tokenizer

from pdmesh.config import GatewayConfig
from pdmesh.model import FinishReason
from pdmesh.wire.messages import Generation, TokenOut, unpack_token_ids
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.running_gateway import running_gateway
from pdmesh_testing.scripted_mesh import Script, scripted_mesh, token_out
from pdmesh_testing.tokenizers import TOOL_TEMPLATE

CONTEXT = 400_000


def calling(tokenizer: Tokenizer, name: str, arguments: str) -> Script:
    """Return a script that calls ``name`` where the prompt has that tool and no result yet, and else answers."""
    call = json.dumps({"name": name, "arguments": json.loads(arguments)})

    def script(generation: Generation) -> list[TokenOut]:
        token_ids = unpack_token_ids(generation.token_ids)[: generation.num_prompt_tokens]
        prompt = tokenizer.decode(token_ids, skip_special_tokens=False)
        has_result = "<tool_response>" in prompt.rpartition("<|im_start|>user")[2]
        wants_call = f'"name": "{name}"' in prompt.partition("</tools>")[0] and not has_result
        text = f"I look.\n<tool_call>\n{call}\n</tool_call>" if wants_call else "All done: the tool was called."
        answer = tokenizer.encode(text, add_special_tokens=False).ids[: generation.params.max_tokens - 1]
        tokens = [token_out(generation, index, token_id) for index, token_id in enumerate(answer)]
        end = token_out(generation, len(answer), generation.params.eos_token_ids[0], finish_reason=FinishReason.STOP)
        return [*tokens, end]

    return script


async def serve(name: str, arguments: str) -> None:
    """Serve until cancelled."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "standin"
        write_checkpoint(model, max_position_embeddings=CONTEXT, template=TOOL_TEMPLATE)
        script = calling(Tokenizer.from_file(str(model / "tokenizer.json")), name, arguments)
        settings = GatewayConfig(model_aliases="*")
        async with scripted_mesh(script) as mesh, running_gateway(model, mesh.address, gateway=settings) as running:
            print(running.url, flush=True)
            await anyio.sleep_forever()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--call", nargs=2, metavar=("NAME", "ARGUMENTS"), default=("weather", '{"city": "Oslo"}'))
    arguments = parser.parse_args()
    anyio.run(serve, *arguments.call)


if __name__ == "__main__":
    main()
