"""`python -m fpipe` is the command `fpipe`."""

from fpipe.cli import main

if __name__ == "__main__":
    main()
