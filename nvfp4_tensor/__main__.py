import sys

from nvfp4_tensor.cli import main

sys.exit(main())
