"""``python generate.py --model M --draft-model D --prompt …``: see `workers.generate`."""

import sys

from workers.generate import main

if __name__ == "__main__":
    sys.exit(main())
