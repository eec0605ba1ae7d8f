"""``python -m lit_encoders`` is ``lit-encoders``."""

import sys

from lit_encoders.cli import main

if __name__ == "__main__":
    sys.exit(main())
