"""Count the warnings that name the user's line."""

import warnings
from pathlib import Path


def user_warnings(call, file, match, action="always"):
    """Return how many warnings of a call contain ``match``, all of them at a line of ``file``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        call()
    found = [each for each in caught if match in str(each.message)]
    assert {Path(each.filename) for each in found} <= {Path(file)}, [(each.filename, each.lineno) for each in found]
    return len(found)
