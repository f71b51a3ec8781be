"""`python -m tests.drive ENGINE_CLASS CONFIG [key=value ...]`: hsray.extract with another engine."""

import sys

from hsray.extract import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], engine_class=sys.argv[1]))
