"""`python -m fulldepth` is the `fulldepth` command."""

from fulldepth.cli import main

if __name__ == "__main__":
    main()
