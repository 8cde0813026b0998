"""`stepscope mcp`: serve the analysis to agents and editors over the Model Context Protocol."""

import os
import signal
import sys

from stepscope.cli.output import say
from stepscope.errors import Exit, StepscopeError


def mcp() -> None:
    """Serve the analysis to agents and editors over the Model Context Protocol, on standard input and output.

    A client starts this command; docs/mcp.md has the configuration for common ones. Tools: load, findings, questions,
    table, compare, kernel, rule. Files are only read.
    """
    try:
        from stepscope.api.mcp_server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("mcp", "mcp_types", "pydantic"):
            raise
        raise StepscopeError("the MCP SDK is not installed", hint="pip install 'stepscope[mcp]'") from None
    if sys.stdin is not None and sys.stdin.isatty():
        say("waiting for an MCP client on standard input; Ctrl-D ends")
    # An exception would wait for the thread that reads standard input. Nothing is written, so nothing is lost.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(Exit.INTERRUPTED))
    serve()
