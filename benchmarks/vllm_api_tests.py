"""vLLM's own tests of its HTTP API, run against meshes with random weights.

Their source distribution and an installed vLLM (for what the tests import) are needed; neither is a part of this
repository, nor are the tests. Only tests that talk to a server are run: its fixture is replaced by one that asks this
script for a mesh, which answers to any model's name, and has those of the server's flags that pdmesh has a setting for
(`Server`). Models' weights are random, but for what the tests take for granted of any good model: that it ends its
answers, its reasoning, and its texts and numbers in JSON (nobody could wait for one that does not); that it calls a
tool, where a module is about tools that are called by the model's choice (`CALLING`); that it goes on, where a module
watches requests under way (`ENDLESS`).

Many tests need what no such mesh has, or ask for what vLLM alone does: `WHY` says which fail for that.

    VLLM_VERSION_OVERRIDE=0.32.0 VLLM_TARGET_DEVICE=empty pip download --no-deps --no-binary vllm vllm==0.32.0
    python benchmarks/vllm_api_tests.py UNPACKED_SDIST VENV/bin/python [--json RESULTS] [--only REGEX]

The venv needs pytest, pytest-asyncio, pytest-timeout and schemathesis, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from report import Limits
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from pdmesh.apikeys import ApiKey, entry_of, hash_key
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.mesh import running_mesh
from pdmesh_testing.reference import HfReference
from pdmesh_testing.tokenizers import EOS_TOKEN, TOOL_TEMPLATE

#: Folders of tests about text; files in them that use the server's fixture are taken.
FOLDERS = (
    "entrypoints/openai",
    "entrypoints/anthropic",
    "entrypoints/serve/tokenize",
    "entrypoints/serve/instrumentator",
)

#: Of 271 (vLLM on a CPU passes 174 of 261 with its own models).
LEAST_PASSED = 200

#: What the tests take for granted: ids up to 5,000, and room for 10,000 tokens.
VOCAB_SIZE, CONTEXT = 8192, 32_768

#: Tokens of an answer whose request sets no limit.
LONGEST_ANSWER = 800

#: An answer that is drawn greedily is these many rare words and its end, with the end of reasoning in the middle; a
#: sampled one leaves them and comes back. Logits of other tokens have a deviation of 1.
CHAIN_TOKENS = 40

#: The logits of what ends an answer, or its reasoning, anywhere: about one token of eighty, where it is sampled.
END_LOGIT = 5.0

#: The same of what ends texts, numbers, objects and lists in JSON, and of the mark that ends a call.
JSON_LOGITS = {",": 8.0, "}": 8.5, "]": 8.5}
CALL_OPEN, CALL_CLOSE, CALL_END_LOGIT = "<tool_call>", "</tool_call>", 6.0

#: Modules of tests whose model is to call a tool if it may, and those whose model is not to end its answers.
CALLING = r"function_calling|test_return_token_ids|responses\.test_(harmony|parsable)|test_serving_chat|anthropic"
ENDLESS = r"serve\.instrumentator"

#: Modules of tests whose model's samples are to differ.
VARIED = r"openai\.completion\."

#: What is the same in every hidden state: about as much as all that differs.
CONSTANT = 20.0

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

#: A template that lists tools in the system message, as Qwen's does.
_SYSTEM_FIRST = "messages[0]['role'] == 'system'"
_WITH_SYSTEM = "{% if " + _SYSTEM_FIRST + " %}{{ messages[0]['content'] + '\n\n' }}{% endif %}# Tools"
_REST = "(messages[1:] if tools and " + _SYSTEM_FIRST + " else messages)"
TEMPLATE = TOOL_TEMPLATE.replace("# Tools", _WITH_SYSTEM).replace("message in messages", f"message in {_REST}")

#: The same, whose prompts end within reasoning unless that is turned off.
_ANSWER = "<|im_start|>assistant\n"
THINKING_TEMPLATE = TEMPLATE.replace(
    _ANSWER, _ANSWER + THINK_OPEN + "\n{% if enable_thinking is false %}\n" + THINK_CLOSE + "\n\n{% endif %}"
)

#: Why tests fail, by a regular expression for a test's name and its failure.
WHY: tuple[tuple[str, str], ...] = (
    ("a server's flag or file of vLLM's own", r"test_uds|test_root_path|orca|show_hidden|force_include|show_version"),
    (
        "a server's flag or file of vLLM's own",
        r"32768 == 8192|kv_transfer|watermark|test_openai_schema",
    ),
    ("something to download", r"vllm-public-assets|tensorizer|prompt_embeds|ModelConfig|lmeval|lora_resolvers"),
    ("images", r"vlm|url_for|image"),
    ("gpt-oss, its built-in tools or an MCP server", r"harmony|TestGPTOSS|mcp|parsable_context"),
    (
        "the tokenizer or the template of the model named",
        r"CompletionUsa|9 == 6|test_return_tokens_as|chat_with_tools",
    ),
    ("the tokenizer or the template of the model named", r"test_return_token_ids|test_check_models"),
    ("a model that knows something", r"function_calling|tool_use|Spanish|'2'|common saying|AssertionError: {}|2 == 1"),
    ("a model that says something else the second time", r"'Kotlin' != 'Kotlin'|unique completions"),
    ("a model that ends its texts where a schema sets no limit", r"Unterminated|CalendarEvent"),
    ("an answer of a certain length", r"'stop' == 'length'|'completed' == 'incomplete'|never appeared|0.0 > 0|0 == 1"),
    ("vLLM's own fields, which pdmesh lacks", r"beam|got -1|logprobs.*Expected `bool|cache_usage: assert 0"),
    ("metrics of single steps, which are the instances'", r"by_reason|iteration_tokens"),
    (
        "another wording, type or status where both refuse, or both accept",
        r"greater_than_equal|APIStatusError|got `str`",
    ),
    ("a cache that is empty to the last block", r"e-0\d == 0.0"),
)

UTILS = """
import json
import os
import pathlib
import sys
import urllib.request

import anthropic
import openai
import pytest


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(self, model=None, args=(), *others, env_dict=None, **kwargs):
        module = sys._getframe(1).f_globals["__name__"]
        asked = {"module": module, "flags": [str(each) for each in args or ()], "env": dict(env_dict or {})}
        request = urllib.request.Request(os.environ["PDMESH_MESHES"], json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=120) as response:
            self.url_root = response.read().decode()
        self.host, _, self.port = self.url_root.removeprefix("http://").partition(":")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def url_for(self, *parts):
        return "/".join([self.url_root, *parts])

    def _options(self, kwargs, suffix):
        fixed = {"base_url": self.url_root + suffix, "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600}
        return {**fixed, **kwargs}

    def get_client(self, **kwargs):
        return openai.OpenAI(**self._options(kwargs, "/v1"))

    def get_async_client(self, **kwargs):
        return openai.AsyncOpenAI(**self._options(kwargs, "/v1"))

    def get_client_anthropic(self, **kwargs):
        return anthropic.Anthropic(**self._options(kwargs, ""))

    def get_async_client_anthropic(self, **kwargs):
        return anthropic.AsyncAnthropic(**self._options(kwargs, ""))


RemoteVLLMServer = RemoteLaunchRenderServer = RemoteOpenAIServerCustom = RemoteOpenAIServer
VLLM_PATH = pathlib.Path(os.environ["VLLM_SDIST"])


def multi_gpu_only(num_gpus):
    return pytest.mark.skip(reason="needs several GPUs")


def requires_fp8(test):
    return pytest.mark.skip(reason="needs a GPU")(test)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return {} if "ENV" in name else []
"""

CONFTEST = """
import os

import pytest
import transformers

import huggingface_hub

import vllm.config
import vllm.tokenizers


class LocalAssetServer:
    pass


@pytest.fixture
def local_asset_server():
    return None


# Adapters that a fixture would load.
huggingface_hub.HfApi.snapshot_download = lambda *args, **kwargs: "/nonexistent"
_local = os.environ["PDMESH_TEST_MODEL"]
_from_pretrained = transformers.AutoTokenizer.from_pretrained


def _tokenizer(*args, **kwargs):
    return _from_pretrained(_local)


transformers.AutoTokenizer.from_pretrained = _tokenizer
vllm.tokenizers.get_tokenizer = _tokenizer


def _config(model=None, **kwargs):
    return vllm.config.ModelConfig(model=_local, **kwargs)


def pytest_collection_modifyitems(config, items):
    for module in {item.module for item in items}:
        if getattr(module, "ModelConfig", None) is vllm.config.ModelConfig:
            module.ModelConfig = _config
    uses = [item for item in items if any("server" in name or "client" in name for name in item.fixturenames)]
    config.hook.pytest_deselected(items=[item for item in items if item not in uses])
    items[:] = uses
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("--json", type=Path, help="write each test's outcome")
    parser.add_argument("--folders", nargs="*", default=FOLDERS)
    parser.add_argument("--only", default="", help="run only files whose path matches this regular expression")
    parser.add_argument("--options", nargs="*", default=[], help="for pytest, without their leading dashes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = lay_out(arguments.sdist / "tests", folder / "tests", arguments.folders)
        tests = [file for file in tests if re.search(arguments.only, str(file.relative_to(folder)))]
        with meshes(folder) as url:
            variables = {
                "PDMESH_MESHES": url,
                "PDMESH_TEST_MODEL": str(tests_model(folder / "tokenizer")),
                "VLLM_SDIST": str(arguments.sdist),
            }
            outcomes = run(arguments.python, folder, tests, variables, arguments.options)
    by_outcome = Counter(outcome for outcome, _ in outcomes.values())
    by_reason: Counter[str] = Counter()
    for test, (outcome, why) in sorted(outcomes.items()):
        if outcome != "passed":
            print(f"{outcome:8} {test}: {why}")
        if outcome in ("failed", "error"):
            by_reason[reason_of(f"{test}: {why}")] += 1
    for reason, number in by_reason.most_common():
        print(f"{number:4} failed for {reason}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcomes, indent=1))
    passed = f"{by_outcome['passed']} of {len(outcomes)} passed"
    if arguments.only:
        print(f"{passed}: {dict(by_outcome)}")
        return
    limits = Limits()
    verdict = limits.at_least("tests passed", by_outcome["passed"], LEAST_PASSED)
    print(f"{passed} ({verdict}): {dict(by_outcome)}")
    limits.end()


def reason_of(failure: str) -> str:
    """Return why a test failed, by its name and its message."""
    return next((reason for reason, pattern in WHY if re.search(pattern, failure)), "a reason to be found")


@dataclass(frozen=True)
class Logits:
    """Logits of a chain's next word, of its first word anywhere, of the way around a forbidden word, and of ``"``."""

    chain: float = 15.0
    first: float = 11.0
    detour: float = 13.0
    quote: float = 8.0


@dataclass(frozen=True)
class Model:
    """What a model does beside ending its answers."""

    thinks: bool = False
    calls: bool = False
    is_endless: bool = False
    logits: Logits = Logits()


@dataclass(frozen=True)
class Server:
    """A mesh as a test's server is to be; ``is_own`` if it is nobody else's, as one whose metrics are counted."""

    model: Model
    max_model_len: str = ""
    root_path: str = ""
    api_key: str = ""
    forces_usage: bool = False
    names_ids: bool = False
    is_own: bool = False


def server_of(asked: Mapping[str, Any]) -> Server:
    """Return the mesh for a test's server, by the module that asks for it, its flags and its environment."""
    module, flags = asked["module"], asked["flags"]

    def value(*names: str) -> str:
        return next((flags[i + 1] for i, flag in enumerate(flags[:-1]) if flag in names), "")

    is_endless, thinks = re.search(ENDLESS, module) is not None, "--reasoning-parser" in flags
    calls = not is_endless and re.search(CALLING, module) is not None
    logits = Logits(quote=9.0) if calls and not thinks else Logits()
    if re.search(VARIED, module):
        logits = Logits(chain=13.0, first=10.0, detour=11.5)
    model = Model(thinks=thinks, calls=calls, is_endless=is_endless, logits=logits)
    return Server(
        model,
        max_model_len=value("--max-model-len") if "tokenize" in module else "",
        root_path=value("--root-path"),
        api_key=asked["env"].get("VLLM_API_KEY", ""),
        forces_usage="--enable-force-include-usage" in flags,
        names_ids="--return-tokens-as-token-ids" in flags,
        is_own=is_endless,
    )


@contextmanager
def meshes(folder: Path) -> Iterator[str]:
    """Start meshes that tests ask for within the block; yields the URL to ask at."""
    models: dict[Model, Path] = {}
    urls: dict[Server, str] = {}

    def url_of(server: Server) -> str:
        if (url := urls.get(server)) is not None and not server.is_own:
            return url
        if (model := models.get(server.model)) is None:
            model = models[server.model] = drawn_model(folder / f"model{len(models)}", server.model)
        if server.is_own:
            own.close()  # the one before is not needed any more
        stack = own if server.is_own else shared
        urls[server] = stack.enter_context(served(folder / f"mesh{next(numbers)}", model, server))
        return urls[server]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body = url_of(server_of(asked)).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    numbers = itertools.count()
    with ExitStack() as shared, ExitStack() as own, HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def random_model(directory: Path, template: str) -> None:
    """Write a model that does nothing in particular."""
    write_checkpoint(
        directory,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        hidden_size=128,
        template=template,
        tie_word_embeddings=False,
    )


def tests_model(directory: Path) -> Path:
    """Write the model that the tests themselves see: its tokenizer has the markers of all that are served."""
    random_model(directory, TEMPLATE)
    with_markers(directory / "tokenizer.json", [THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE])
    return directory


def drawn_model(directory: Path, model: Model) -> Path:
    """Write a model of random weights that does what it is to do."""
    random_model(directory, THINKING_TEMPLATE if model.thinks else TEMPLATE)
    markers = [*((THINK_OPEN, THINK_CLOSE) if model.thinks else ()), CALL_OPEN, CALL_CLOSE]
    vocabulary = with_markers(directory / "tokenizer.json", markers)
    if not model.is_endless:
        write_ends(directory, model, vocabulary)
    return directory


def with_markers(file: Path, markers: list[str]) -> dict[str, int]:
    """Let markers take the places of a tokenizer's last words; return what it has by then, with the ids."""
    tokenizer = json.loads(file.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)[-len(markers) :]
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) not in words]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for word, marker in zip(words, markers, strict=True):
        tokenizer["added_tokens"].append({"id": vocabulary.pop(word), "content": marker, **flags})
    file.write_text(json.dumps(tokenizer))
    return {**vocabulary, **{each["content"]: each["id"] for each in tokenizer["added_tokens"]}}


def write_ends(directory: Path, model: Model, vocabulary: Mapping[str, int]) -> None:
    """Change a model's weights so that its answers are a chain of words, and all ends."""
    end = vocabulary[EOS_TOKEN]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    # Rare words that can be told from their neighbours when they are encoded again.
    words = [i for text, i in vocabulary.items() if text[0] == "Ġ" and len(text) == 3 and _is_word(tokenizer, text, i)]
    chain = words[-CHAIN_TOKENS:]
    middle = [vocabulary[THINK_CLOSE]] if model.thinks else []
    call = [vocabulary[CALL_OPEN]] if model.calls else []
    thoughts = chain[: CHAIN_TOKENS // 2] if model.thinks else []
    chain = [*thoughts, *middle, *call, *chain[len(thoughts) :], end]
    # A part of every hidden state is always the same; the rest is mostly the last token's.
    weights_file = directory / "model.safetensors"
    tensors = load_file(weights_file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.3
            tensor[0] = 0
    tensors["model.embed_tokens.weight"][:, 0] = CONSTANT
    tensors["model.norm.weight"][0] = 1
    head = tensors["lm_head.weight"]
    head[:, 0] = 0
    save_file(tensors, weights_file, metadata={"format": "pt"})
    reference = HfReference(directory)
    prompts = [list(range(start, 3 * start)) for start in range(5, 100, 10)]
    elsewhere = np.array([reference.embedding(prompt) for prompt in prompts])
    head *= 1 / float((elsewhere @ head.T).std())
    head[chain] = 0
    constant = float(elsewhere[:, 0].mean())
    logits = {**{vocabulary[text]: logit for text, logit in JSON_LOGITS.items()}, end: END_LOGIT}
    logits[vocabulary['"']] = model.logits.quote
    logits |= dict.fromkeys(middle, END_LOGIT) | {vocabulary[CALL_CLOSE]: CALL_END_LOGIT}
    for token_id, logit in (*logits.items(), (chain[0], model.logits.first)):  # whatever comes before
        head[token_id, 0] = logit / constant
    links = [(chain[:number], token_id, model.logits.chain) for number, token_id in enumerate(chain[1:], start=1)]
    if model.thinks:
        links.append((thoughts, chain[len(thoughts) + 1], model.logits.detour))
    links += [(chain[:-1], vocabulary['"'], model.logits.detour), ([vocabulary[CALL_CLOSE]], end, model.logits.chain)]
    for before, token_id, logit in links:
        behind = np.mean([reference.embedding([*prompt, *before]) for prompt in prompts[:4]], axis=0)
        own = behind - elsewhere.mean(axis=0)
        own[0] = 0
        head[token_id] += logit / float(own @ behind) * own
    save_file(tensors, weights_file, metadata={"format": "pt"})


def _is_word(tokenizer: Tokenizer, text: str, token_id: int) -> bool:
    return tokenizer.encode(text.replace("Ġ", " "), add_special_tokens=False).ids == [token_id]


@contextmanager
def served(folder: Path, model: Path, server: Server) -> Iterator[str]:
    """Serve a model within the block, by any name; yields the URL."""
    settings = {
        "GATEWAY_MODEL_ALIASES": "*",
        "GATEWAY_DEFAULT_MAX_TOKENS": str(LONGEST_ANSWER),
        "WORKER_SERVED_MODEL_NAME": "Qwen/Qwen3-0.6B",
    }
    if server.max_model_len:
        settings["WORKER_MAX_MODEL_LEN"] = server.max_model_len
    if server.root_path:
        settings["GATEWAY_ROOT_PATH"] = server.root_path
    if server.forces_usage:
        settings["GATEWAY_FORCE_INCLUDE_USAGE"] = "true"
    if server.names_ids:
        settings["GATEWAY_RETURN_TOKENS_AS_TOKEN_IDS"] = "true"
    folder.mkdir()
    if server.api_key:
        keys = folder / "keys.toml"
        keys.write_text(entry_of(ApiKey(name="tests", hash=hash_key(server.api_key))))
        settings["SECURITY_API_KEYS_FILE"] = str(keys)
    with running_mesh(folder, model=model, settings=settings) as mesh:
        yield f"http://{mesh.record.http_address}"


def lay_out(source: Path, target: Path, folders: list[str]) -> list[Path]:
    """Copy what is run into a temporary package of our own helpers; return its test files."""
    for folder in folders:
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("*.pyc"))
    for package in (target, *(path for path in target.rglob("*") if path.is_dir())):
        (package / "__init__.py").touch()
    shutil.copy(source / "entrypoints/conftest.py", target / "entrypoints/conftest.py")
    (target / "utils.py").write_text(UTILS)
    (target / "conftest.py").write_text(CONFTEST)
    # What vLLM's own server would need for its tests of gpt-oss, which only ask whether it is there.
    (target.parent / "gpt_oss").mkdir()
    (target.parent / "gpt_oss/__init__.py").touch()
    return [file for file in sorted(target.rglob("test_*.py")) if "RemoteOpenAIServer" in file.read_text()]


def run(
    python: Path, folder: Path, tests: list[Path], variables: Mapping[str, str], options: list[str]
) -> dict[str, tuple[str, str]]:
    """Each test's outcome, and the first line of why."""
    report = folder / "report.xml"
    environ = {
        **os.environ,
        **variables,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(folder),
    }
    command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider", "--timeout=60"]
    command += ["--asyncio-mode=auto", "--continue-on-collection-errors", *(f"--{option}" for option in options)]
    subprocess.run([*command, *map(str, tests)], cwd=folder, env=environ, check=False)
    outcomes: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('tests.entrypoints.')}::{case.get('name')}"
        outcomes[name] = ("passed", "")
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                why = (child.get("message") or "").partition("\n")[0]
                outcomes[name] = ({"failure": "failed"}.get(child.tag, child.tag), why[:200])
    return outcomes


if __name__ == "__main__":
    main()
