"""`python -m train configs/debug.py`: the same as `jaxslm train configs/debug.py`."""

import sys

from jaxslm.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
