"""Generates the Grafana boards; `python -m grafana.dashboards` writes them."""
