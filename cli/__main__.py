"""``python -m pagerelay.cli``: the same as the ``pagerelay`` command."""

import sys

from pagerelay.cli.main import main

sys.exit(main())
