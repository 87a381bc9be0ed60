"""Tests against the real programs: Prometheus, Alertmanager and their tools."""
