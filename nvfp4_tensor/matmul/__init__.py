"""Products: which one runs where, and how."""
