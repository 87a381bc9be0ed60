"""What is wrong with a vLLM's speculation, told before it costs a day.

Inputs become facts, facts become findings: `launch` reads what a server is started with, `log` what
it said while it started, `server` what it shows when it runs, `queries` how Prometheus and Grafana
read it. Only `run` opens files and connections. What the checks say of vLLM stands on 0.32.0.
"""
