"""`python -m quire`: the command, where its script is not on the PATH."""

from quire.cli.main import main

if __name__ == "__main__":
    main()
