"""Other libraries' front doors, thin: each module is imported where it is asked for."""
