"""Real coding agents against our server with a scripted model: each reads a file, edits it and runs a command.

The programs come from npm, in the versions pinned here, into a folder that is kept. Nothing outside this machine can be
reached by them: their proxy is an address at which nobody listens.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from sparkdraft.cli.launch import PROGRAMS, ask
from tests.server.conftest import Live, live
from tests.server.scripted import Scripted

pytestmark = pytest.mark.slow
NODE = "24.21.0"  # newer than most machines have, and some programs need it
TASK = "Read notes.txt, change blue to green in it, then show it."
SECONDS = 240.0
Calls = Callable[[str], list[tuple[str, dict[str, object]]]]


class Agent(NamedTuple):
    package: str
    version: str
    words: list[str]  # behind those of `sparkdraft launch`
    calls: Calls  # by the path of the file: the tool calls that the model makes
    launch: str = ""  # the program's name there, if it is not the agent's
    variables: Mapping[str, str] = MappingProxyType({})  # over those of `sparkdraft launch`; {url} is the server's


def edits(read: str, edit: str, run: str, path: str, old: str, new: str) -> Calls:
    """Calls of tools that most programs have, with their own names of tools and arguments."""
    return lambda file: [
        (read, {path: file}),
        (edit, {path: file, old: "blue", new: "green"}),
        (run, {"command": "cat notes.txt", "description": "Show the file"}),
    ]


def shell(file: str) -> list[tuple[str, dict[str, object]]]:
    commands = ["cat notes.txt", "sed -i s/blue/green/ notes.txt", "cat notes.txt"]
    return [("exec_command", {"cmd": command}) for command in commands]


CLAUDE = ["-p", TASK, "--allowedTools", "Read", "Edit", "Bash"]
CODEX = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK]
COPILOT = ["--allow-all-tools", "-p", TASK]
VIEW = edits("view", "edit", "bash", "path", "old_str", "new_str")
AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code",
        "2.1.327",
        CLAUDE,
        edits("Read", "Edit", "Bash", "file_path", "old_string", "new_string"),
    ),
    "codex": Agent("@openai/codex", "0.169.0", CODEX, shell),
    "copilot-chat": Agent("@github/copilot", "1.0.102", COPILOT, VIEW, "copilot"),
    "copilot-messages": Agent(
        "@github/copilot",
        "1.0.102",
        COPILOT,
        VIEW,
        "copilot",
        {"COPILOT_PROVIDER_TYPE": "anthropic", "COPILOT_PROVIDER_BASE_URL": "{url}"},
    ),
    "copilot-responses": Agent(
        "@github/copilot", "1.0.102", COPILOT, VIEW, "copilot", {"COPILOT_PROVIDER_WIRE_API": "responses"}
    ),
    "opencode": Agent(
        "opencode-ai", "1.18.18", ["run", TASK], edits("read", "edit", "bash", "filePath", "oldString", "newString")
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code",
        "0.24.4",
        ["--yolo", "-p", TASK],
        edits("read_file", "edit", "run_shell_command", "file_path", "old_string", "new_string"),
    ),
}


def installed(package: str, version: str) -> Path:
    """The folder with the commands of an npm package, installed if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "sparkdraft-tests" / f"{package.strip('@').replace('/', '-')}-{version}"
    if not (folder / "done").exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("npm is not installed")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        words = ["install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@{version}"]
        done = subprocess.run([npm, *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm cannot install {package}@{version}: {done.stderr.strip()[-200:]}")
        (folder / "done").touch()
    return folder / "node_modules"


@pytest.fixture(scope="module")
def node() -> Path:
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    name = f"node-linux-{machine}"
    return installed(name, NODE) / name / "bin"


def say(calls: list[tuple[str, dict[str, object]]]) -> Callable[..., str]:
    """The next call for each result that the prompt holds, then a text. Requests without tools are for titles."""

    def answer(prompt: str, params: object) -> str:
        number = prompt.count("<tool_response>")
        if "<tool_call>" not in prompt or number >= len(calls):
            return "The sky is green now."
        name, arguments = calls[number]
        return f"I do that.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return answer


def run(agent: Agent, name: str, server: Live, node: Path, work: Path, home: Path) -> subprocess.CompletedProcess[str]:
    program = agent.launch or name
    start = PROGRAMS[program].start(ask(server.url, ""))
    bin_folders = [str(installed(agent.package, agent.version) / ".bin"), str(node)]
    outside = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    variables = {
        "PATH": os.pathsep.join([*bin_folders, "/usr/bin", "/bin"]),
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1,localhost",
        **outside,
        **start.variables,
        **{key: value.format(url=server.url) for key, value in agent.variables.items()},
    }
    command = [shutil.which(program, path=variables["PATH"]) or program, *start.words, *agent.words]
    return subprocess.run(
        command, env=variables, cwd=work, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_reads_edits_and_runs(name: str, node: Path, tmp_path: Path) -> None:
    agent, work, home = AGENTS[name], tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    notes = work / "notes.txt"
    notes.write_text("the sky is blue\n")
    model = Scripted(say(agent.calls(str(notes))))
    with live(model, served_name="scripted") as server:
        done = run(agent, name, server, node, work, home)
    said = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    assert notes.read_text() == "the sky is green\n", said
    assert "The sky is green now." in done.stdout, said
    turns = [(prompt, cached) for prompt, cached in model.turns if "<tool_call>" in prompt]
    assert len(turns) >= 4, said
    hits = [cached for _, cached in turns[-3:]]
    assert hits == sorted(set(hits)), f"cached tokens rise from turn to turn: {hits}"
    for (before, _), (_, cached) in zip(turns[-4:], turns[-3:], strict=False):
        assert cached > len(before) - 200, "a turn prefills what is new and no more"  # a token is a character here
