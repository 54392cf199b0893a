from __future__ import annotations

import json
import sys
from pathlib import Path

from .keep import keep
from .look import look


def main() -> int:
    verb, *more = sys.argv[1:]
    if verb == "keep":
        return keep(Path.home() / more[0])
    print(json.dumps(look(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
