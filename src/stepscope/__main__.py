"""`python -m stepscope` is the command `stepscope`."""

from stepscope.cli.main import main

main()
