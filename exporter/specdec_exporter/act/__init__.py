"""Changing k: where it is written, how the server is restarted, and what is known after a crash."""
