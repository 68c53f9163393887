"""vLLM's own tests of its HTTP API, run against a mesh with random weights.

Their source distribution and an installed vLLM (for what the tests import) are needed; neither is a part of this
repository, nor are the tests. Only tests that talk to a server are run: its fixture is replaced by one that names the
mesh, which answers to any model's name.

    VLLM_VERSION_OVERRIDE=0.32.0 VLLM_TARGET_DEVICE=empty pip download --no-deps --no-binary vllm vllm==0.32.0
    python benchmarks/vllm_api_tests.py UNPACKED_SDIST VENV/bin/python [--json RESULTS] [-- PYTEST_OPTIONS]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from report import Limits

from pdmesh.testing.checkpoints import write_checkpoint
from pdmesh.testing.mesh import running_mesh
from pdmesh.testing.tokenizers import TOOL_TEMPLATE

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

#: Random weights seldom end an answer by themselves.
LONGEST_ANSWER = 200

UTILS = """
import os

import anthropic
import openai


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model=None, *args, **kwargs):
        self.url_root = os.environ["PDMESH_TEST_URL"]

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
        settings = {"GATEWAY_MODEL_ALIASES": "*", "GATEWAY_DEFAULT_MAX_TOKENS": str(LONGEST_ANSWER)}
        model = write_checkpoint(
            folder / "model", vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, template=TOOL_TEMPLATE
        )
        with running_mesh(folder, model=model, settings=settings) as mesh:
            url = f"http://{mesh.record.http_address}"
            outcomes = run(arguments.python, folder, tests, url, model, arguments.options)
    by_outcome = Counter(outcome for outcome, _ in outcomes.values())
    for test, (outcome, why) in sorted(outcomes.items()):
        if outcome != "passed":
            print(f"{outcome:8} {test}: {why}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcomes, indent=1))
    limits = Limits()
    verdict = limits.at_least("tests passed", by_outcome["passed"], LEAST_PASSED)
    print(f"{by_outcome['passed']} of {len(outcomes)} passed ({verdict}): {dict(by_outcome)}")
    limits.end()


def lay_out(source: Path, target: Path, folders: list[str]) -> list[Path]:
    """Copy what is run into a temporary package of our own helpers; return its test files."""
    for folder in folders:
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("*.pyc"))
    for package in (target, *(path for path in target.rglob("*") if path.is_dir())):
        (package / "__init__.py").touch()
    shutil.copy(source / "entrypoints/conftest.py", target / "entrypoints/conftest.py")
    (target / "utils.py").write_text(UTILS)
    (target / "conftest.py").write_text(CONFTEST)
    return [file for file in sorted(target.rglob("test_*.py")) if "RemoteOpenAIServer" in file.read_text()]


def run(
    python: Path, folder: Path, tests: list[Path], url: str, model: Path, options: list[str]
) -> dict[str, tuple[str, str]]:
    """Each test's outcome, and the first line of why."""
    report = folder / "report.xml"
    environ = {
        **os.environ,
        "PDMESH_TEST_URL": url,
        "PDMESH_TEST_MODEL": str(model),
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
