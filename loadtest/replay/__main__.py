"""`python -m loadtest.replay`: the same as `mooncake replay`."""

from loadtest.replay.command import main

if __name__ == "__main__":
    main()
