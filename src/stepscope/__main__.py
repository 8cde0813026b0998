"""`python -m stepscope` runs the command `stepscope`."""

from stepscope.cli.main import main

if __name__ == "__main__":
    main()
