"""`python -m rltool` is `rltool`."""

from rltool.cli import main

if __name__ == "__main__":
    main()
