"""Adapters to other libraries. Import the submodule of the library that you use."""
