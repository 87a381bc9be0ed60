"""Prometheus exporter for the speculative-decoding metrics of LLM servers."""

from importlib.metadata import version

__version__ = version("specdec-exporter")
