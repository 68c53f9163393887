"""vLLM's own tests of its HTTP API, run against meshes with random weights.

Their source distribution and an installed vLLM (for what the tests import) are needed; neither is a part of this
repository, nor are the tests. Only tests that talk to a server are run: its fixture is replaced by one that names a
mesh, which answers to any model's name. Which one it names goes by the flags that the test gives its server: there is
one whose model reasons (``--reasoning-parser``), and one that does not. Models' weights are random, but for what makes
them end their answers, and their reasoning: nobody could wait for one that does not.

Many tests need what no such mesh has, or ask for what vLLM alone does: `WHY` says which fail for that.

    VLLM_VERSION_OVERRIDE=0.32.0 VLLM_TARGET_DEVICE=empty pip download --no-deps --no-binary vllm vllm==0.32.0
    python benchmarks/vllm_api_tests.py UNPACKED_SDIST VENV/bin/python [--json RESULTS] [-- PYTEST_OPTIONS]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from report import Limits
from safetensors.numpy import load_file, save_file

from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.testing.mesh import running_mesh
from pdmesh.testing.reference import HfReference
from pdmesh.testing.tokenizers import EOS_TOKEN, TOOL_TEMPLATE

#: Folders of tests about text; files in them that use the server's fixture are taken.
FOLDERS = (
    "entrypoints/openai",
    "entrypoints/anthropic",
    "entrypoints/serve/tokenize",
    "entrypoints/serve/instrumentator",
)

#: Of 261 (vLLM on a CPU passes 174 of its own).
LEAST_PASSED = 200

#: What the tests take for granted: ids up to 5,000, and room for 10,000 tokens.
VOCAB_SIZE, CONTEXT = 8192, 32_768

#: Tokens of an answer whose request sets no limit.
LONGEST_ANSWER = 200

#: An answer that is drawn greedily is these many rare words and its end, with the end of reasoning in the middle; a
#: sampled one leaves them and comes back. Logits of other tokens have a deviation of 1.
CHAIN_TOKENS, CHAIN_LOGIT = 14, 11.0

#: The logits of what ends an answer, or its reasoning, anywhere: about one token of eighty, where it is sampled.
END_LOGIT = 5.0

#: What is the same in every hidden state: about as much as all that differs.
CONSTANT = 20.0

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

#: A template whose prompts end within reasoning, unless that is turned off.
_ANSWER = "<|im_start|>assistant\n"
THINKING_TEMPLATE = TOOL_TEMPLATE.replace(
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
    ("a model that ends its texts where a schema sets no limit", r"Unterminated|CalendarEvent"),
    ("an answer of a certain length", r"'stop' == 'length'|'completed' == 'incomplete'|never appeared|0.0 > 0|0 == 1"),
    ("vLLM's own fields or endpoints, which pdmesh lacks", r"/batch|invocations|beam|input_messages|output_messages"),
    ("vLLM's own fields or endpoints, which pdmesh lacks", r"background|got -1|by_reason|cache_usage: assert 0"),
    (
        "another wording, type or status where both refuse, or both accept",
        r"greater_than_equal|APIStatusError|got `str`",
    ),
    ("a cache that is empty to the last block", r"e-0\d == 0.0"),
)

UTILS = """
import os
import pathlib

import anthropic
import openai
import pytest


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model=None, args=(), *others, **kwargs):
        flags = [str(each) for each in args or ()]
        self.url_root = os.environ["PDMESH_THINKING_URL" if "--reasoning-parser" in flags else "PDMESH_TEST_URL"]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def url_for(self, *parts):
        return "/".join([self.url_root, *parts])

    def _options(self, kwargs, suffix):
        return {"base_url": self.url_root + suffix, "api_key": self.DUMMY_API_KEY, "max_retries": 0, **kwargs}

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


def pytest_collection_modifyitems(config, items):
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
    parser.add_argument("--options", nargs="*", default=[], help="for pytest, without their leading dashes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = lay_out(arguments.sdist / "tests", folder / "tests", arguments.folders)
        plain = ending_model(folder / "plain", TOOL_TEMPLATE)
        thinking = ending_model(folder / "thinking", THINKING_TEMPLATE)
        with served(folder / "a", plain) as url, served(folder / "b", thinking) as thinking_url:
            variables = {
                "PDMESH_TEST_URL": url,
                "PDMESH_THINKING_URL": thinking_url,
                "PDMESH_TEST_MODEL": str(plain),
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
    limits = Limits()
    verdict = limits.at_least("tests passed", by_outcome["passed"], LEAST_PASSED)
    print(f"{by_outcome['passed']} of {len(outcomes)} passed ({verdict}): {dict(by_outcome)}")
    limits.end()


def reason_of(failure: str) -> str:
    """Return why a test failed, by its name and its message."""
    return next((reason for reason, pattern in WHY if re.search(pattern, failure)), "a reason to be found")


def ending_model(directory: Path, template: str) -> Path:
    """Write a model whose answers end, and whose reasoning does: random weights, but for that."""
    write_checkpoint(
        directory,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        template=template,
        tie_word_embeddings=False,
    )
    tokenizer_file, weights_file = directory / "tokenizer.json", directory / "model.safetensors"
    tokenizer = json.loads(tokenizer_file.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    ends = [vocabulary[EOS_TOKEN]]
    if THINK_OPEN in template:  # its markers take the places of the last two words
        words = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
        tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) not in words]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        for word, marker in zip(words, (THINK_OPEN, THINK_CLOSE), strict=True):
            tokenizer["added_tokens"].append({"id": vocabulary.pop(word), "content": marker, **flags})
        ends.append(VOCAB_SIZE - 1)
        tokenizer_file.write_text(json.dumps(tokenizer))
    chain = sorted(vocabulary.values())[-CHAIN_TOKENS - 2 :][:CHAIN_TOKENS]  # rare words
    chain = [*chain[: CHAIN_TOKENS // 2], *ends[1:], *chain[CHAIN_TOKENS // 2 :], ends[0]]
    # A part of every hidden state is always the same; the rest is mostly the last token's.
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
    head[chain[0], 0] = CHAIN_LOGIT / constant  # whatever comes before
    for end in ends:
        head[end, 0] = END_LOGIT / constant
    for number, token_id in enumerate(chain[1:], start=1):
        behind = np.mean([reference.embedding([*prompt, *chain[:number]]) for prompt in prompts[:4]], axis=0)
        own = behind - elsewhere.mean(axis=0)
        head[token_id] += (CHAIN_LOGIT + 4) / float(own @ behind) * own
    save_file(tensors, weights_file, metadata={"format": "pt"})
    return directory


@contextmanager
def served(folder: Path, model: Path) -> Iterator[str]:
    """Serve a model within the block, by any name; yields the URL."""
    settings = {
        "GATEWAY_MODEL_ALIASES": "*",
        "GATEWAY_DEFAULT_MAX_TOKENS": str(LONGEST_ANSWER),
        "WORKER_SERVED_MODEL_NAME": "Qwen/Qwen3-0.6B",
    }
    folder.mkdir()
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
