"""`python -m stepscope` is the command `stepscope`."""

from stepscope.cli.main import main

if __name__ == "__main__":
    main()
