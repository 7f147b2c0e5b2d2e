import sys

from nvfp4_cli import main

sys.exit(main())
