"""`stepscope mcp`, with the client of the official SDK over standard input and output."""

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, TextContent

from tests.cli.command import PATIENCE_S, stepscope

ROOT = Path(__file__).parents[2]
TRACE = str(ROOT / "docs/examples/trace.json.gz")
OTHER = str(ROOT / "tests/fixtures/h200_nano_compiled.json.gz")
SNAPSHOT = str(ROOT / "tests/fixtures/h200_tiny_train.pickle.gz")


def connect(folder: Path, use: Callable[[Client], Awaitable[None]]) -> str:
    """Start a server in `folder`, use it, and return what it wrote to standard error."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    server = StdioServerParameters(command=sys.executable, args=["-m", "stepscope", "mcp"], cwd=folder, env=environment)

    async def run() -> None:
        with (folder / "stderr.txt").open("w") as said, anyio.fail_after(PATIENCE_S):
            async with Client(stdio_client(server, errlog=said)) as client:
                await use(client)

    # A thread of its own: browser tests leave an event loop running in the one of pytest.
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(anyio.run, run).result()
    return (folder / "stderr.txt").read_text()


async def ask(client: Client, tool: str, **arguments: object) -> tuple[str, dict[str, Any]]:
    """The text and the document of an answer."""
    result = await client.call_tool(tool, arguments)
    assert isinstance(result, CallToolResult)
    assert not result.is_error, result.content
    assert result.structured_content is not None
    return text_of(result), result.structured_content


async def ask_in_vain(client: Client, tool: str, **arguments: object) -> str:
    result = await client.call_tool(tool, arguments)
    assert isinstance(result, CallToolResult)
    assert result.is_error
    return text_of(result)


def text_of(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


def test_every_tool_answers_with_its_evidence(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"load", "findings", "questions", "table", "compare", "kernel", "rule"}
        assert all(tool.annotations is not None and tool.annotations.read_only_hint for tool in tools.values())

        about_the_trace = [
            await ask(client, "load", path=TRACE),
            await ask(client, "findings", path=TRACE),
            await ask(client, "questions", path=TRACE),
            await ask(client, "table", path=TRACE, name="kernels", top=2),
            await ask(client, "compare", a=TRACE, b=OTHER, by="phase"),
        ]
        for text, document in about_the_trace:
            evidence = document["evidence"][0]
            assert evidence["file"] == TRACE
            assert evidence["source"] == "pytorch profiler"
            assert evidence["clock"]["kind"] == "profiled"
            assert evidence["unit"] == "in the trace"
            assert f"evidence: {TRACE}, pytorch profiler, NVIDIA H200, 5.517 ms in the trace" in text
        (headline, loaded), (fixes, found), (said, answered), (_, shown), (_, compared) = about_the_trace
        assert "idle 89.9%" in headline
        assert loaded["step_ms"] == pytest.approx(5.517447)
        assert found["findings"][0]["code"] == "SS003"
        assert "model = torch.compile(model)" in fixes
        assert answered["answers"][0]["question"] in said
        assert len(shown["tables"][0]["rows"]) == 2
        assert compared["step"]["verdict"] == "cannot tell"
        assert [one["file"] for one in compared["evidence"]] == [TRACE, OTHER]

        _, decoded = await ask(client, "kernel", name="ampere_sgemm_128x64_nn")
        assert decoded["kernel"]["library"] == "cuBLAS"
        text, _ = await ask(client, "rule", code="SS003")
        assert "how it is detected" in text
        _, rules = await ask(client, "rule")
        assert rules["table"]["rows"][0]["code"] == "SS001"

    assert connect(tmp_path, use) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["stderr.txt"]


def test_a_memory_snapshot_has_bytes_and_no_clock(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        _, loaded = await ask(client, "load", path=SNAPSHOT)
        assert loaded["peak_bytes"] == 69343744
        assert loaded["evidence"][0]["clock"] is None
        _, answered = await ask(client, "questions", path=SNAPSHOT)
        assert answered["answers"][0]["evidence"]["rows"][0]["category"] == "parameters"
        assert "this is a memory snapshot" in await ask_in_vain(client, "findings", path=SNAPSHOT)

    assert connect(tmp_path, use) == ""


def test_errors_are_text_with_a_hint_and_the_server_lives_on(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "locked").mkdir(mode=0)

    async def use(client: Client) -> None:
        missing = await ask_in_vain(client, "load", path="missing.json")
        assert missing.startswith(f"error: file not found: `{tmp_path / 'missing.json'}`")
        assert "unrecognized file format" in await ask_in_vain(client, "load", path="notes.txt")
        assert "hint: stepscope rule" in await ask_in_vain(client, "rule", code="SS999")
        for path in ("", "a\0b", "~nobody-has-this-name/x", "x" * 5000, str(tmp_path / "locked" / "x")):
            text = await ask_in_vain(client, "load", path=path)
            assert text.startswith("error: ")
        assert "classes" in await ask_in_vain(client, "table", path=TRACE, name="colors")
        assert "greater than or equal to 1" in await ask_in_vain(client, "table", path=TRACE, top=0)
        await ask(client, "load", path=TRACE)

    assert "Traceback" not in connect(tmp_path, use)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(Path(TRACE).read_bytes())

    async def use(client: Client) -> None:
        _, before = await ask(client, "load", path="trace.json.gz")
        trace.write_bytes(Path(OTHER).read_bytes())
        _, after = await ask(client, "load", path="trace.json.gz")
        assert before["step_ms"] < after["step_ms"]
        trace.unlink()
        assert "file not found" in await ask_in_vain(client, "load", path="trace.json.gz")

    assert connect(tmp_path, use) == ""


def test_output_is_only_protocol_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    """Ctrl-C works although standard input stays open."""
    request = '{"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18", '
    request += '"capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}}\n'
    with subprocess.Popen(
        [sys.executable, "-m", "stepscope", "mcp"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(request)
        server.stdin.flush()
        assert '"serverInfo":{"name":"stepscope"' in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 130
        assert server.stdout.read() == ""


def test_without_the_sdk_the_error_has_the_command(tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise ModuleNotFoundError(\"No module named 'mcp'\", name='mcp')")
    result = stepscope(tmp_path, "mcp", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 2
    assert result.stderr == "error: the MCP SDK is not installed\nhint: pip install 'stepscope[mcp]'\n"
    assert result.stdout == ""
