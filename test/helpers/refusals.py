"""A test that is a table of calls that raise."""

import pytest


def refuses(*rows, error=ValueError):
    """Return a test of rows (call, error, message), or (call, message): the call raises ``error`` with the message."""
    cases = [(call, which[0] if which else error, message) for call, *which, message in rows]

    @pytest.mark.parametrize(("call", "kind", "message"), cases, ids=[message for *_, message in cases])
    def test(call, kind, message):
        with pytest.raises(kind, match=message):
            call()

    return test
