"""Never imports torch.

Must: exit with 0, print `done`, and say that torch was never imported. stepscope must not import it either.
"""

import sys
import time

time.sleep(0.1)
assert "torch" not in sys.modules
print("done")
