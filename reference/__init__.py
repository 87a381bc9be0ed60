"""Writes the pages of docs/ that are made from the code; `make docs` runs each module."""
