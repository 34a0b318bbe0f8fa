"""The command `moonshard`: hands over to the program of this package."""

import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "moonshard")
    os.execv(program, ["moonshard"] + sys.argv[1:])


if __name__ == "__main__":
    main()
