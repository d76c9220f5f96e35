"""`python -m trainwire_cli` is `trainwire`."""

import sys

from .main import main

sys.exit(main())
