"""``python -m pdmesh.cli``."""

import sys

from pdmesh.cli import main

sys.exit(main())
